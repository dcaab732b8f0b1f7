"""Groups that are called back and go on, in the shipped loop with the shipped generator, on virtual time.

Hooks: unfinished, select_from_buffer. The engine here draws a token every 0.1 s and answers as a real one does; a
token's log-prob says which weights drew it and where it stands, so that a mix-up of spans shows.
"""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from miles_dapo_filter.plugin import DapoFilter, DapoFilterOptions
from miles_partial_rollout.plugin import PartialRollout, PartialRolloutOptions
from miles_testing.clock import run_virtual
from miles_testing.toy import toy_group, toy_run

from miles_core.config.tables import Rollout, RunConfig
from miles_core.errors import HookError
from miles_core.loop import train
from miles_core.record.replay import load_flow, save_flow
from miles_core.stages.buffer import Buffer, Slot
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.stages.rollout import Generation, Response, SamplingParams, single_turn
from miles_core.types import Drop, Group, Prompt

MOST, SECONDS, PROMPT = 60, 0.1, 3


class Engine:
    """Draws as many tokens as an answer is long, or until it is told to end."""

    def __init__(self, seed):
        self.version, self.seed = 0, seed
        self.drawn = Counter()
        self.ending = {}
        self.asked = []

    async def start(self):
        """Ready."""

    def length(self, request_id):
        return min(MOST, int(3 * random.Random(f"{self.seed}-{request_id}").paretovariate(0.8)))

    async def generate(self, request):
        held, tokens, versions = len(request.input_ids) - PROMPT, [], []
        self.ending[request.id] = False
        self.asked.append((request.id, held, self.version))
        try:
            while not self.ending[request.id]:
                await asyncio.sleep(SECONDS)
                tokens.append(100 + held + len(tokens))
                versions.append(self.version)
                if len(tokens) == self.length(request.id) - held:
                    break
        finally:
            self.drawn[int(request.id.split("-")[1])] += len(tokens)
        reason = "stop" if len(tokens) == self.length(request.id) - held else "abort"
        places = np.arange(held, held + len(tokens))
        return Response(np.array(tokens, np.int32), -(np.array(versions) + places / 1000).astype(np.float32),
                        np.array(versions, np.int32), reason)

    async def abort(self, ids=None):
        for id in self.ending if ids is None else ids:
            self.ending[id] = True


class Sync:
    """Brings a version; with `abort` it ends every request, as --pause-generation-mode abort does."""

    def __init__(self, abort):
        self.abort = abort

    async def sync(self, trainer, engine, version):
        if self.abort:
            await engine.abort()
        await asyncio.sleep(0.3)
        engine.version = version
        return {}


async def parity(sample):
    return float(sample.response_length % 2)


def partial(*, seed=0, abort=False, mask=False, dropped=lambda uid: False, **settings):
    """A run of the toy loop with the plugin, whose answers are drawn by Engine."""
    settings = {"rollouts": 8, "batch_size": 4, "max_lag": 0, "credit": 4, "order": "window", **settings}
    run = toy_run(duration=lambda uid, tries: 0.0, resumes=True,
                  again=settings.pop("again", frozenset()) | {"aborted"}, **settings)
    run.engine, run.weight_sync = Engine(seed), Sync(abort)
    run.scoring = Scoring({"parity": parity}, {"parity": 1.0}, weighted_sum, 60.0)
    run.chain = lambda group: Drop("chosen") if dropped(group.prompt.uid) else group
    plugin = PartialRollout(PartialRolloutOptions(mask_offpolicy_in_partial_rollout=mask),
                            RunConfig(rollout=Rollout(rollout_max_response_len=MOST)))
    run.unfinished, run.shape = plugin.unfinished, plugin.shape_rewards
    run.select = lambda groups, rollout_id: plugin.select_from_buffer(groups)

    async def generate(slot):
        generation = Generation(
            engine=run.engine, sampling=SamplingParams(max_new_tokens=MOST), samples=2, key=lambda index, turn: 0,
            decode=lambda ids, skip: f"{len(ids)} tokens", timeout=600.0, begun=slot.begun, recall=slot.recall)
        return Group(slot.prompt, await single_turn(slot.prompt, generation))

    run.generate = generate
    return run


def go(**settings):
    run = partial(**settings)
    run_virtual(lambda: train(run))
    return run


def groups_of(run):
    """Groups that were trained on, and those that are still to come."""
    slots = [slot for _, slot in run.buffer.slots()]
    ended = [slot.group for slot in slots if isinstance(slot.outcome, Group) or
             isinstance(slot.outcome, Drop) and slot.outcome.reason == "aborted"]
    spans = [Group(slot.prompt, list(slot.begun)) for slot in slots if slot.outcome is None and slot.begun]
    return [group for batch in run.trainer.batches for group in batch.groups], ended + spans + run.begun


def tokens(groups):
    """Response tokens of each prompt."""
    found = Counter()
    for group in groups:
        found[group.prompt.uid] += sum(sample.response_length for sample in group.samples)
    return found


