"""`args` as functions of Miles know it: one flat namespace of all options, over the run's configuration."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NoReturn

from miles_core.config import RunConfig
from miles_core.config.architecture import NAMES, architecture_of
from miles_core.config.tables import TABLES

ALIASES = MappingProxyType({"grpo_std_normalization": "algorithm.std_normalization"})
"""Names in Miles's namespace that no flag has."""
HOST = "engine.invalid"
"""What functions take for the router's host; it leads to the engine of the run."""
ROUTER = MappingProxyType({"sglang_router_ip": HOST, "sglang_router_port": 0})


class Args:
    """Options by the names of Miles's flags: args.rollout_batch_size. Read only.

    Looks in the tables of the core, at Miles's spellings of their options, for sizes in the checkpoint's config.json,
    in megatron-core's options (what nobody set has Megatron-LM's default) and in those of the run's plugins.
    `sglang_router_ip` and `sglang_router_port` are an address that only miles.utils.http_utils.post knows.

    Raises:
        AttributeError: there is no such option, or somebody tries to set one.
    """

    def __init__(self, config: RunConfig):
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask before there is a configuration
            raise AttributeError(name)
        config: RunConfig = self.__dict__["_config"]
        if name == "tokenizer":
            from miles_core.build import load_tokenizer

            object.__setattr__(self, name, load_tokenizer(config))
            return self.__dict__[name]
        if name in ROUTER:
            return ROUTER[name]
        for find in (_of_core, _of_checkpoint, _of_megatron, _of_plugins):
            if (found := find(config, name)) is not None:
                return found[0]
        raise AttributeError(f"this run has no option {name!r}; docs/flags.md says what became of each flag, and what "
                             "the checkpoint decides is in its config.json")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be set: a run's options are fixed once it begins")


def _of_core(config: RunConfig, name: str) -> tuple[object] | None:
    for table in TABLES:
        if hasattr(getattr(config, table), name):
            return (getattr(getattr(config, table), name),)
    from miles_flags.table import flags

    listed = flags().get("--" + name.replace("_", "-"), {})
    key = ALIASES.get(name, "" if "value" in listed else str(listed.get("key", "")))
    table, _, option = key.partition(".")
    return (getattr(getattr(config, table), option),) if table in TABLES else None


def _of_checkpoint(config: RunConfig, name: str) -> tuple[object] | None:
    field = next((ours for ours, (_, megatron) in NAMES.items() if megatron == name), None)
    value = None if field is None else getattr(architecture_of(config), field)
    return None if value is None else (value,)


def _of_megatron(config: RunConfig, name: str) -> tuple[object] | None:
    """What was set, else Megatron-LM's default; no default of what only the checkpoint knows."""
    from miles_megatron.flags import megatron_lm_defaults
    from miles_megatron.surface import surface

    if name in config.surface("megatron"):
        return (config.surface("megatron")[name],)
    if name not in surface() or surface()[name].table == "model":
        return None
    return (megatron_lm_defaults().get(name, surface()[name].default),)


def _of_plugins(config: RunConfig, name: str) -> tuple[object] | None:
    for given in config.options.values():
        if name in given:
            return (given[name],)
    from miles_core.plugins.manifest import of_package
    from miles_core.plugins.scan import installed

    for one in installed():
        if one.name in config.options:
            options = of_package(one.entry, one.name).options
            if name in options:
                return (options[name].default,)
    return None
