"""Miles's --sglang-config: a YAML file of groups of servers, as sizes of engines all alike, and a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from miles_core.config.flags import Given

KINDS = ("regular", "prefill", "decode")
"""Parts of the work on an answer that a server of Miles may have; here every server has all."""
MEANT = {"context_length", "dtype", "kv_cache_dtype", "quantization", "model_path", "load_format"}
"""Fields of ServerArgs by which the servers of one group would give other answers than those of another."""


REWARD = "reward-model"
"""The plugin that hosts a model whose weights are never updated."""


def sizes_of(flag: Given, notes: list[str]) -> dict[str, Any]:
    """Options of the run, "table.key" -> value, that say how many GPUs all engines and each of them have, and those of
    a reward model: the model with `update_weights: false`.

    Raises:
        DataError: the file is not there or is no YAML.
        ConfigError: it asks for several models, or for servers that would answer differently.
    """
    import yaml

    who = f"{flag.flag} {' '.join(flag.words)}"
    try:
        document = yaml.safe_load(Path(*flag.words).read_text(encoding="utf-8"))
        every = document["sglang"]
        models = [model for model in every if model.get("update_weights") is not False]
        rewards = [_reward(model, who) for model in every if model.get("update_weights") is False]
        groups: list[Mapping[str, Any]] = [group for model in models for group in model["server_groups"]]
        each = {int(group.get("num_gpus_per_engine", group["num_gpus"])) for group in groups}
        whole = sum(int(group["num_gpus"]) for group in groups)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise DataError("the file of server groups cannot be read", code="server-groups-unreadable",
                        got=f"{type(error).__name__}: {error}", who=who,
                        fix="name one YAML file: sglang, a list of models with server_groups") from None
    meant = [{key: value for key, value in (group.get("overrides") or {}).items() if key in MEANT} for group in groups]
    apart = sorted({key for one in meant for key in one.keys() | meant[0].keys() if one.get(key) != meant[0].get(key)})
    other = [model for model in models if model.get("model_path")] + rewards[1:]
    kinds = sorted({str(group.get("worker_type", "regular")) for group in groups} - {*KINDS})
    if len(models) != 1 or other or kinds or apart or len(each) != 1:
        raise ConfigError("a run has one model here, on engines that are all alike",
                          code="server-groups-differ", who=who,
                          got=f"{len(models)} models, {len(groups)} groups" + f", {', '.join([*kinds, *apart])}" * bool(
                              kinds or apart), fix="leave the flag out: --rollout-num-gpus and "
                          "--rollout-num-gpus-per-engine are the sizes, --sglang-* fields of all servers")
    notes.append(f"{flag.flag}: every server both prefills and decodes here, and has the run's --sglang-* fields; what "
                 "the file overrides for a group is not used" + f", but for {', '.join(meant[0])}" * bool(meant[0]))
    sizes = {"perf.rollout_num_gpus": whole, "perf.rollout_num_gpus_per_engine": each.pop()}
    return sizes | {f"server.{key}": value for key, value in meant[0].items()} | (rewards[0] if rewards else {})


def _reward(model: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The options of plugin reward-model; further ones of it may stand under the model's key `options`.

    Raises:
        ConfigError: the model has no path, or its groups differ.
    """
    groups = model["server_groups"]
    sizes = {int(group.get("num_gpus_per_engine", group["num_gpus"])) for group in groups}
    overrides = [dict(group.get("overrides") or {}) for group in groups]
    kinds = {str(group.get("worker_type", "regular")) for group in groups} - {"regular"}
    if not model.get("model_path"):
        raise ConfigError("a model that is never updated is a reward model, and needs a path",
                          code="reward-group-without-model", who=who, got=str(model.get("name")),
                          fix="add model_path: FOLDER to it")
    if len(sizes) != 1 or kinds or any(one != overrides[0] for one in overrides):
        raise ConfigError("the servers of a reward model are all alike", code="reward-groups-differ", who=who,
                          got=f"{len(groups)} groups", fix="write one group, of worker_type regular")
    words = [word for name, value in overrides[0].items() if value is not False for word in _words(name, value)]
    options = {"reward_model_path": model["model_path"],
               "reward_num_gpus": sum(int(group["num_gpus"]) for group in groups),
               "reward_num_gpus_per_engine": sizes.pop(), **({"server_args": words} if words else {}),
               **(model.get("options") or {})}
    return {f"{REWARD}.{name}": value for name, value in options.items()}


def _words(name: str, value: object) -> list[str]:
    """A field of SGLang's ServerArgs as words of its command."""
    values = [] if value is True else value if isinstance(value, list) else [value]
    return ["--" + name.replace("_", "-"), *map(str, values)]
