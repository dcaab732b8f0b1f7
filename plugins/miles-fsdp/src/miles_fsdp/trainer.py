"""The trainer of one rank, in the order of its calls: load, score, advantage, step, weights, save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from miles_local import heap
from miles_local.objective import ActorStep, Objective, in_micro_batches, sample_weights, with_advantage, with_fillers
from miles_local.on_policy import check_equal
from miles_local.transfer import on_device

from miles_core import packing
from miles_core.columns import Columns, read_only, trained
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages import advantage
from miles_core.stages.loss import PolicyLoss, rollouts_of
from miles_core.stages.on_policy import mismatch
from miles_core.stages.step import Resume, ScoredRows
from miles_core.stages.sync import Sender
from miles_core.types import Batch, Rank, Sample
from miles_fsdp import checkpoint, server_kernels
from miles_fsdp.async_save import AsyncSave
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.models import ACTOR, Models, directory
from miles_fsdp.on_policy import SUSPECT
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.refusals import refuse, refuse_hooks
from miles_fsdp.trained import Trained

logger = logging.getLogger(__name__)


class FsdpTrainer:
    """See miles_core.stages.step.Trainer.

    Args:
        hooks: the trainer role's bound hooks.
        columns: every column of the run.

    Raises:
        ConfigError: the run asks for something that this trainer would leave out.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, columns: Columns, rank: Rank, options: FsdpOptions):
        self.config, self.hooks, self.columns, self.rank, self.options = config, hooks, columns, rank, options
        refuse(config, options)
        refuse_hooks(hooks)
        self.objective = Objective(config, hooks)
        self.skips = self.objective.leaves_out(config.perf.skip_zero_advantages)
        self._beside = AsyncSave(config.perf.trainer_timeout)
        self._batch: Batch | None = None
        self._sender: Sender | None = None
        self._actor_step = ActorStep(config, hooks)
        self._pace: list[tuple[int, float]] = []  # tokens and seconds of each step

    def load(self) -> Resume:
        if self.config.perf.threads:
            torch.set_num_threads(self.config.perf.threads)
        self.ranks = Ranks(self.rank, self.config.perf.trainer_timeout, self.options.context_parallel_size,
                           self.options.tensor_parallel_size)
        if self.config.algorithm.true_on_policy_mode:
            server_kernels.begin(self.ranks.device)
        paths = self.config.checkpoint
        start = next(path for path in (paths.load if directory(paths.load) else None, paths.ref_load,
                                       paths.hf_checkpoint) if path)
        iteration = checkpoint.latest(paths.load) if paths.load and not directory(paths.load) else None
        # Another run may save into the folder meanwhile, and a network file system shows each host the tracker of its
        # time: what the first rank sees holds for all.
        iteration = self.ranks.gathered(iteration)[0]
        if iteration is not None and paths.load is not None:
            start = checkpoint.start(paths.load, iteration, paths)
        self.models = Models(self.config, self.hooks, self.columns, self.ranks, self.options, start)
        if iteration is None or paths.load is None:
            return Resume(0, None, start)
        state = checkpoint.load(paths.load, iteration, self.models, self.ranks)
        return Resume(iteration, state, f"{paths.load} (rollout {iteration})")

    def take_batch(self, batch: Batch) -> None:
        for sample in batch.samples:
            self.columns.check(sample)
        self._batch = batch
        heap.give_back()
        self._beside.settle()

    def score(self) -> dict[str, float]:
        """Old and reference log-probs, with the packing that the steps will use: then the first ratio is exactly 1."""
        around, access = self.hooks.log_prob, Access(self, None)
        return self._score(access) if around is None else around(lambda: self._score(access), access)

    def advantage(self) -> dict[str, float]:
        """Every rank works it out from the same columns: nothing to send, and an error is everyone's."""
        batch, name = self.batch, chosen(self.config, "advantage")
        with read_only(batch.samples, f"advantage {name!r}"):
            advantages = self.hooks.advantage[name](batch)
        metrics = advantage.fill(batch, advantages, name)
        if self.hooks.shape_advantages is not None:
            self._batch = batch = self.hooks.shape_advantages(batch)
            advantage.check(batch, "shape_advantages")
        if self.config.algorithm.normalize_advantages:
            advantage.whiten(batch)
        return metrics

    def step(self, index: int) -> dict[str, float]:
        begin, access = time.perf_counter(), Access(self, index)
        metrics = self._actor_step(lambda: self.train(ACTOR, access.samples, self.objective), access)
        seconds = time.perf_counter() - begin
        taken = with_advantage(access.samples) if self.skips else access.samples
        self._pace.append((sum(sample.length for sample in taken), seconds))
        metrics["perf/actor_train_time"] = seconds
        return metrics | self._rates() if index + 1 == (self.config.rollout.num_steps_per_rollout or 1) else metrics

    def _rates(self) -> dict[str, float]:
        """Of all steps of the rollout: a mean of their rates would hide a slow one."""
        tokens, seconds = map(sum, zip(*self._pace, strict=True))
        self._pace.clear()
        return {"perf/actor_train_tok_per_s": tokens / seconds,
                "perf/actor_train_tokens_per_gpu_per_sec": tokens / seconds / self.ranks.size}

    def end_batch(self) -> Batch | None:
        batch, self._batch = self.batch, None
        heap.give_back()
        if self.config.perf.colocate and self.config.perf.offload_rollout and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine wakes up on this GPU
        return batch if self.rank.index == 0 else None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What the engine gets, on the first rank; the others only take part in it."""
        return self._first_streams(self._for_engine())

    def connect(self, sender: Sender | None) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = sender
        if sender is not None:
            sender.open(self.rank)

    def send(self, version: int) -> dict[str, float] | None:
        if self._sender is None:
            raise TrainError("nobody has connected a sender", who="trainer fsdp", code="fsdp-without-sender",
                             fix="call connect first")
        figures = self._sender.send(self._for_engine(), version)
        return figures if self.rank.index == 0 else None

    def offload(self, tags: Sequence[str]) -> None:
        self._beside.settle()
        self.models.offload(tags)

    def onload(self, tags: Sequence[str]) -> None:
        self.models.onload(tags)

    def save(self, folder: Path, rollout_id: int, state: dict[str, Any]) -> None:
        paths = self.config.checkpoint
        checkpoint.save(folder, rollout_id, self.models, self.ranks, state, whole=not paths.no_save_optim,
                        beside=self._beside if paths.async_save else None)

    def saved(self) -> None:
        self._beside.wait()

    def export(self, folder: Path) -> None:
        stream = self.models.whole(self.models.stream(), self.hooks.save_weights, folder)
        if (mine := self._first_streams(stream)) is not None:
            checkpoint.export(folder, mine, self.models.start, self.models.dtype)

    def hashes(self, batch: Batch) -> Mapping[str, Any] | None:
        mine = self._first_streams(self.models.stream())
        return None if mine is None else checkpoint.hashes(mine, batch.samples)

    def close(self) -> None:
        self.connect(None)
        self._beside.close()
        if "models" in vars(self):
            self.models.close()
        if "ranks" in vars(self):
            self.ranks.leave()

    @property
    def batch(self) -> Batch:
        """
        Raises:
            TrainError: there is none.
        """
        if self._batch is None:
            raise TrainError("there is no batch", who="trainer fsdp", code="fsdp-without-batch",
                             fix="call take_batch first")
        return self._batch

    def part(self, index: int) -> list[Sample]:
        """What an optimizer step trains on."""
        samples = self.batch.samples
        steps = packing.in_steps(rollouts_of(samples), self.config.rollout.num_steps_per_rollout or 1)
        return [samples[i] for i in steps[index]]

    def train(self, name: str, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """One optimizer step of a model that trains."""
        reduced = sample_weights(self.config, self.hooks, samples)
        token_weight = dict(zip(map(id, samples), reduced.tolist(), strict=True))
        shares: dict[str, torch.Tensor] = {}
        leaves_out = self.skips and objective.actor
        taken = with_advantage(samples) if leaves_out else samples
        unscored = objective.actor and self.config.algorithm.skip_actor_forward_only and not any(
            "log_probs" in sample.columns for sample in taken)
        columns, model = ColumnParts(), self.models.trained[name]
        filled: list[tuple[MicroBatch, torch.Tensor]] = []
        model.optimizer.zero_grad()
        rides = with_fillers(taken, self.config.perf, self.ranks.data) if leaves_out else taken
        for batch in self._micro_batches(rides):
            per_sample = np.array([token_weight.get(id(sample), 0.0) for sample in batch.samples], np.float32)
            weights = on_device(per_sample, batch.device)[batch.sample]
            loss, share, log_probs = model.module(
                batch, lambda scored, weights=weights: objective(scored, weights), self.models.around(name))
            loss.backward()
            for key, value in share.items():
                shares[key] = shares[key] + value if key in shares else value
            if unscored:
                filled.append((batch, log_probs))
        objective.check_finite()
        for batch, log_probs in filled:
            columns.put(batch, {"log_probs": log_probs})
        columns.scatter(taken, self.ranks)
        if unscored and self.config.algorithm.true_on_policy_mode:
            check_equal(taken, SUSPECT)
        total = float(sum(token_weight[id(one)] * one.columns["loss_mask"].sum() for one in taken)) or 1.0
        # Ranks that share rows or layers have all of them worked out the same.
        mine = dict(shares) if self.ranks.counts else {}
        numbers = torch.stack([*mine.values()]).tolist() if mine else []  # all at once: each would wait for the device
        sums = self.ranks.sums(dict(zip(mine, numbers, strict=True)))
        # Metrics are means over what was taken, also where the reduction's weights do not add up to 1; the loss is what
        # it is.
        metrics = {key: value / (1.0 if key in ("loss", "pg_loss") else total) for key, value in sums.items()}
        metrics |= self.models.step(name)
        if leaves_out:
            metrics["skipped_samples"] = 1 - len(taken) / len(samples)
        prefix = "train" if name == ACTOR else name
        return {f"{prefix}/{key}": value for key, value in metrics.items()} | (
            mismatch(taken, self.batch.version) if unscored else {})

    def scoring_pass(self, name: str, parts: Sequence[Sequence[Sample]],
                     read: Callable[[ScoredRows], Mapping[str, torch.Tensor]]) -> None:
        """Fill columns from a pass of a model without gradient, over steps' samples one after the other."""
        module, columns = self.models.place(name), ColumnParts()
        with torch.no_grad():
            for part in parts:
                for batch in self._micro_batches(part, gradient=False):
                    columns.put(batch, module(batch, read, self.models.around(name)))
        columns.scatter([sample for part in parts for sample in part], self.ranks)

    def _micro_batches(self, samples: Sequence[Sample], *, gradient: bool = True) -> Iterator[MicroBatch]:
        """This rank's share of a step's samples; every rank has the same number of micro-batches."""
        perf = self.config.perf
        limit = perf.max_tokens_per_gpu if perf.use_dynamic_batch_size else None
        if limit is not None and not gradient:
            limit = perf.log_probs_max_tokens_per_gpu or limit
        limit = None if limit is None else limit * self.ranks.context.size
        lengths = [sample.length for sample in samples]
        if gradient and self.rank.index == 0:
            for i in packing.oversized(lengths, limit):
                logger.warning("%s has %d tokens, more than the %d of a micro-batch: it gets one of its own and takes "
                               "more memory than planned", samples[i].name, lengths[i], limit)
        plan = packing.schedule(lengths, data=self.ranks.data, capacity=limit, balance=perf.balance_data,
                                micro_batch_size=perf.micro_batch_size)
        for part in in_micro_batches(samples, plan[self.ranks.data_index]):
            yield MicroBatch(self.columns, part, self.ranks.device, self.ranks.context)

    def _score(self, access: Access) -> dict[str, float]:
        algorithm, metrics = self.config.algorithm, {"perf/log_probs_time": 0.0}
        if not (algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
            begin = time.perf_counter()
            access.forward(ACTOR, lambda rows: {"log_probs": rows.log_probs()})
            metrics |= mismatch(self.batch.samples, self.batch.version)
            if algorithm.true_on_policy_mode:
                check_equal(self.batch.samples, SUSPECT)
            metrics["perf/log_probs_time"] = time.perf_counter() - begin
        if algorithm.needs_reference:
            begin = time.perf_counter()
            access.forward("ref", lambda rows: {"ref_log_probs": rows.log_probs()})
            metrics["perf/ref_log_probs_time"] = time.perf_counter() - begin
            values = trained(self.batch.samples, "ref_log_probs")
            metrics["rollout/ref_log_probs"] = float(values.mean()) if values.size else 0.0
        return metrics

    def _for_engine(self) -> Iterator[tuple[str, torch.Tensor]]:
        stream = self.models.stream()
        return stream if self.hooks.export_weights is None else self.hooks.export_weights(stream)

    def _first_streams(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]] | None:
        if self.rank.index == 0:
            return stream
        for _ in stream:  # it takes part in gathering each
            pass
        return None


