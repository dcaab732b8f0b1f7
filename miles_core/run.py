"""Run: what the loop calls. Built once from a plan; holds the parts and knows nothing of their order."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.columns import read_only
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError, HookError, MilesError, WaitError
from miles_core.evaluation import Evaluation
from miles_core.hosts import Handle
from miles_core.plugins.state import with_ranks
from miles_core.record.journal import Journal
from miles_core.record.replay import save_batch, save_flow
from miles_core.stages.buffer import Buffer, Slot, Taken, stale_drop
from miles_core.stages.filter import filter_group
from miles_core.stages.metrics import rollout_metrics, times
from miles_core.stages.on_policy import check_first
from miles_core.stages.placement import Placement, engines
from miles_core.stages.prompts import PromptSource
from miles_core.stages.reward import Scoring, finite
from miles_core.stages.rollout import Engine
from miles_core.stages.sync import WeightSync
from miles_core.types import Batch, Drop, Group, Prompt
from miles_core.waits import within


@dataclass
class Run:
    """The parts of a run, and what the loop asks of them.

    Args:
        first, last: rollouts first .. last-1 are done.
        steps: optimizer steps of each rollout.
        generate: slot -> group, its answers sampled; some unfinished where the slot was called back.
        chain, shape: the bound filter_group and shape_rewards chains, or None.
        trainer: handle of the hosted trainer.
        unfinished, select: the bound chains unfinished and select_from_buffer, or None.
        state: () -> JSON state of the plugins, for checkpoints.
        hook_timings: () -> metrics of the time in hooks of driver and rollout since its last call.
        begun: groups that were called back and go on later, oldest first.
        clock: seconds, for the figures under perf/.
        version: of the weights that the engine has.
        weights_current: whether the trainer holds that version, too: between a sync and the next batch.
        made_of: the lock of the run that saved the checkpoint, until this run is told its own; empty without one.
        errors: of what was started, in the order in which it failed.
    """

    config: RunConfig
    first: int
    last: int
    steps: int
    prompts: PromptSource
    generate: Callable[[Slot], Coroutine[Any, Any, Group]]
    scoring: Scoring
    chain: Callable[[Group], Group | Drop] | None
    shape: Callable[[list[Group]], list[Group]] | None
    buffer: Buffer
    engine: Engine | None
    trainer: Handle
    weight_sync: WeightSync
    placement: Placement
    evaluation: Evaluation
    journal: Journal
    unfinished: Callable[[Group], Group] | None = None
    select: Callable[[list[Group], int], list[Group]] | None = None
    state: Callable[[], dict] = dict
    hook_timings: Callable[[], dict[str, float]] = dict
    clock: Callable[[], float] = time.perf_counter
    version: int = 0
    weights_current: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    resumable: dict = field(default_factory=dict)
    made_of: dict = field(default_factory=dict)
    begun: list[Group] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _stepped: Counter[str] = field(default_factory=Counter)
    _same_model: bool = False
    _mark: float = 0.0
    _finished: float = 0.0
    _running: set[asyncio.Task] = field(default_factory=set)

    def rollouts(self) -> Iterator[int]:
        """The rollouts that are left to do; with each begins the wait for its batch."""
        for rollout_id in range(self.first, self.last):
            self._mark = self.clock()
            yield rollout_id

    def start(self, work: Coroutine) -> asyncio.Task:
        """Have work done beside whatever else goes on, until `rest`."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def rest(self) -> None:
        """End what still goes on."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self) -> None:
        """Start the engine."""
        self._finished = self._mark = self.clock()
        self.placement.attach(self.trainer, self.engine)
        if self.engine is not None:
            async with self.placement.lease("start"):
                await self.engine.start()

    def prompt(self, slot: Slot) -> None:
        """Stage 1: a group that was called back goes on, else the next prompt; a restored slot has its own."""
        slot.since = self.clock()
        if slot.prompt is not None:
            return
        group = self._selected() if self.begun else None
        if group is None:
            slot.prompt = self._next()
        else:
            slot.prompt, slot.begun = group.prompt, tuple(group.samples)

    def _next(self) -> Prompt:
        who = f"prompt source {self.config.rollout.prompt_source!r}"
        try:
            return self.prompts.next()
        except StopIteration:
            raise DataError("it ended, but the run needs more prompts", code="prompts-exhausted", who=who,
                            fix="start again at its end, as an endless stream does, or lower --num-rollout") from None
        except MilesError:
            raise
        except Exception as error:
            raise DataError("it failed", code="prompt-source-failed", got=f"{type(error).__name__}: {error}", who=who,
                            fix="correct the prompt source") from error

    async def rollout(self, slot: Slot) -> Group:
        """Stage 2; what is too stale already is not gone on with."""
        partial = Group(slot.prompt, list(slot.begun))
        return partial if self.too_stale(partial) else await self.generate(slot)

    async def reward(self, group: Group) -> Group:
        """Stage 3."""
        return group if isinstance(filter_group(group, None), Drop) else await self.scoring(group)

    def filter(self, group: Group) -> Group | Drop:
        """Stage 4."""
        self._finished = self.clock()
        return stale_drop(group) if self.too_stale(group) else filter_group(group, self.chain)

    async def requeue(self, slots: list[Slot]) -> None:
        """Of slots that no batch can hold: what a plugin keeps goes on later, the prompts of the others come again."""
        keep = self.unfinished is not None
        if keep:
            await self._recall(slots)
        anew, before = [], len(self.begun)
        for slot in slots:
            if slot.task is not None:
                slot.task.cancel()
            stale = isinstance(slot.outcome, Drop) and slot.outcome.reason == "stale"
            group = slot.group or (Group(slot.prompt, list(slot.begun)) if slot.begun else None)
            remainder = self.unfinished(group) if keep and group is not None and not stale else None
            if remainder is not None and remainder.samples:
                self.begun.append(remainder)
            elif slot.prompt is not None:
                anew.append(slot.prompt)
        self.prompts.give_back(anew)
        if keep:
            self.metrics["rollout/called_back"] = self.metrics.get("rollout/called_back", 0) + len(self.begun) - before

    def too_stale(self, group: Group) -> bool:
        """Whether --max-weight-staleness says that a group must not be trained on with the weights of now."""
        most = self.config.rollout.max_weight_staleness
        drawn = any(sample.response_length for sample in group.samples)
        return most is not None and drawn and self.version - group.oldest_version > most

    async def _recall(self, slots: list[Slot]) -> None:
        """End the requests of these slots, and wait until each has what was drawn."""
        for slot in slots:
            slot.recall.cancelled = True
        under_way = [slot for slot in slots if slot.task is not None and not slot.task.done()]
        if not under_way:
            return
        limit = self.config.rollout.rollout_timeout
        async with within(limit, lambda: WaitError(
                f"cancelled groups did not end within {limit:g} s", code="cancelled-groups-timeout",
                who="the engine or a generator",
                got=f"prompts {[slot.prompt.uid for slot in under_way if not slot.task.done()]}",
                fix="see the engine's log; a generator must end with its engine calls")):
            if ids := [id for slot in under_way for id in slot.recall.ids]:
                await self.engine.abort(ids)
            await asyncio.wait([slot.task for slot in under_way])

    def _selected(self) -> Group | None:
        chosen = self.begun
        if self.select:
            with read_only([sample for group in self.begun for sample in group.samples], "select_from_buffer"):
                chosen = self.select(list(self.begun), self.version - 1)
        if not chosen:
            return None
        place = next((i for i, group in enumerate(self.begun) if group is chosen[0]), None)
        if place is None:
            raise HookError("select_from_buffer returned a group that it was not given",
                            code="buffer-returned-other-groups", got=f"one of prompt {chosen[0].prompt.uid}",
                            fix="reorder or omit groups, but do not copy them")
        return self.begun.pop(place)

    async def heartbeat(self) -> None:
        """Tell every --heartbeat-interval seconds that sampling lives, and how far it is."""
        rollout = self.config.rollout
        if rollout.max_lag and self.first < self.last:
            self.journal.message("info", f"Continuous async rollout worker started: up to {rollout.max_lag} rollouts "
                                         "ahead of training")
        self._finished = self.clock()
        while rollout.heartbeat_interval:
            await asyncio.sleep(rollout.heartbeat_interval)
            self.beat()

    def beat(self, **more: object) -> None:
        """One heartbeat."""
        now = self.clock()
        self.journal.event("heartbeat", rollout_id=self.version - 1, version=self.version,
                           idle_s=now - self._finished, **self.buffer.figures(now), **more)

    def batch(self, rollout_id: int, taken: Taken) -> Batch:
        """The taken groups as a batch; their rewards go through shape_rewards."""
        self.weights_current = False
        self._timed("rollout_time")
        self._passed_over(rollout_id, taken)
        batch = Batch(rollout_id, taken.groups, self.version)
        if self.config.debug.save_debug_rollout_data:
            save_batch(self.config.debug.save_debug_rollout_data, batch)
        if self.shape is not None:
            for sample in batch.samples:
                sample.metadata.setdefault("raw_reward", sample.reward)
            batch.groups = self.shape(batch.groups)
            for sample in (one for one in batch.samples if one.reward is not None):
                sample.reward = finite("shape_rewards", sample, sample.reward)
        self.metrics.update(rollout_metrics(batch))
        self.journal.stage("train")
        return batch

    async def score(self) -> None:
        """Old and reference log-probs, where a pass is needed for them."""
        self.metrics.update(self._compared(await self.trainer.score()))

    def _compared(self, metrics: dict[str, float]) -> dict[str, float]:
        """The log-probs of a start's first batch, of a pass or of its step, say whether both sides are one model."""
        if self.engine is not None and not self._same_model:
            self._same_model = check_first(metrics, self.config.debug.max_first_logprob_diff)
        return metrics

    async def advantage(self) -> None:
        """Stage 6."""
        self.metrics.update(await self.trainer.advantage())

    async def step(self, index: int) -> None:
        """Stages 7 and 8. Metrics are means over the steps that have them; NAME_time adds up, a rate is the last."""
        for key, value in self._compared(await self.trainer.step(index)).items():
            old, steps = self.metrics.get(key, 0.0), self._stepped[key]
            together = old + value if key.endswith("_time") else (old * steps + value) / (steps + 1)
            self.metrics[key] = together if steps and "lr-" not in key else value
            self._stepped[key] = steps + 1

    async def sync(self, rollout_id: int) -> None:
        """Stage 9: weights that `rollout_id` samples from. Version n serves rollout n-1: 0 is never a trained one."""
        self._timed("train_time")
        await self.evaluation.ended()
        self.journal.stage("sync")
        version, begin = rollout_id + 1, self.clock()
        figures = await self.transfer(self.engine, version)
        self.version, self.weights_current = version, True
        self.metrics["perf/update_weights_time"] = self.clock() - begin
        self.journal.event("weight_sync", rollout_id=rollout_id, version=version, seconds=self.clock() - begin,
                           **figures)
        self.resumable = self._state() if self._saves(rollout_id) else {}
        self.journal.stage("rollout")

    async def transfer(self, engine: Engine | None, version: int) -> dict[str, float]:
        """The trainer's weights to an engine, in time; figures of it."""
        perf = self.config.perf
        async with within(perf.weight_sync_timeout, lambda: WaitError(
                f"the weight sync to version {version} did not finish within {perf.weight_sync_timeout:g} s",
                code="weight-sync-timeout", who=f"weight_sync {perf.weight_sync!r}",
                fix="look at the engine's log, or raise --weight-sync-timeout")):
            return await self.weight_sync.sync(self.trainer, engine, version)

    async def recover(self) -> None:
        """Bring a restarted engine up to date, where the trainer still holds its version; else the next sync does."""
        if not self.weights_current:
            return
        async with self.placement.lease("recover"):
            if not self.weights_current:  # it waited for a step to end
                return
            figures = await self.transfer(self.engine, self.version)
        self.journal.event("engine_recovered", version=self.version, **figures,
                           text=f"a restarted engine has weight version {self.version}")

    async def finish(self, batch: Batch) -> None:
        """Report the rollout, evaluate and save when due."""
        at = batch.rollout_id
        other = at > self.first and (self._saves(at) or self.evaluation.due(at, self.last))
        alone = self.engine is not None and not other  # it did nothing but sample this rollout
        count, size = engines(self.config)  # no engine where they run already, or in the driver's process
        gpus = (count * size or self.config.perf.rollout_num_gpus or 1) if alone else 0
        self.metrics |= self.placement.figures() | self.hook_timings() | times(batch, self.metrics, self.config, gpus)
        self.journal.rollout(batch, self.metrics)
        norm, self.metrics, self._stepped = self.metrics.get("train/grad_norm"), {}, Counter()
        if self.config.debug.debug_determinism and self.steps:
            async with self.placement.lease("save"):
                hashes = await self.trainer.hashes(batch)
            self.journal.hashes(batch.rollout_id, hashes["weights"], hashes["batch"], norm)
        await self.evaluation.begin(self, at + 1)
        if self.resumable:
            await self.save(at + 1)

    def _saves(self, done: int) -> bool:
        """Whether a checkpoint is due after so many rollouts, or asked for."""
        checkpoint, sentinel = self.config.checkpoint, self.config.checkpoint.save_trigger_sentinel
        due = done == self.last or checkpoint.save_interval and done % checkpoint.save_interval == 0
        return bool(checkpoint.save and self.steps and (due or sentinel and Path(sentinel).exists()))

    async def save(self, done: int) -> None:
        """A checkpoint from which rollout `done` is the next. It comes last: a run that is killed before it is complete
        goes on from an earlier one and exports again."""
        self.journal.saving()
        begin, checkpoint = self.clock(), self.config.checkpoint
        if checkpoint.save_trigger_sentinel:
            Path(checkpoint.save_trigger_sentinel).unlink(missing_ok=True)
        async with self.placement.lease("save"):
            if checkpoint.save_hf:
                await self.trainer.export(Path(checkpoint.save_hf.format(rollout_id=done)))
            plugins = with_ranks(self.resumable["plugins"], await self.trainer.plugin_state())
            state = self.resumable | {"plugins": plugins, "lock": self.made_of}
            await self.trainer.save(Path(checkpoint.save), done, state)
            if checkpoint.async_save and done == self.last:
                await self.trainer.saved()
        self.journal.event("checkpoint", rollout_id=done - 1, path=checkpoint.save, seconds=self.clock() - begin,
                           staged=checkpoint.async_save and done < self.last)

    def _state(self) -> dict:
        """What a checkpoint has to hold beside the trainer's part.

        Asked for after a sync, before the room comes back: at max_lag 0 nothing is under way then, so nothing that a
        resumed run does again has left a trace in it.
        """
        source, name = self.buffer if self.prompts is None else self.prompts, self.config.rollout.prompt_source
        state = {"prompt_source": name, **copy.deepcopy({"prompts": source.state_dict(), "plugins": self.state()})}
        return state if self.prompts is None else state | save_flow(self.buffer.slots(), self.begun)

    def _timed(self, name: str) -> None:
        before, self._mark = self._mark, self.clock()
        self.metrics[f"perf/{name}"] = self._mark - before

    def _passed_over(self, rollout_id: int, taken: Taken) -> None:
        for reason, count in taken.drops.items():
            self.journal.event("drop", rollout_id=rollout_id, reason=reason, count=count)
        self.metrics |= {f"rollout/sampled_again/{reason}": float(count) for reason, count in taken.again.items()} | {
            f"rollout/dynamic_filter/drop_{kind}": float(count) for kind, count in (taken.drops | taken.kinds).items()}
