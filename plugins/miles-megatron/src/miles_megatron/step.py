"""The trainer of one rank, in execution order: load, score, advantage, step, weights, save."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
from miles_local import heap
from miles_local.objective import ActorStep, Objective, in_micro_batches, sample_weights, with_advantage, with_fillers
from miles_local.on_policy import check_equal
from miles_local.transfer import on_device

from miles_core import packing
from miles_core.columns import Columns, read_only, trained
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages import advantage
from miles_core.stages.loss import PolicyLoss, rollouts_of
from miles_core.stages.on_policy import mismatch
from miles_core.stages.step import Resume, ScoredRows
from miles_core.stages.sync import Sender
from miles_core.types import Batch, Rank, Sample
from miles_megatron import cpu, estimate, forward_backward, hashes, unread
from miles_megatron.forward_backward import ColumnScatter
from miles_megatron.gradients import gathered
from miles_megatron.heads import sizes_of
from miles_megatron.layout import layout_of
from miles_megatron.model_on_rank import ModelOnRank
from miles_megatron.models import Models, empty_cache
from miles_megatron.on_policy import SUSPECT
from miles_megatron.oom import explained
from miles_megatron.profiler import Profiler
from miles_megatron.scored import Scored, Temperature
from miles_megatron.throughput import Throughput, Trained

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()

logger = logging.getLogger(__name__)


class MegatronTrainer:
    """See stages/step.py for the contract.

    Args:
        hooks: the trainer role's bound hooks.
        columns: every column of the run.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, columns: Columns, rank: Rank):
        self.config, self.hooks, self.columns, self.rank = config, hooks, columns, rank
        self.layout = layout_of(config)
        self.architecture = sizes_of(config) if config.perf.balance_by_flops else None
        self.objective = Objective(config, hooks)
        self.temperature = Temperature.of(config)
        self.throughput = Throughput(config, rank.size)
        self.batch: Batch | None = None
        self.profiler = Profiler(config, rank.index)
        self.sender: Sender | None = None
        self._starting, self._actor_step = False, ActorStep(config, hooks)

    @functools.cached_property
    def skips(self) -> bool:
        """Whether the actor's steps leave out samples without advantage."""
        return self.objective.leaves_out(self.config.perf.skip_zero_advantages, elsewhere=self.models.actor.balances)

    def load(self) -> Resume:
        if self.config.perf.threads:
            torch.set_num_threads(self.config.perf.threads)
        self._starting = True
        unread.begin()
        with self._explained("load"):
            self.models = Models(self.config, self.hooks, self.rank)
            resume = self.models.load()
        actor = self.models.actor
        self.throughput.trained = Trained.of(actor.chunks, actor.settings.mtp_num_layers or 0)
        logger.info("Loaded checkpoint from %s", resume.source)
        return resume

    def take_batch(self, batch: Batch) -> None:
        for i, sample in enumerate(batch.samples):  # one rank reads the values of each: what none reads, none holds
            self.columns.check(sample, values=i % self.rank.size == self.rank.index)
        self.batch = batch
        heap.give_back()
        self.models.async_save.settle()

    def score(self) -> dict[str, float]:
        """Old and reference log-probs, with the packing that the steps will use: then the first ratio is exactly 1."""
        around = self.hooks.log_prob
        access = Access(self, None)
        metrics = self._score(access) if around is None else around(lambda: self._score(access), access)
        self.throughput.add(metrics, [sample.length for sample in self.batch.samples])
        return metrics

    def advantage(self) -> dict[str, float]:
        """Every rank works it out from the same columns: nothing to send, and an error is everyone's."""
        name = chosen(self.config, "advantage")
        with self.profiler.phase("advantage", self.batch.rollout_id):
            with read_only(self.batch.samples, f"advantage {name!r}"):
                advantages = self.hooks.advantage[name](self.batch)
            metrics = advantage.fill(self.batch, advantages, name)
        if self.hooks.shape_advantages is not None:
            self.batch = self.hooks.shape_advantages(self.batch)
            advantage.check(self.batch, "shape_advantages")
        if self.config.algorithm.normalize_advantages:
            advantage.whiten(self.batch)
        return metrics

    def step(self, index: int) -> dict[str, float]:
        self.models.async_save.settle()
        begin, access = time.perf_counter(), Access(self, index)
        with self._phase(f"step {index}"):
            metrics = self._actor_step(lambda: self.train(self.models.actor, access.samples, self.objective), access)
        if self._starting:
            self._started()
        metrics |= {"perf/actor_train_time": time.perf_counter() - begin}
        taken = with_advantage(access.samples) if self.skips else access.samples
        self.throughput.add({"perf/actor_train_time": metrics["perf/actor_train_time"]},
                            [sample.length for sample in taken])
        last = index + 1 == self.config.rollout.num_steps_per_rollout
        return metrics | self.throughput.rates() if last else metrics

    def _started(self) -> None:
        """A step has been made: options that nothing has read so far have no effect."""
        self._starting = False
        names = self.models.actor.without_effect(unread.end())
        if names and self.rank.index == 0:
            logger.warning("%s: no effect, as nothing in this run reads it", ", ".join(
                f"{who(self.config, f'megatron.{name}')} = {self.config.surface('megatron')[name]}" for name in names))

    def end_batch(self) -> Batch | None:
        batch, self.batch = self.batch, None
        heap.give_back()
        if self.config.perf.colocate and self.config.perf.offload_rollout:
            empty_cache()  # the engine wakes up on this GPU, and what a step leaves in torch's cache may be its room
        return batch if self.rank.index == 0 else None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """What the engine gets, on the first rank; the others only take part in it."""
        return self._on_first(self.models.for_engine())

    def _on_first(self, stream: Iterator) -> Iterator | None:
        if self.rank.index == 0:
            return stream
        for _ in stream:
            pass
        return None

    def connect(self, sender: Sender | None) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = sender
        if sender is not None:
            sender.open(self.rank)

    def send(self, version: int) -> dict[str, float] | None:
        with self._explained("send"):
            stream = self.models.for_engine(stacked=getattr(self.sender, "takes_stacks", False))
            figures = self.sender.send(stream, version)
        logger.info("weight_sync to version %d sent: %s", version, figures)
        return figures if self.rank.index == 0 else None

    def offload(self, tags: Sequence[str]) -> None:
        self.models.async_save.settle()
        self.models.offload(tags)

    def onload(self, tags: Sequence[str]) -> None:
        with self._explained("onload"):
            self.models.onload(tags)

    def save(self, folder: Path, rollout_id: int, state: dict) -> None:
        with self._explained("save"):
            self.models.save(folder, rollout_id, state)

    def saved(self) -> None:
        self.models.async_save.wait()

    def export(self, folder: Path) -> None:
        stream = self.models.stream()
        if self.hooks.save_weights is not None:
            stream = self.hooks.save_weights(stream, folder)
        if (stream := self._on_first(stream)) is not None:
            self.models.export(folder, stream)

    def hashes(self, batch: Batch) -> dict[str, object] | None:
        """Of the weights and of a batch's columns, for --debug-determinism; the first rank's."""
        if (stream := self._on_first(self.models.stream())) is None:
            return None
        return {"weights": hashes.tensor_hashes(stream), "batch": hashes.column_hashes(batch.samples)}

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        if "models" in vars(self):
            self.models.close()
        cpu.leave()

    def _explained(self, phase: str) -> AbstractContextManager[None]:
        return explained(phase, self.rank.index, self.config, starting=self._starting)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A part of a rollout's training: traced, and named if memory runs out."""
        with self.profiler.phase(name, self.batch.rollout_id), self._explained(name):
            yield

    def part(self, index: int) -> list[Sample]:
        """What an optimizer step trains on."""
        samples = self.batch.samples
        steps = packing.in_steps(rollouts_of(samples), self.config.rollout.num_steps_per_rollout)
        return [samples[i] for i in steps[index]]

    def micro_batches(self, samples: Sequence[Sample], *, gradient: bool = True) -> list[list[Sample]]:
        """This data-parallel rank's share of a step's samples, in micro-batches."""
        perf = self.config.perf
        limit = perf.max_tokens_per_gpu if perf.use_dynamic_batch_size else None
        if limit is not None and not gradient:
            limit = perf.log_probs_max_tokens_per_gpu or limit
        lengths = [sample.length for sample in samples]
        capacity = None if limit is None else limit * self.layout.context
        if gradient and self.rank.index == 0:
            for i in packing.oversized(lengths, capacity):
                logger.warning("%s has %d tokens, more than the %d of a micro-batch: it gets one of its own and "
                               "takes more memory than planned", samples[i].name, lengths[i], capacity)
        plan = packing.schedule(
            lengths, data=self.layout.data, capacity=capacity, micro_batch_size=perf.micro_batch_size,
            multiple=self.layout.micro_batch_multiple, balance=perf.balance_data, loads=self._loads(lengths),
        )  # fmt: skip
        return in_micro_batches(samples, plan[parallel_state.get_data_parallel_rank()])

    def _loads(self, lengths: Sequence[int]) -> list[int] | None:
        """What --balance-by-flops balances; None for tokens."""
        if (size := self.architecture) is None:
            return None
        met = estimate.active_parameters(size)
        return [estimate.flops(n, parameters=met, attention=size.attention_of(n)) for n in lengths]

    def train(self, model: ModelOnRank, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """One optimizer step of a model."""
        reduced = sample_weights(self.config, self.hooks, samples)
        token_weight = dict(zip(map(id, samples), reduced, strict=True))
        shares: dict[str, torch.Tensor] = {}

        def loss_of(hidden: torch.Tensor, batch) -> torch.Tensor:
            weights = np.array([token_weight.get(id(sample), 0.0) for sample in batch.samples], np.float32)
            per_sample = on_device(weights, hidden.device)
            scored = Scored(model, hidden, batch, self.temperature)
            value, share, log_probs = objective(scored, per_sample[batch.sample])
            if scores is not None:
                scores.put(batch, {"log_probs": log_probs})
            for key, term in share.items():  # where they were computed: a number would wait for the device
                shares[key] = shares[key] + term if key in shares else term
            return value

        model.zero_grad()
        at_once = self.layout.data * self.layout.micro_batch_multiple
        leaves_out = objective.actor and self.skips
        taken = with_advantage(samples) if leaves_out else samples
        rides = self.micro_batches(with_fillers(taken, self.config.perf, at_once) if leaves_out else taken)
        tokens = sum(sample.length for sample in taken)
        unscored = self.config.algorithm.skip_actor_forward_only and not any("log_probs" in s.columns for s in taken)
        scores = ColumnScatter(taken) if objective.actor and unscored else None
        with self.profiler.range("forward/backward"), model.router_losses(tokens):
            forward_backward.run(model, self.columns, rides, loss_of, name=model.name,
                                 around=self.hooks.microbatch, embedding=self.hooks.embedding_rows,
                                 rope=self.hooks.rope_positions, blocks=self.hooks.attention_blocks)
        objective.check_finite()
        if scores is not None:
            scores.scatter()
            if self.config.algorithm.true_on_policy_mode:
                check_equal(taken, SUSPECT)
        # Metrics are means over what was taken, also where the reduction's weights do not add up to 1; the loss is what
        # it is.
        total = float(sum(token_weight[id(one)] * one.columns["loss_mask"].sum() for one in taken)) or 1.0
        with self.profiler.range("optimizer"):
            metrics = {key: value / (1.0 if key in ("loss", "pg_loss") else total)
                     for key, value in _totals(_numbers(shares)).items()} | model.step()
        if leaves_out:
            metrics["skipped_samples"] = 1 - len(taken) / len(samples)
        prefix = "train" if model is self.models.actor else model.name
        return {f"{prefix}/{key}": value for key, value in metrics.items()} | (
            {} if scores is None else mismatch(taken, self.batch.version))

    def scoring_pass(self, name: str, samples: Sequence[Sequence[Sample]],
                     read: Callable[[ScoredRows], Mapping[str, torch.Tensor]]) -> None:
        """Fill columns from a pass of a model without gradient, over steps' samples one after the other."""
        columns = ColumnScatter([sample for part in samples for sample in part])
        with self.models.at(name) as model, torch.no_grad():

            def fill(hidden: torch.Tensor, batch) -> torch.Tensor:
                columns.put(batch, read(Scored(model, hidden, batch, self.temperature)))
                return hidden.new_zeros(())

            for part in samples:
                forward_backward.run(model, self.columns, self.micro_batches(part, gradient=False), fill, name=name,
                                     around=self.hooks.microbatch, embedding=self.hooks.embedding_rows,
                                     rope=self.hooks.rope_positions, blocks=self.hooks.attention_blocks,
                                     forward_only=True)
        columns.scatter()

    def _score(self, access: Access) -> dict[str, float]:
        algorithm, metrics = self.config.algorithm, {"perf/log_probs_time": 0.0}
        if not (algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
            begin = time.perf_counter()
            with self._phase("log_probs"):
                access.forward("actor", lambda rows: {"log_probs": rows.log_probs()})
            if algorithm.true_on_policy_mode:
                check_equal(self.batch.samples, SUSPECT)
            metrics.update(mismatch(self.batch.samples, self.batch.version))
            metrics["perf/log_probs_time"] = time.perf_counter() - begin
        if self.models.has_reference:
            begin = time.perf_counter()
            with self._phase("ref_log_probs"):
                access.forward("ref", lambda rows: {"ref_log_probs": rows.log_probs()})
            metrics["perf/ref_log_probs_time"] = time.perf_counter() - begin
            values = trained(self.batch.samples, "ref_log_probs")
            metrics["rollout/ref_log_probs"] = float(values.mean()) if values.size else 0.0
        return metrics


class Access:
    """See stages.step.TrainerAccess."""

    def __init__(self, trainer: MegatronTrainer, index: int | None):
        self._trainer, self.batch, self.index = trainer, trainer.batch, index
        self.samples = trainer.batch.samples if index is None else trainer.part(index)

    def forward(self, model: str, read: Callable[[ScoredRows], Mapping[str, torch.Tensor]]) -> None:
        trainer = self._trainer
        steps = range(trainer.config.rollout.num_steps_per_rollout)
        parts = [trainer.part(i) for i in steps] if self.index is None else [self.samples]
        trainer.scoring_pass(model, parts, read)

    def step(self, model: str, loss: PolicyLoss) -> dict[str, float]:
        trainer = self._trainer
        with trainer.models.at(model) as model_on_rank:
            return trainer.train(model_on_rank, self.samples, Objective(trainer.config, trainer.hooks, loss))

    def chunks(self, model: str) -> Sequence[torch.nn.Module]:
        return self._trainer.models.place(model).chunks

    def optimizer(self, model: str) -> object:
        model_on_rank = self._trainer.models.on_rank[model]
        model_on_rank.memory.arrived()
        return model_on_rank.optimizer

    def scheduler(self, model: str) -> object:
        return self._trainer.models.on_rank[model].scheduler


def _numbers(terms: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """All of them by one copy from the device."""
    return dict(zip(terms, torch.stack(list(terms.values())).tolist(), strict=True)) if terms else {}


def _totals(shares: dict[str, float]) -> dict[str, float]:
    """Shares of all ranks that see different tokens, added up; only the last pipeline stage has any."""
    group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    return {key: sum(each) for key, each in gathered(shares, group).items()}
