"""Functions that are told what the run has recorded: samples of a rollout or an evaluation, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_compat.sample import Sample

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.config import RunConfig

_EVAL, _KNOWN_BY = "eval/", "-failed_ratio"


def logged(train: Callable[..., Any] | None, evaluation: Callable[..., Any] | None, args: Args, rollout_id: int,
           values: Mapping[str, float], run_dir: Path) -> None:
    """Call what logs a rollout, or what logs an evaluation, as these figures are the one's or the other's."""
    name = next((key.removeprefix(_EVAL).removesuffix(_KNOWN_BY) for key in values
                 if key.startswith(_EVAL) and key.endswith(_KNOWN_BY)), None)
    if name is None and train is not None:
        samples = _recorded(run_dir, "rollout", rollout_id)
        train(rollout_id, args, samples, dict(values), values.get("perf/rollout_time", 0.0))
    if name is not None and evaluation is not None:
        samples = _recorded(run_dir, f"eval_{name}", rollout_id)
        data = {name: {"rewards": [one.reward for one in samples], "samples": samples,
                       "truncated": [one.status is Sample.Status.TRUNCATED for one in samples]}}
        evaluation(rollout_id, args, data, dict(values))


def _recorded(run_dir: Path, name: str, rollout_id: int) -> list[Sample]:
    from miles_core.record.samples import read_samples, sample_file

    path = sample_file(run_dir, name, rollout_id)
    if not path.is_file():
        return []
    return [Sample(
        group_index=one["prompt_uid"], index=number, prompt=one["prompt"], response=one["response"],
        tokens=one["token_ids"], response_length=len(one["token_ids"]), label=one["label"], reward=one["reward"],
        loss_mask=one["loss_mask"], rollout_log_probs=one["log_probs"], status=Sample.Status(one["status"]),
        weight_versions=[str(version) for version in dict.fromkeys(one["versions"] or ())],
    ) for number, one in enumerate(read_samples(path))]  # fmt: skip


@dataclass
class Checkpoints:
    """Notices checkpoints that were completed since it was last asked.

    Args:
        known: how many rollouts the last one that is known of was made after.
    """

    config: RunConfig
    known: int | None = None

    def __post_init__(self) -> None:
        self.known = self._newest()

    def tell(self, function: Callable[..., Any], args: Args) -> None:
        """Call post_save(args, rollout_id, checkpoint_dir, hf_checkpoint_dir) of the newest, if it is a new one."""
        done, checkpoint = self._newest(), self.config.checkpoint
        if done is None or done == self.known:
            return
        self.known = done
        exported = checkpoint.save_hf and checkpoint.save_hf.format(rollout_id=done)
        function(args, done - 1, str(Path(str(checkpoint.save)) / f"iter_{done:07d}"), exported)

    def _newest(self) -> int | None:
        from miles_core.types import TRACKER

        try:
            return int((Path(self.config.checkpoint.save or "") / TRACKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