class Access:
    """See miles_core.stages.step.TrainerAccess."""

    def __init__(self, trainer: FsdpTrainer, index: int | None):
        self._trainer, self.batch, self.index = trainer, trainer.batch, index
        self.samples: Sequence[Sample] = trainer.batch.samples if index is None else trainer.part(index)

    def forward(self, model: str, read: Callable[[ScoredRows], Mapping[str, torch.Tensor]]) -> None:
        steps = range(self._trainer.config.rollout.num_steps_per_rollout or 1)
        parts = [self._trainer.part(i) for i in steps] if self.index is None else [self.samples]
        self._trainer.scoring_pass(model, parts, read)

    def step(self, model: str, loss: PolicyLoss) -> dict[str, float]:
        """
        Raises:
            ConfigError: the model does not train.
        """
        self._trained(model)
        return self._trainer.train(model, self.samples, Objective(self._trainer.config, self._trainer.hooks, loss))

    def chunks(self, model: str) -> Sequence[torch.nn.Module]:
        return [self._trainer.models.place(model).model]

    def optimizer(self, model: str) -> object:
        return self._trained(model).optimizer

    def scheduler(self, model: str) -> object:
        return self._trained(model).schedule

    def _trained(self, model: str) -> Trained:
        if model not in (trained := self._trainer.models.trained):
            raise ConfigError(f"the model {model!r} does not train", code="fsdp-model-not-trained",
                              got=", ".join(trained), fix="declare it with trainable=True in the hook `models`")
        return trained[model]


class ColumnParts:
    """What passes have computed for the trained rows of this rank, on its way into the columns of all samples."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}

    def put(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> None:
        """[N, ...] by column."""
        sample_of, arrays = batch.on_host["sample"], {name: rows.cpu().numpy() for name, rows in values.items()}
        for index, sample in enumerate(batch.samples):
            mine = sample_of == index
            self._found.setdefault(id(sample), {}).update(
                {name: (batch.offset[mine], rows[mine]) for name, rows in arrays.items()})

    def scatter(self, samples: Sequence[Sample], ranks: Ranks) -> None:
        """Every rank calls it with the same samples; rows that are not trained on hold 0."""
        mine = {place: self._found[id(one)] for place, one in enumerate(samples) if id(one) in self._found}
        for part in ranks.gathered(mine):
            for place, columns in part.items():
                for name, (offset, rows) in columns.items():
                    column = np.zeros((samples[place].response_length, *rows.shape[1:]), rows.dtype)
                    column[offset] = rows
                    samples[place].columns[name] = column
