"""One batch through the trainer of a plan, on as many ranks as the plan has, on this machine."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from miles_core.build import trainer_part
from miles_core.config.tables import RunConfig
from miles_core.hosts import process_group
from miles_core.plugins.plan import Plan
from miles_core.plugins.select import Selected
from miles_core.types import Batch, Rank
from miles_divergence.names import of_text
from miles_divergence.recording import Recording, fingerprint, read


def replay(plan: Plan, batch: Batch, folder: Path, environment: Mapping[str, str] | None = None) -> Recording:
    """What the plan's trainer computes in the first step on a batch; the weights that it starts from stay as they are.

    Args:
        plan: with the plugin divergence, which writes to `folder`.
        environment: variables of the ranks; with any, one rank gets a process of its own as well.

    Raises:
        MilesError: what the trainer raises.
    """
    perf, whole = plan.config.perf, copy.deepcopy(batch)
    size = perf.actor_num_nodes * perf.actor_num_gpus_per_node
    if size == 1 and perf.trainer_host == "thread" and not environment:
        Replay(plan.selected, plan.config, folder, Rank()).run(whole)
    else:
        asyncio.run(_in_processes(plan, size, whole, folder, environment))
    return read(folder)


async def _in_processes(plan: Plan, size: int, batch: Batch, folder: Path, environment: Mapping[str, str] | None
                        ) -> None:
    group = process_group("across", size, Replay, plan.selected, plan.config, folder, environment=environment)
    group.timeout = plan.config.perf.trainer_timeout
    try:
        await group.run(batch)
    finally:
        await group.close()


class Replay:
    """The trainer of one rank, for one batch."""

    def __init__(self, selected: Sequence[Selected], config: RunConfig, folder: Path, rank: Rank):
        self.selected, self.config, self.folder, self.rank = selected, config, folder, rank

    def run(self, batch: Batch) -> None:
        """Load, score, one step; fingerprints of the weights are taken before the step changes them."""
        threads = torch.get_num_threads()
        trainer = trainer_part(self.selected, self.config, self.rank)
        try:
            trainer.load()
            trainer.take_batch(batch)
            trainer.score()
            trainer.advantage()
            weights = trainer.weights()
            if weights is not None:
                prints = {of_text(name): fingerprint(tensor) for name, tensor in weights}
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "weights.json").write_text(json.dumps(prints))
            trainer.step(0)
            trainer.end_batch()
        finally:
            trainer.close()
            torch.set_num_threads(threads)