SETTINGS = [{}, {"max_lag": 2}, {"order": "started"}, {"max_lag": 1, "credit": 0, "abort": True},
            {"max_lag": 2, "credit": 3, "abort": True, "order": "started"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_lost_and_every_row_is_what_was_drawn(settings, seed):
    run = go(seed=seed, **settings)
    trained, waiting = groups_of(run)
    assert len(trained) == 32
    resumed = [s for group in trained for s in group.samples if "cuts" in s.metadata]
    assert resumed, "nothing went on, so this shows nothing"
    drawn, held = run.engine.drawn, tokens(trained) + tokens(waiting)
    under_way = {slot.prompt.uid for _, slot in run.buffer.slots() if slot.outcome is None}  # cut off by the run's end
    assert all(drawn[uid] == held[uid] for uid in drawn.keys() - under_way)
    assert all(drawn[uid] >= held[uid] for uid in under_way)
    for sample in (s for group in trained + waiting for s in group.samples):
        versions, places = sample.columns["versions"], np.arange(sample.response_length)
        assert sample.tokens[PROMPT:].tolist() == (100 + places).tolist(), "append-only, each place drawn once"
        np.testing.assert_array_equal(sample.columns["rollout_log_probs"],
                                      -(versions + places / 1000).astype(np.float32))
        assert (np.diff(versions) >= 0).all() and sample.columns["loss_mask"].all()
        if sample.response_length:
            assert sample.metadata.get("start_rollout_id", versions[0] - 1) == versions[0] - 1
    for sample in (s for group in trained for s in group.samples):
        assert sample.response_length == run.engine.length(f"train-{sample.prompt.uid}-{sample.index}") <= MOST
        assert sample.text == f"{sample.response_length} tokens" or "cuts" not in sample.metadata
    reports = [metrics for _, metrics in run.journal.rollouts]
    assert sum(m["rollout/called_back"] for m in reports) > 0
    assert max(m["rollout/resumed"] for m in reports) > 0


def test_what_was_called_back_before_goes_on_before_what_began_later():
    """It has its place behind them, since they began while it waited for one."""
    back = []

    async def requeue(slots):
        back.extend(slot.prompt.uid for slot in slots)

    groups = [toy_group(Prompt(uid, uid, "", (1,)), 0) for uid in (7, 8, 4, 5, 6)]
    buffer = Buffer(2, 1, batches=9, credit=3, resumes=True, requeue=requeue)
    buffer.restore(Slot(-1, group.prompt, tuple(group.samples) if group.prompt.uid < 7 else (), outcome=group)
                   for group in groups)
    taken = asyncio.run(buffer.take())
    assert [group.prompt.uid for group in taken.groups] == [4, 5] and back == [6, 7, 8]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_prompt_is_lost_or_trained_on_twice(settings):
    run = go(seed=7, dropped=lambda uid: uid % 5 == 0, **settings)
    trained, waiting = groups_of(run)
    uids = [group.prompt.uid for group in trained]
    assert len(set(uids)) == len(uids) == 32 and not any(uid % 5 == 0 for uid in uids)
    under_way = [slot.prompt.uid for _, slot in run.buffer.slots() if not isinstance(slot.outcome, Drop)]
    known = {*uids, *under_way, *run.prompts.again, *(group.prompt.uid for group in waiting)}
    lost = set(range(run.prompts.fresh)) - known
    assert all(uid % 5 == 0 for uid in lost), "only what the filter drops may be gone"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_checkpoint_at_any_moment_of_a_sync_misses_no_group(settings):
    """A group is in a batch, in a slot, kept, or its prompt is to come again, also while it is being called back."""
    run, moments = partial(seed=5, rollouts=12, **settings), []

    def check():
        trained = [group for batch in [*run.trainer.batches, run.trainer.batch] if batch for group in batch.groups]
        slots = [slot.prompt.uid for _, slot in run.buffer.slots()]
        kept = [group.prompt.uid for group in run.begun]
        waiting = [*slots, *kept, *run.prompts.again]
        assert len(set(waiting)) == len(waiting), "would be sampled twice"
        assert {*waiting, *(group.prompt.uid for group in trained)} == set(range(run.prompts.fresh))
        moments.append(len(waiting))

    class Watched(Sync):
        async def sync(self, trainer, engine, version):
            if self.abort:
                await engine.abort()
            for step in range(400):
                await asyncio.sleep(0 if step % 8 else 0.006)
                check()
            engine.version = version
            return {}

    run.weight_sync = Watched(settings.get("abort", False))
    run_virtual(lambda: train(run))
    assert len(moments) == 400 * 13


def test_a_window_waits_for_nobody_and_long_answers_are_trained_on_all_the_same():
    """The slowest group of a batch goes on in the next one: time is saved, and no length is preferred in the end."""
    def seconds(order):
        async def main():
            await train(run)
            return asyncio.get_running_loop().time()
        run = partial(rollouts=40, order=order)
        return run, run_virtual(main)

    (window, fast), (started, slow) = seconds("window"), seconds("started")
    assert fast < 0.75 * slow
    for run in (window, started):
        trained, waiting = groups_of(run)
        behind = {group.prompt.uid for group in waiting}
        uids = {group.prompt.uid for group in trained}
        assert uids | behind == set(range(run.prompts.fresh)), "whoever is not trained on yet has begun"
        assert len(behind) <= 4
    lags = [m["rollout/weight_version/lag"] for _, m in window.journal.rollouts]
    assert 0 < max(lags) < 8


@pytest.mark.parametrize("again", [frozenset(), frozenset({"stale"})], ids=["drop", "retry"])
def test_groups_that_become_too_stale_are_not_gone_on_with(again):
    run = go(rollouts=30, options={"max_weight_staleness": 1}, again=again, seed=1)
    lags = [m["rollout/weight_version/lag"] for _, m in run.journal.rollouts]
    assert max(lags) <= 1
    drops = sum(fields["count"] for kind, _, fields in run.journal.events if kind == "drop")
    retried = sum(m.get("rollout/sampled_again/stale", 0) for _, m in run.journal.rollouts)
    assert (drops, retried > 0) == (0, True) if again else (drops > 0, retried) == (True, 0)
    begun = Counter()
    for id, held, version in run.engine.asked:  # a stale group draws no further token
        begun[id] = version if held == 0 else begun[id]
        assert version - begun[id] <= 1, (id, held, version)


def test_masked_spans_are_not_trained_on():
    run = go(mask=True, rollouts=20)
    resumed = 0
    for batch in run.trainer.batches:
        for group in batch.groups:
            for sample in group.samples:
                current = sample.columns["versions"] == batch.version
                np.testing.assert_array_equal(sample.columns["loss_mask"], current.astype(np.uint8))
                resumed += "cuts" in sample.metadata
            assert any(sample.columns["loss_mask"].any() for sample in group.samples), "something is left to train on"
    assert resumed
    assert all(metrics["rollout/off_policy_tokens"] == 0 for _, metrics in run.journal.rollouts)


def test_what_is_called_back_first_goes_on_first():
    run = go(credit=8, rollouts=4)
    versions = {}
    for id, held, version in run.engine.asked:
        if held:
            versions.setdefault(version, []).append(int(id.split("-")[1]))
    assert versions and all(uids == sorted(uids) for uids in versions.values())


def test_a_function_decides_what_goes_on_and_may_leave_it_out():
    run, seen = partial(credit=6, rollouts=4), []

    def select(groups, rollout_id):
        seen.append((rollout_id, [group.prompt.uid for group in groups]))
        return list(reversed(groups)) if rollout_id % 2 else []

    run.select = select
    run_virtual(lambda: train(run))
    assert any(len(uids) > 1 for _, uids in seen)
    went_on = [int(id.split("-")[1]) for id, held, version in run.engine.asked if held and version % 2 == 1]
    assert not went_on, "rollout n is sampled from version n + 1"
    evens = [int(id.split("-")[1]) for id, held, version in run.engine.asked if held]
    assert evens and evens[0] > evens[-1]


def test_dynamic_sampling_with_partial_rollout_drops_what_has_no_spread_and_nothing_else():
    """Every group that began is trained on, dropped with a reason and a kind, or goes on later."""
    run = partial(seed=3, rollouts=12, credit=8)
    config = RunConfig(rollout=Rollout(n_samples_per_prompt=2))
    run.chain = DapoFilter(DapoFilterOptions(), config).filter_group
    run_virtual(lambda: train(run))
    trained, waiting = groups_of(run)
    assert len(trained) == 48
    assert all({sample.reward for sample in group.samples} == {0.0, 1.0} for group in trained)
    assert any("cuts" in sample.metadata for group in trained for sample in group.samples)
    drops, kinds = Counter(), Counter()
    for _, metrics in run.journal.rollouts:
        for name, count in metrics.items():
            if name.startswith("rollout/dynamic_filter/drop_"):
                (kinds if name.count("/") == 3 else drops)[name] += count
    assert drops.keys() == {"rollout/dynamic_filter/drop_reward_std_zero"}
    assert {name.rpartition("/")[2] for name in kinds} == {"all_right", "all_wrong"}
    assert sum(drops.values()) == sum(kinds.values()) > 0
    slots = [slot for _, slot in run.buffer.slots()]
    to_come = {*(group.prompt.uid for group in waiting), *(slot.prompt.uid for slot in slots), *run.prompts.again}
    gone = set(range(run.prompts.fresh)) - {group.prompt.uid for group in trained} - to_come
    assert len(gone) == sum(drops.values()), "whoever is gone was counted"


def test_a_checkpoint_keeps_what_kind_a_drop_was():
    slot = Slot(0, Prompt(4, 4, "", (1, 2, 3)), outcome=Drop("reward_std_zero", "all scored 1", "all_right"))
    (found,), _ = load_flow(save_flow([(0, slot)], []))
    assert found.outcome == slot.outcome


def test_a_function_that_copies_is_refused():
    run = partial(rollouts=4)
    run.select = lambda groups, rollout_id: [Group(group.prompt, group.samples) for group in groups]
    with pytest.raises(HookError, match=r"\[buffer-returned-other-groups\]"):
        run_virtual(lambda: train(run))
