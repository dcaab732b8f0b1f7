"""Miles's --sglang-config: a YAML file of groups of servers, as sizes of engines that are all alike."""

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


def sizes_of(flag: Given, notes: list[str]) -> dict[str, int]:
    """Options of the run, "table.key" -> value, that say how many GPUs all engines and each of them have.

    Raises:
        DataError: the file is not there or is no YAML.
        ConfigError: it asks for several models, or for servers that would answer differently.
    """
    import yaml

    who = f"{flag.flag} {' '.join(flag.words)}"
    try:
        document = yaml.safe_load(Path(*flag.words).read_text(encoding="utf-8"))
        models = document["sglang"]
        groups: list[Mapping[str, Any]] = [group for model in models for group in model["server_groups"]]
        each = {int(group.get("num_gpus_per_engine", group["num_gpus"])) for group in groups}
        whole = sum(int(group["num_gpus"]) for group in groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise DataError("the file of server groups cannot be read", code="server-groups-unreadable",
                        got=f"{type(error).__name__}: {error}", who=who,
                        fix="name one YAML file: sglang, a list of models with server_groups") from None
    apart = sorted({key for group in groups for key in group.get("overrides") or {} if key in MEANT})
    other = [model for model in models if model.get("model_path") or model.get("update_weights") is False]
    kinds = sorted({str(group.get("worker_type", "regular")) for group in groups} - {*KINDS})
    if len(models) != 1 or other or kinds or apart or len(each) != 1:
        raise ConfigError("a run has one model here, on engines that are all alike",
                          code="server-groups-differ", who=who,
                          got=f"{len(models)} models, {len(groups)} groups" + f", {', '.join([*kinds, *apart])}" * bool(
                              kinds or apart), fix="leave the flag out: --rollout-num-gpus and "
                          "--rollout-num-gpus-per-engine are the sizes, --sglang-* fields of all servers")
    notes.append(f"{flag.flag}: every server both prefills and decodes here, and has the run's --sglang-* fields; what "
                 "the file overrides for a group is not used")
    return {"perf.rollout_num_gpus": whole, "perf.rollout_num_gpus_per_engine": each.pop()}
