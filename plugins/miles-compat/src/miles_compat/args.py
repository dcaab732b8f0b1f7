"""`args` as functions of Miles know it: one flat namespace of all options, over the run's configuration."""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miles_megatron.architecture import NAMES, architecture_of

from miles_core.config import RunConfig
from miles_core.config.load import config_json
from miles_core.config.tables import TABLES

ALIASES = MappingProxyType({"grpo_std_normalization": "algorithm.std_normalization"})
"""Names in Miles's namespace that no flag has."""
HOST = "engine.invalid"
"""What functions take for the router's host; it leads to the engine of the run."""
SHARED = ("tokenizer",)
"""What a function may set and copies of `args` have in common all the same."""


class Args:
    """Options by the names of Miles's flags: args.rollout_batch_size.

    Looks in the keys of --custom-config-path, the tables of the core, at Miles's spellings of their options, for what
    the checkpoint's config.json says, in megatron-core's options (what nobody set has Megatron-LM's default) and in
    those of the run's plugins. What has no place here reads as the default of Miles's parser. `sglang_router_ip` and
    `sglang_router_port` are an address that only miles.utils.http_utils.post knows.

    Functions may set names of their own. An option of the run can be changed in a copy alone (copy.deepcopy, and what
    a generate function is given), since the run does not look at it again.

    Args:
        overlay: names whose values come before all others.
        made: the tokenizer, what reads rows, and plugins whose scorers functions ask; all copies have them in common.
        free: it is such a copy.

    Raises:
        AttributeError: there is no such option, or somebody tries to change one for the run.
    """

    def __init__(self, config: RunConfig, overlay: Mapping[str, Any] = MappingProxyType({}), *,
                 made: dict[str, Any] | None = None, free: bool = False):
        vars(self).update(_config=config, _overlay=dict(overlay), _made={} if made is None else made, _free=free)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask before there is a configuration
            raise AttributeError(name)
        config, overlay = self.__dict__["_config"], self.__dict__["_overlay"]
        if name in overlay:
            return overlay[name]
        if name == "tokenizer":
            from miles_core.build import load_tokenizer

            made: dict[str, Any] = self.__dict__["_made"]
            return made[name] if name in made else made.setdefault(name, load_tokenizer(config))
        if name in DERIVED:
            return DERIVED[name](self)
        for find in (_of_core, _of_checkpoint, _of_megatron, _of_plugins, _of_parser):
            if (found := find(config, name)) is not None:
                return found[0]
        raise AttributeError(f"this run has no option {name!r}; docs/flags.md says what became of each flag, and what "
                             "the checkpoint decides is in its config.json")

    def __setattr__(self, name: str, value: object) -> None:
        own = name in self._overlay or not hasattr(self, name)
        if not (own or self._free or getattr(self, name) == value):
            raise AttributeError(f"args.{name} cannot be set: the run's options are fixed once it begins, so change "
                                 "the flag, or a copy.deepcopy(args)")
        self._overlay[name] = value

    def add_defaults(self, function: object) -> None:
        """Options that a function declares itself, by its add_arguments(parser): what nobody set has their defaults."""
        declare = getattr(function, "add_arguments", None)
        if declare is not None:
            parser = argparse.ArgumentParser()
            declare(parser)
            known = {name: value for name, value in vars(parser.parse_args([])).items() if not hasattr(self, name)}
            self._overlay.update(known)

    def __delattr__(self, name: str) -> None:
        if name not in self._overlay:
            raise AttributeError(f"args.{name} was not set by a function")
        del self._overlay[name]

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def __copy__(self) -> Args:
        return Args(self._config, self._overlay, made=self._made, free=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Args:
        shared = {name: self._overlay[name] for name in SHARED if name in self._overlay}
        rest = {name: value for name, value in self._overlay.items() if name not in shared}
        return Args(self._config, {**copy.deepcopy(rest, memo), **shared}, made=self._made, free=True)


@functools.cache
def parser_defaults() -> Mapping[str, Any]:
    """Name of an option of Miles's and slime's parsers -> its default."""
    rows = json.loads(Path(__file__).with_name("parser.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: value for value, *lines in rows for line in lines for name in line.split()})


def _scorer(args: Args) -> str | None:
    """One name, as in Miles, where the run's is a list; none of a function's own."""
    config: RunConfig = args._config
    names = [name for name in config.rollout.rm_type if name not in ("custom", "generated", "teacher_only")]
    asked: Any = config.options.get("compat", {}).get("scorer")
    return str(asked) if asked else names[0] if names else None


def _says(*keys: str, default: object = None) -> Callable[[Args], Any]:
    """What config.json says under the first of these keys that it has, or its text_config."""
    def read(args: Args) -> Any:
        whole = config_json(args._config)[1] or {}
        text = whole.get("text_config")
        found = {**(text if isinstance(text, Mapping) else {}), **whole}
        return next((found[key] for key in keys if key in found), default)
    return read


DERIVED: Mapping[str, Callable[[Args], Any]] = MappingProxyType({
    "sglang_router_ip": lambda args: HOST,
    "sglang_router_port": lambda args: 0,
    "rm_type": _scorer,
    "use_critic": lambda args: args.advantage_estimator == "ppo",
    "world_size": lambda args: args.actor_num_nodes * args.actor_num_gpus_per_node,
    "eval_max_context_len": lambda args: args._config.rollout.rollout_max_context_len,
    "max_position_embeddings": _says("max_position_embeddings"),
    "norm_epsilon": _says("rms_norm_eps", "layer_norm_eps", default=1e-5),
    "layernorm_epsilon": _says("rms_norm_eps", "layer_norm_eps", default=1e-5),
    "rotary_base": _says("rope_theta", default=10000),
    "untie_embeddings_and_output_weights": lambda args: not _says("tie_word_embeddings", default=False)(args),
    "share_embeddings_and_output_weights": _says("tie_word_embeddings", default=False),
    "multi_latent_attention": lambda args: bool(_says("kv_lora_rank")(args)),
})  # fmt: skip
"""Names whose values follow from the run, from config.json, or are addresses."""


def _of_core(config: RunConfig, name: str) -> tuple[object] | None:
    for table in TABLES:
        if hasattr(getattr(config, table), name):
            return (getattr(getattr(config, table), name),)
    from miles_flags.table import flags

    listed = flags().get("--" + name.replace("_", "-"), {})
    key = ALIASES.get(name, "" if {"value", "below"} & listed.keys() else str(listed.get("key", "")))
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


def _of_parser(config: RunConfig, name: str) -> tuple[object] | None:
    """The default of Miles's own parser; of a field of SGLang's servers what the run hands on, else None."""
    if name in parser_defaults():
        return (copy.copy(parser_defaults()[name]),)
    prefix, _, field = name.partition("_")
    table = {"sglang": "server", "router": "router"}.get(prefix)
    handed = config.surface(table) if table else {}
    return (handed[field],) if field in handed else None
