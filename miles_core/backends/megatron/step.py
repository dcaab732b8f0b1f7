"""The trainer of one rank, in execution order: load, score, advantage, step, weights, save.

Every forward goes through Megatron-core's own schedule. Losses are sums whose weights are fixed before the step
(stages/loss.py), so Megatron is asked to scale nothing: per-token loss with a token count of zero.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from miles_core.backends.megatron import cpu, memory, weights
from miles_core.backends.megatron.layers import packed_rows
from miles_core.backends.megatron.microbatch import MicroBatch, assemble
from miles_core.backends.megatron.models import Models
from miles_core.backends.megatron.objective import Objective
from miles_core.columns import Columns
from miles_core.config.tables import RunConfig
from miles_core.packing import first_fit_decreasing, fixed
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages import advantage
from miles_core.stages.step import Resume
from miles_core.types import Batch, Sample

cpu.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402 - after install()


class MegatronTrainer:
    """See stages/step.py for the contract.

    Args:
        hooks: the trainer role's bound hooks.
        columns: every column of the run.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, columns: Columns):
        self.config, self.hooks, self.columns = config, hooks, columns
        self.objective = Objective(config, hooks, chosen(config, "policy_loss"))
        self.batch: Batch | None = None

    def load(self) -> Resume:
        if self.config.perf.threads:
            torch.set_num_threads(self.config.perf.threads)
        self.models = Models(self.config, self.hooks)
        return self.models.load()

    def take_batch(self, batch: Batch) -> None:
        for sample in batch.samples:
            self.columns.check(sample)
        self.batch = batch
        memory.give_back()

    def score(self) -> dict[str, float]:
        """Old and reference log-probs, with the packing that the steps will use: then the first ratio is exactly 1."""
        algorithm, metrics = self.config.algorithm, {}
        begin = time.perf_counter()
        if not (algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
            self._forward_only("log_probs", "actor")
            metrics.update(self._mismatch())
        metrics["perf/log_probs_time"] = time.perf_counter() - begin
        if algorithm.use_kl_loss:
            with self.models.resident("ref"):
                self._forward_only("ref_log_probs", "ref")
            metrics["perf/ref_log_probs_time"] = time.perf_counter() - begin - metrics["perf/log_probs_time"]
            metrics["rollout/ref_log_probs"] = self._mean("ref_log_probs")
        return metrics

    def advantage(self) -> dict[str, float]:
        name = chosen(self.config, "advantage")
        return advantage.fill(self.batch, self.hooks.advantage[name](self.batch), name)

    def step(self, index: int) -> dict[str, float]:
        begin = time.perf_counter()
        samples = self._part(index)
        reduce = self.hooks.reduction[chosen(self.config, "reduction")]
        token_weight = dict(zip(map(id, samples), reduce(samples), strict=True))
        metrics: dict[str, float] = {}

        def loss_of(hidden: torch.Tensor, batch: MicroBatch):
            per_sample = torch.tensor([token_weight[id(s)] for s in batch.samples], dtype=torch.float32)
            value, share = self.objective(hidden, self.models.output_weight, batch, per_sample[batch.sample])
            for key, term in share.items():
                metrics[f"train/{key}"] = metrics.get(f"train/{key}", 0.0) + float(term)
            return value

        self.models.zero_grad()
        self._run(self._micro_batches(samples), loss_of, "actor")
        metrics.update(self.models.step())
        metrics["perf/actor_train_time"] = time.perf_counter() - begin
        return metrics

    def end_batch(self) -> Batch:
        batch, self.batch = self.batch, None
        memory.give_back()
        return batch

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return weights.hf_stream(self.models.model, self.models.weight_map)

    def save(self, folder: Path, rollout_id: int, state: dict) -> None:
        self.models.save(folder, rollout_id, state)

    def export(self, folder: Path) -> None:
        self.models.export(folder)

    def hashes(self, batch: Batch) -> dict[str, str]:
        """SHA-256 of the weights and of a batch's columns, for --debug-determinism."""
        state, data = hashlib.sha256(), hashlib.sha256()
        for name, tensor in self.weights():
            state.update(name.encode())
            state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for sample in batch.samples:
            for name in sorted(sample.columns):
                data.update(name.encode())
                data.update(np.ascontiguousarray(sample.columns[name]).tobytes())
        return {"weights": state.hexdigest()[:16], "batch": data.hexdigest()[:16]}

    def _part(self, index: int) -> list[Sample]:
        size = len(self.batch.samples) // self.config.rollout.num_steps_per_rollout
        return self.batch.samples[index * size : (index + 1) * size]

    def _micro_batches(self, samples: Sequence[Sample], *, gradient: bool = True) -> list[list[Sample]]:
        perf = self.config.perf
        if not perf.use_dynamic_batch_size:
            plan = fixed(len(samples), perf.micro_batch_size)
        else:
            limit = perf.max_tokens_per_gpu
            if not gradient:
                limit = perf.log_probs_max_tokens_per_gpu or limit
            plan = first_fit_decreasing([sample.length for sample in samples], limit)
        return [[samples[i] for i in part] for part in plan]

    def _run(self, parts: Sequence[Sequence[Sample]], loss_of: Callable, model: str, *,
             forward_only: bool = False) -> None:
        """One pass of Megatron's schedule over micro-batches; loss_of(hidden, batch) -> this micro-batch's loss."""
        around = self.hooks.microbatch

        def forward_step(batches, module):
            batch: MicroBatch = next(batches)

            def proceed(packed):
                tokens = torch.from_numpy(packed.rows["tokens"]).to(torch.int64)[None]
                return module(tokens, None, None, packed_seq_params=packed_rows(packed.cu_seqlens))

            hidden = proceed(batch.packed) if around is None else around(proceed, batch.packed, model)

            def reduced(output):
                value = loss_of(output, batch)
                return value, torch.zeros((), dtype=torch.int), {}  # a count of zero: nothing is left to divide

            return hidden, reduced

        batches = (assemble(self.columns, part) for part in parts)
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches, model=self.models.wrapped,
            num_microbatches=len(parts), seq_length=1, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip

    def _forward_only(self, column: str, model: str) -> None:
        """Fill a response column with the resident weights' log-probs."""

        def fill(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            batch.scatter(column, self.objective.log_probs(hidden, self.models.output_weight, batch)[0])
            return hidden.new_zeros(())

        with torch.no_grad():
            for index in range(self.config.rollout.num_steps_per_rollout):
                self._run(self._micro_batches(self._part(index), gradient=False), fill, model, forward_only=True)

    def _trained(self, column: str) -> np.ndarray:
        samples = self.batch.samples
        return np.concatenate([s.columns[column][s.columns["loss_mask"] > 0] for s in samples])

    def _mean(self, column: str) -> float:
        values = self._trained(column)
        return float(values.mean()) if values.size else 0.0

    def _mismatch(self) -> dict[str, float]:
        """How far the trainer's log-probs are from the engine's, before any step."""
        gap = np.abs(self._trained("log_probs") - self._trained("rollout_log_probs"))
        if not gap.size:
            return {}
        return {"train/train_rollout_logprob_abs_diff_max": float(gap.max()),
                "rollout/log_probs": self._mean("log_probs"),
                "rollout/rollout_log_probs": self._mean("rollout_log_probs")}
