"""The trainer: a Hugging Face module, AdamW, one process.

What a rollout goes through is in `TorchTrainer`; passes.py has the model's side of it, checkpoint.py the files.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from miles_core import packing
from miles_core.columns import Columns, read_only
from miles_core.errors import ConfigError, NonFiniteError, TrainError
from miles_core.plugins.resolve import chosen
from miles_core.stages import advantage
from miles_core.stages.gradients import Piece
from miles_core.stages.loss import rollouts_of
from miles_core.stages.on_policy import FRESH
from miles_core.stages.step import Resume
from miles_foreign import checkpoint
from miles_foreign.passes import Pass

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_core.stages.sync import Sender
    from miles_core.types import Batch, Rank, Sample

logging.disable_progress_bar()  # the run has a terminal of its own to fill

UNCALLED = ("models", "log_prob", "train_step", "microbatch")
"""Hooks of the trainer that this one does not call."""


class TorchTrainer:
    """See miles_core.stages.step.Trainer.

    Raises:
        ConfigError: the run asks for something that this trainer would leave out.
    """

    def __init__(self, config: RunConfig, hooks: Any, columns: Columns, rank: Rank):
        refuse(config, hooks, rank)
        self._config, self._hooks, self._columns = config, hooks, columns
        self._batch: Batch | None = None
        self._sender: Sender | None = None

    def load(self) -> Resume:
        if self._config.perf.threads:
            torch.set_num_threads(self._config.perf.threads)
        given, optimizer = self._config.checkpoint, self._config.optimizer
        first = given.ref_load or given.hf_checkpoint
        self._model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).eval()  # no dropout
        algorithm = self._config.algorithm
        self._reference = copy.deepcopy(self._model) if algorithm.use_kl_loss or algorithm.kl_coef else None
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=optimizer.lr, betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps, weight_decay=optimizer.weight_decay)
        kept = checkpoint.load(given.load, self._model, self._optimizer) if given.load else None
        return Resume(0, None, str(first)) if kept is None else Resume(*kept, f"{given.load} (rollout {kept[0]})")

    def take_batch(self, batch: Batch) -> None:
        for sample in batch.samples:
            self._columns.check(sample)
        self._batch = batch

    def score(self) -> dict[str, float]:
        batch, algorithm = self._taken(), self._config.algorithm
        metrics: dict[str, float] = {}
        if not (algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
            self._fill("log_probs", self._model)
            ours, engines, versions = (self._trained(name) for name in ("log_probs", "rollout_log_probs", "versions"))
            gap = np.abs(ours - engines)
            if (fresh := gap[versions == batch.version]).size:
                metrics |= {FRESH: float(fresh.mean()), "train/train_rollout_logprob_abs_diff_max": float(gap.max())}
        if self._reference is not None:
            self._fill("ref_log_probs", self._reference)
        return metrics

    def advantage(self) -> dict[str, float]:
        batch, name = self._taken(), chosen(self._config, "advantage")
        with read_only(batch.samples, f"advantage {name!r}"):
            advantages = self._hooks.advantage[name](batch)
        metrics = advantage.fill(batch, advantages, name)
        if self._hooks.shape_advantages is not None:
            self._batch = batch = self._hooks.shape_advantages(batch)
            advantage.check(batch, "shape_advantages")
        if self._config.algorithm.normalize_advantages:
            advantage.whiten(batch)
        return metrics

    def step(self, index: int) -> dict[str, float]:
        begin, samples = time.perf_counter(), self._part(index)
        name = chosen(self._config, "reduction")
        with read_only(samples, f"reduction {name!r}"):
            weights = np.asarray(self._hooks.reduction[name](samples), np.float64)
        of_sample = dict(zip(map(id, samples), weights.tolist(), strict=True))
        self._optimizer.zero_grad()
        shares: dict[str, float] = {}
        for part in self._micro_batches(samples):
            loss, share = Pass(self._model, self._config, self._columns, part).loss(self._hooks, of_sample)
            loss.backward()
            for key, value in share.items():
                shares[key] = shares.get(key, 0.0) + value
        norm = self._clipped()
        self._optimizer.step()
        total = sum(weight * int(s.columns["loss_mask"].sum()) for s, weight in zip(samples, weights, strict=True))
        means = {f"train/{key}": value / (1.0 if key in ("loss", "pg_loss") else total or 1.0)
                 for key, value in shares.items()}
        return means | {"train/grad_norm": norm, "train/lr-pg_0": self._config.optimizer.lr,
                        "perf/actor_train_time": time.perf_counter() - begin}

    def end_batch(self) -> Batch:
        batch, self._batch = self._taken(), None
        return batch

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        stream = self._stream()
        return stream if self._hooks.export_weights is None else self._hooks.export_weights(stream)

    def connect(self, sender: Sender | None) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = sender
        if sender is not None:
            from miles_core.types import Rank

            sender.open(Rank())

    def send(self, version: int) -> dict[str, float]:
        if self._sender is None:
            raise TrainError("nobody has connected a sender", who="trainer foreign", fix="call connect first")
        return self._sender.send(self.weights(), version)

    def offload(self, tags: Sequence[str]) -> None:
        """Holds no memory of a device."""

    def onload(self, tags: Sequence[str]) -> None:
        """Takes none."""

    def save(self, folder: Path, rollout_id: int, state: dict[str, Any]) -> None:
        checkpoint.save(folder, rollout_id, self._model, self._optimizer, state)

    def saved(self) -> None:
        """Its `save` returns when all is written."""

    def export(self, folder: Path) -> None:
        stream = self._stream()
        if self._hooks.save_weights is not None:
            stream = self._hooks.save_weights(stream, folder)
        checkpoint.export(folder, self._model, dict(stream), str(self._config.checkpoint.hf_checkpoint))

    def hashes(self, batch: Batch) -> Mapping[str, Any]:
        return checkpoint.hashes(self._stream(), batch)

    def close(self) -> None:
        self.connect(None)

    def _taken(self) -> Batch:
        if self._batch is None:
            raise TrainError("there is no batch", who="trainer foreign", fix="call take_batch first")
        return self._batch

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def _trained(self, column: str) -> np.ndarray:
        """A column of all tokens that are trained on, of the whole rollout."""
        return np.concatenate([s.columns[column][s.columns["loss_mask"] > 0] for s in self._taken().samples])

    def _part(self, index: int) -> list[Sample]:
        samples = self._taken().samples
        parts = packing.in_steps(rollouts_of(samples), self._config.rollout.num_steps_per_rollout or 1)
        return [samples[i] for i in parts[index]]

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        perf = self._config.perf
        plan = packing.schedule([sample.length for sample in samples], data=1, micro_batch_size=perf.micro_batch_size,
                                capacity=perf.max_tokens_per_gpu if perf.use_dynamic_batch_size else None)
        return [[samples[i] for i in part] for part in plan[0]]

    def _fill(self, column: str, model: torch.nn.Module) -> None:
        """Log-probs by a model, with the micro-batches that the steps will have: then the first ratio is exactly 1."""
        for index in range(self._config.rollout.num_steps_per_rollout or 1):
            for part in self._micro_batches(self._part(index)):
                with torch.no_grad():
                    found = Pass(model, self._config, self._columns, part).log_probs()
                for sample, values in zip(part, found, strict=True):
                    sample.columns[column] = values

    def _clipped(self) -> float:
        """The norm of all gradients; the hook that --clip-gradients names has scaled them.

        Raises:
            NonFiniteError: the optimizer has not seen them.
        """
        gradients = WholeGradients(self._model, self._config.optimizer.clip_grad)
        norm = float(self._hooks.clip_gradients[chosen(self._config, "clip_gradients")](gradients))
        for piece in gradients.pieces:
            if not torch.isfinite(piece.grad).all():
                raise NonFiniteError(f"the gradient of {piece.name} is not finite", got=norm, who="trainer foreign",
                                     fix="lower --lr; the optimizer has not seen it, so the last checkpoint is good")
        return norm


class WholeGradients:
    """See miles_core.stages.gradients.Gradients: all of a model, in one process."""

    model = "actor"

    def __init__(self, model: torch.nn.Module, clip_grad: float):
        self.clip_grad = clip_grad
        self.pieces = [Piece(name, parameter.grad, parameter.detach(), counts=True)
                       for name, parameter in model.named_parameters() if parameter.grad is not None]

    def sums(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def clip_by_norm(self) -> float:
        norm = torch.nn.utils.get_total_norm([piece.grad for piece in self.pieces])
        for piece in self.pieces if self.clip_grad else ():
            piece.grad.mul_((self.clip_grad / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)


def refuse(config: RunConfig, hooks: Any, rank: Rank) -> None:
    """
    Raises:
        ConfigError: what the run asks for would be left out without a word.
    """
    given = {
        "several ranks": rank.size > 1, "bfloat16": config.perf.bf16,
        f"the schedule {config.optimizer.lr_decay_style}": config.optimizer.lr_decay_style != "constant",
        "a warm-up": bool(config.optimizer.lr_warmup_iters or config.optimizer.lr_warmup_fraction),
        **{f"the hook {name} of a plugin": getattr(hooks, name) is not None for name in UNCALLED},
    }
    if asked := [what for what, is_asked in given.items() if is_asked]:
        raise ConfigError("the trainer foreign does without", got=", ".join(asked), who="--trainer foreign",
                          fix="leave it out, or take another trainer")
