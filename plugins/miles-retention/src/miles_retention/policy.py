"""What is kept, and how much that is at most."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.config import RunConfig
from miles_core.config.load import config_json, with_values
from miles_core.errors import ConfigError
from miles_core.record.events import read

if TYPE_CHECKING:
    from miles_core.plugins.select import Selected

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The plugin's options of these names."""

    keep_last: int | None = None
    keep_best: int | None = None
    keep_metric: str | None = None
    keep_mode: str = "max"
    save_retain_interval: int | None = None


class Policy:
    """Which checkpoints are kept; the metric of earlier starts is in the run's events.

    A checkpoint `iter_0000010` is made after ten rollouts: both an evaluation of its weights and the rollout that is
    sampled from them, before they are trained on, have the step 10.
    """

    def __init__(self, rules: Rules, run_dir: Path):
        self._rules, self._measured = rules, dict[int, float]()
        events = run_dir / "events.jsonl"
        if rules.keep_metric is not None and events.is_file():
            for event in read(events):
                if event["event"] in ("metrics", "eval"):
                    self.measured(event["rollout_id"], event["metrics"])

    def measured(self, rollout_id: int, values: Mapping[str, float | None]) -> None:
        """Note the metric of the checkpoint that these values are about."""
        value = values.get(self._rules.keep_metric or "")
        if value is not None and value == value:  # no NaN
            self._measured[rollout_id] = value

    def kept(self, present: Sequence[int]) -> set[int]:
        """Of the checkpoints that are there, ascending. A tie of the best is the newer one's."""
        rules = self._rules
        keep = set(present[-(rules.keep_last or 1):])
        if rules == Rules():
            return set(present)
        if rules.keep_best and not self._measured and len(present) > len(keep):  # misspelt, it would cost the best
            logger.warning("retention keeps all checkpoints while %s is not measured; events.jsonl has the names",
                           rules.keep_metric)
            return set(present)
        if rules.save_retain_interval:
            keep |= {one for one in present if one % rules.save_retain_interval == 0}
        if rules.keep_best:
            sign = 1 if rules.keep_mode == "max" else -1
            ranked = sorted((one for one in present if one in self._measured),
                            key=lambda one: (sign * self._measured[one], one), reverse=True)
            keep |= set(ranked[:rules.keep_best])
        return keep


def check(rules: Rules, config: RunConfig, note: Callable[[str], None]) -> None:
    """
    Raises:
        ConfigError: a checkpoint that is to be kept for good is never saved, or an evaluation is never made.
    """
    every, interval = config.checkpoint.save_interval, rules.save_retain_interval
    if config.checkpoint.save is None:
        note("retention has nothing to do: the run saves no checkpoints (--save)")
    elif interval and every and interval % every:
        raise ConfigError("save_retain_interval is no multiple of save_interval", got=f"{interval} and {every}",
                          who="retention.save_retain_interval", fix=f"write {-(-interval // every) * every}",
                          code="retain-interval-not-multiple")
    if rules.keep_metric and rules.keep_metric.startswith("eval/") and not config.eval.eval_interval:
        raise ConfigError("the run evaluates nothing", got=rules.keep_metric, who="retention.keep_metric",
                          fix="write --eval-interval and --eval-prompt-data, or the name of a rollout's metric",
                          code="keep-metric-never-evaluated")


def bound(rules: Rules, config: RunConfig, plugins: Sequence[Selected] = ()) -> str:
    """How many checkpoints there are at most, those that are being written included, and what they take."""
    every, rollouts = config.checkpoint.save_interval, config.rollout.num_rollout
    saves = None if rollouts is None else rollouts // every + (rollouts % every > 0) if every else 1
    if config.checkpoint.save_trigger_sentinel:  # which may ask after every rollout
        saves = rollouts
    parts = [f"the last {rules.keep_last or 1}"]
    parts += [f"the best {rules.keep_best} by {rules.keep_metric}{_measured(rules, config)}"] if rules.keep_best else []
    count: int | None = (rules.keep_last or 1) + (rules.keep_best or 0)
    if rules.save_retain_interval:
        parts.append(f"one in {rules.save_retain_interval} rollouts")
        count = None if rollouts is None else (count or 0) + rollouts // rules.save_retain_interval
    if rules == Rules():
        parts, count = ["all"], saves
    if count is None:
        return f"kept: {' and '.join(parts)}"
    under_way = 2 if config.checkpoint.async_save else 1  # the one before may be published after the last look
    most = count + under_way if saves is None else min(count + under_way, max(saves, 1))
    size = checkpoint_bytes(config, plugins)
    disk = "" if size is None else f", about {most * size / GIB:.3g} GiB of {size / GIB:.3g} each"
    return f"kept: {' and '.join(parts)}; at most {most} at a time in {config.checkpoint.save}{disk}"


def _measured(rules: Rules, config: RunConfig) -> str:
    """Which checkpoints have a value of the metric, if not all."""
    every, evaluated = config.checkpoint.save_interval, config.eval.eval_interval
    if not (every and evaluated and str(rules.keep_metric).startswith("eval/") and every % evaluated):
        return ""
    return f" (measured of one in {math.lcm(every, evaluated) // every} and of the last)"


def checkpoint_bytes(config: RunConfig, plugins: Sequence[Selected]) -> float | None:
    """What a checkpoint takes at most: of every model that trains its weights, and float32 weights and two moments,
    which are AdamW's; Muon has less. None where a Hugging Face directory has no weights to count, or where adapters
    alone train."""
    if any("frozen-base" in one.manifest.provides for one in plugins):
        return None
    beside = [config.options.get(one.manifest.name, {}).get(word.removeprefix("trains:")) for one in plugins
              for word in one.manifest.provides if word.startswith("trains:")]
    counts = [_parameters(config if source is None else with_values(config, "", checkpoint__hf_checkpoint=source))
              for source in (None, *beside)]
    if None in counts:
        return None
    masters = config.perf.trainer == "fsdp"  # alone, where Megatron's optimizer has them beside the weights
    weights, optimizer = 4 if masters or not config.perf.bf16 else 2, 8 if masters else 12
    return sum(filter(None, counts)) * (weights + (0 if config.checkpoint.no_save_optim else optimizer))


def _parameters(config: RunConfig) -> float | None:
    """Of --hf-checkpoint, by the size of its files; None where there are none, or where they are quantised."""
    path, constants = config_json(config)
    files = [file.stat().st_size for file in path.parent.glob("*.safetensors")]
    if not files or constants is None or "quantization_config" in constants:
        return None
    wide = str(constants.get("dtype") or constants.get("torch_dtype") or "bfloat16").endswith("32")
    return sum(files) / (4 if wide else 2)
