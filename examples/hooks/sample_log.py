"""A diagnostic: samples-moved.jsonl in the run directory says how far each optimizer step moved each of its samples.

It costs one more forward pass for each step.
"""

import json
from pathlib import Path

from miles_core import hookimpl


class SampleLog:
    """A line per sample: reward, mean advantage, and the mean ratio of the probabilities after and before the step."""

    name = "sample-log"

    def __init__(self, config):
        self.path = Path(config.checkpoint.run_dir) / "samples-moved.jsonl"

    @hookimpl
    def train_step(self, proceed, access):
        import torch.distributed as dist

        def read(rows):
            after = rows.log_probs()
            return {"moved": (after - rows.rows["log_probs"]).exp()}

        metrics = proceed()
        access.forward("actor", read)  # on every rank, as it is a pass of all of them
        lines = [json.dumps(line(access, sample)) + "\n" for sample in access.samples]
        if dist.get_rank() == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        return metrics


def line(access, sample):
    """What is said about a sample. The column was for this alone: it goes no further."""
    moved, trained = sample.columns.pop("moved"), sample.columns["loss_mask"] > 0
    return {
        "rollout": access.batch.rollout_id, "step": access.index, "prompt": sample.prompt.uid, "sample": sample.index,
        "reward": sample.reward, "tokens": int(trained.sum()),
        "advantage": float(sample.columns["advantages"][trained].mean()) if trained.any() else 0.0,
        "ratio": float(moved[trained].mean()) if trained.any() else 1.0,
    }  # fmt: skip
