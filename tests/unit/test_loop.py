"""The shipped loop, buffer and leases on virtual time: the staleness bound, exactness at max_lag 0, how runs end."""

import asyncio
import gc
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from miles_testing.clock import run_virtual
from miles_testing.toy import FinishOrder, toy_group, toy_run

from miles_core.errors import ColumnError, RewardError, StarvedError, WaitError
from miles_core.evaluation import Evaluation
from miles_core.loop import train
from miles_core.stages.buffer import Buffer, Slot
from miles_core.stages.placement import Turns
from miles_core.types import Prompt


def uneven(seed):
    """Sampling times with a heavy tail, the same for the same prompt and try."""
    return lambda uid, tries: random.Random(f"{seed}-{uid}-{tries}").paretovariate(1.1)


def third(uid):
    return uid % 3 == 0


class Evaluating(Evaluation):
    """An evaluation that does what it is told, and when."""

    def __init__(self, work, due):
        super().__init__([], None)
        self.work, self.when = work, due

    def due(self, done, last):
        return self.when(done)

    async def __call__(self):
        return await self.work()


def trained(run):
    return [[group.prompt.uid for group in batch.groups] for batch in run.trainer.batches]


def lags(run):
    return [batch.version - group.oldest_version for batch in run.trainer.batches for group in batch.groups]


def go(**settings):
    run = toy_run(**settings)
    run_virtual(lambda: train(run))
    return run


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize("credit", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_observed_lag_never_exceeds_max_lag(max_lag, credit, seed):
    run = go(rollouts=12, batch_size=4, max_lag=max_lag, credit=credit, duration=uneven(seed), dropped=third)
    assert len(run.trainer.batches) == 12
    assert max(lags(run)) <= max_lag
    assert all(not third(uid) for uids in trained(run) for uid in uids)
    counts = Counter(uid for uids in trained(run) for uid in uids)
    assert set(counts.values()) == {1}, "a prompt was trained on twice"


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_the_bound_is_reached_when_training_is_the_slow_side(max_lag):
    run = go(rollouts=12, batch_size=4, max_lag=max_lag, duration=lambda uid, tries: 0.01, train=5.0)
    assert max(lags(run)) == max_lag


@pytest.mark.parametrize("credit", [0, 2, 8])
def test_at_max_lag_0_no_timing_changes_what_is_trained_on(credit):
    runs = [go(rollouts=8, batch_size=4, max_lag=0, credit=credit, duration=uneven(seed), dropped=third)
            for seed in range(6)]
    assert len({str(trained(run)) for run in runs}) == 1
    kept = [uid for uid in range(200) if not third(uid)]
    assert trained(runs[0]) == [kept[i : i + 4] for i in range(0, 32, 4)], "prompts in order, none skipped"
    reported = [[{k: v for k, v in m.items() if not k.startswith("perf/")} for _, m in run.journal.rollouts]
                for run in runs]
    assert all(one == reported[0] for one in reported), "drop counts must not depend on timing either"


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_the_side_that_dies_ends_the_run_with_its_own_error(max_lag, side):
    run = toy_run(rollouts=10, batch_size=4, max_lag=max_lag, duration=uneven(1),
                  crash=(lambda uid: uid == 17) if side == "rollout" else lambda uid: False)
    if side == "train":
        async def fails(index):
            if len(run.trainer.batches) == 3:
                raise ZeroDivisionError("prompt 17")
            return {}
        run.trainer.step = fails
    unread = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context["message"]))
        await train(run)

    with pytest.raises(ZeroDivisionError, match="prompt 17"):
        run_virtual(watched)
    assert len(run.trainer.batches) <= 5
    run = None  # it holds the error, whose frames hold both sides
    gc.collect()
    assert unread == [], "asyncio prints the traceback of an error that nobody took"


def test_a_weight_sync_before_the_first_rollout_and_one_after_each():
    run = go(rollouts=5, batch_size=4, max_lag=0, duration=uneven(0))
    assert run.weight_sync.versions == [1, 2, 3, 4, 5, 6]
    assert [batch.version for batch in run.trainer.batches] == [1, 2, 3, 4, 5]


def test_a_weight_sync_that_stalls_is_bounded_and_named():
    run = toy_run(rollouts=3, batch_size=4, max_lag=0, duration=uneven(0))
    run.weight_sync.seconds = 601
    with pytest.raises(WaitError, match="weight sync to version 1 did not finish within 600 s"):
        run_virtual(lambda: train(run))


def test_sampling_goes_on_while_training_only_above_max_lag_0():
    def seconds(max_lag):
        async def main():
            await train(run)
            return asyncio.get_running_loop().time()
        run = toy_run(rollouts=20, batch_size=4, max_lag=max_lag, duration=lambda uid, tries: 2.0, train=2.0)
        return run_virtual(main)

    sync, overlapped = seconds(0), seconds(1)
    assert sync == pytest.approx(20 * (2.0 + 2.0 + 0.1) + 0.1)
    assert overlapped < 0.6 * sync


def test_of_several_steps_seconds_add_up_and_rates_do_not():
    steps = [{"train/loss": 1.0, "train/lr-actor": 0.2, "perf/x_time": 2.0, "perf/x_tok_per_s": 300.0},
             {"train/loss": 4.0, "train/lr-actor": 0.1, "perf/x_time": 3.0, "perf/x_tok_per_s": 200.0}]
    run = toy_run(rollouts=1, batch_size=1, max_lag=0, duration=uneven(0))

    async def main():
        for index, found in enumerate(steps):
            run.trainer = SimpleNamespace(step=lambda _, found=found: asyncio.sleep(0, found))
            await run.step(index)
    run_virtual(main)
    assert {name: run.metrics[name] for name in steps[0]} == {
        "train/loss": 2.5, "train/lr-actor": 0.1, "perf/x_time": 5.0, "perf/x_tok_per_s": 250.0}


def test_the_mean_of_a_metric_is_that_of_the_steps_that_have_it():
    steps = [{"train/loss": 1.0, "even": 1.0}, {"train/loss": 1.0, "odd": 2.0}, {"train/loss": 4.0, "even": 5.0}]
    run = toy_run(rollouts=1, batch_size=1, max_lag=0, duration=uneven(0))

    async def main():
        for index, found in enumerate(steps):
            run.trainer = SimpleNamespace(step=lambda _, found=found: asyncio.sleep(0, found))
            await run.step(index)
    run_virtual(main)
    assert (run.metrics["train/loss"], run.metrics["even"], run.metrics["odd"]) == (2.0, 3.0, 2.0)


def test_shared_hardware_is_never_used_for_two_purposes_at_once():
    class Watched(Turns):
        def __init__(self):
            super().__init__()
            self.held = Counter()

        def attach(self, trainer, engine):
            """Nobody hands over."""

        def figures(self):
            return {}

        def lease(self, purpose):
            outer, inner = self, self(purpose)

            class Lease:
                async def __aenter__(self):
                    await inner.__aenter__()
                    outer.held[purpose] += 1
                    busy = {name for name, count in outer.held.items() if count}
                    assert len(busy) == 1 and (purpose == "rollout" or outer.held[purpose] == 1), busy

                async def __aexit__(self, *exc):
                    outer.held[purpose] -= 1
                    return await inner.__aexit__(*exc)

            return Lease()

    alone = go(rollouts=6, batch_size=4, max_lag=0, duration=uneven(3), dropped=third)
    run = go(rollouts=6, batch_size=4, max_lag=0, credit=2, duration=uneven(3), dropped=third, placement=Watched())
    assert trained(run) == trained(alone)


def test_filters_that_drop_everything_end_the_run_and_count_the_reasons():
    run = toy_run(rollouts=2, batch_size=4, max_lag=0, duration=uneven(0), dropped=lambda uid: True, most_drops=40)
    with pytest.raises(StarvedError, match="chosen 40") as starved:
        run_virtual(lambda: train(run))
    assert starved.value.code == "batch-starved"
    assert len(run.prompts.handed_out) == 43


@pytest.mark.parametrize("max_lag", [0, 1, 3, 5])
def test_drops_are_bounded_for_each_rollout_however_many_are_sampled_ahead(max_lag):
    """A batch costs 44 drops, of which a full buffer holds those of several; only what drops all that comes ends it."""
    def settings(last):
        return {"rollouts": 9, "batch_size": 4, "max_lag": max_lag, "duration": lambda uid, tries: 0.01, "train": 5.0,
                "dropped": lambda uid: uid % 12 != 11 or uid >= last, "most_drops": 50}

    assert len(go(**settings(math.inf)).trainer.batches) == 9
    with pytest.raises(StarvedError, match="kept 0 of the 4"):
        go(**settings(4 * 48))


def test_a_resumed_run_samples_exactly_the_prompts_that_were_not_trained_on():
    run = toy_run(rollouts=9, batch_size=4, max_lag=2, credit=2, duration=uneven(5), dropped=third)
    seen = []
    finish = run.finish

    async def spy(batch):
        await finish(batch)
        state = run.prompts.state_dict()
        done = {uid for uids in trained(run) for uid in uids}
        seen.append((done, state, [slot.prompt.uid for _, slot in run.buffer.slots() if slot.prompt is not None]))

    run.finish = spy
    run_virtual(lambda: train(run))
    for done, state, under_way in seen:
        to_come = {*state["again"], *under_way}
        assert len(to_come) == len(state["again"]) + len(under_way), "would be sampled twice"
        assert not done & to_come, "would be trained on twice"
        lost = set(range(state["next"])) - done - to_come
        assert all(third(uid) for uid in lost), "only drops may be gone"


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_in_a_window_finished_groups_overtake_and_none_is_lost(max_lag, seed):
    """The bound holds, every group that is older than the last one trained on was trained on, and steps come sooner."""
    def schedule(order):
        run = toy_run(rollouts=30, batch_size=4, max_lag=max_lag, duration=uneven(seed), order=order)
        async def main():
            await train(run)
            return asyncio.get_running_loop().time()
        return run, run_virtual(main)

    (ordered, slow), (window, fast) = schedule("started"), schedule("window")
    assert max(lags(window)) <= max_lag and fast <= slow
    uids = [uid for batch in trained(window) for uid in batch]
    assert len(set(uids)) == len(uids) == 120
    behind = 4 * max_lag  # those that were overtaken are still to come
    assert set(range(120 - behind)) <= set(uids)
    if max_lag == 0:
        assert trained(window) == trained(ordered)
    else:
        assert uids != sorted(uids)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_groups_in_flight_are_bounded(most):
    run = toy_run(rollouts=6, batch_size=4, max_lag=2, duration=uneven(2), most_in_flight=most)
    generate, now, seen = run.generate, Counter(), []

    async def counting(slot):
        now["flying"] += 1
        seen.append(now["flying"])
        try:
            return await generate(slot)
        finally:
            now["flying"] -= 1

    run.generate = counting
    run_virtual(lambda: train(run))
    assert max(seen) == most and len(run.trainer.batches) == 6


@pytest.mark.parametrize("again", [frozenset(), frozenset({"stale"})], ids=["drop", "retry"])
def test_a_group_that_is_too_stale_is_not_trained_on(again):
    """Training is slow, so groups wait: those beyond the limit are dropped and counted, or their prompts come again."""
    run = go(rollouts=12, batch_size=4, max_lag=3, duration=lambda uid, tries: 0.01, train=5.0, again=again,
             options={"max_weight_staleness": 1})
    assert len(run.trainer.batches) == 12 and max(lags(run)) == 1
    uids = [uid for batch in trained(run) for uid in batch]
    assert len(set(uids)) == len(uids)
    drops = sum(fields["count"] for kind, _, fields in run.journal.events if kind == "drop")
    retried = sum(metrics.get("rollout/sampled_again/stale", 0) for _, metrics in run.journal.rollouts)
    if again:
        under_way = {slot.prompt.uid for _, slot in run.buffer.slots() if slot.prompt is not None}
        assert drops == 0 and retried > 0
        assert set(range(max(uids) + 1)) <= {*uids, *under_way, *run.prompts.again}, "lost"
    else:
        assert drops >= max(uids) + 1 - len(uids) > 0 and retried == 0


def test_staleness_is_counted_per_trained_token():
    run = go(rollouts=12, batch_size=4, max_lag=2, duration=lambda uid, tries: 0.01, train=5.0)
    now = go(rollouts=3, batch_size=4, max_lag=0, duration=uneven(0))
    names = ("rollout/staleness/mean", "rollout/staleness/max", "rollout/off_policy_tokens")
    assert [run.journal.rollouts[-1][1][name] for name in names] == [2, 2, 1]
    assert [now.journal.rollouts[-1][1][name] for name in names] == [0, 0, 0]


def test_an_evaluation_goes_on_beside_training_and_the_next_sync_waits_for_it():
    run, spans = toy_run(rollouts=4, batch_size=2, max_lag=1, duration=lambda uid, tries: 0.5), []

    async def evaluation():
        begin, version = asyncio.get_running_loop().time(), run.version
        await asyncio.sleep(2.5)
        spans.append((begin, asyncio.get_running_loop().time(), version, run.version, len(run.trainer.batches)))
        return []

    run.evaluation = Evaluating(evaluation, lambda done: True)
    run_virtual(lambda: train(run))
    assert [(first, last) for _, _, first, last, _ in spans] == [(n, n) for n in range(1, 6)], "its weights stay"
    assert [batches for *_, batches in spans] == [0, 2, 3, 4, 4], "a step was done meanwhile, except first and last"
    assert [metrics["perf/train_time"] for _, metrics in run.journal.rollouts] == pytest.approx([1] * 4)


def test_an_evaluation_is_no_time_that_training_waited_for_samples():
    run = toy_run(rollouts=4, batch_size=2, max_lag=0, duration=lambda uid, tries: 0.5, train=1.0)

    async def evaluation():
        await asyncio.sleep(2.5)
        return []

    async def start():
        pass

    run.evaluation, run.engine = Evaluating(evaluation, lambda done: done == 2), SimpleNamespace(start=start)
    run_virtual(lambda: train(run))
    reported = [metrics for _, metrics in run.journal.rollouts]
    assert [metrics["perf/rollout_time"] for metrics in reported] == pytest.approx([0.5, 0.5, 0, 0.5])
    assert [metrics["perf/step_time"] for metrics in reported] == pytest.approx([1.6, 1.6, 1.1, 1.6])
    assert ["perf/tokens_per_gpu_per_sec" in metrics for metrics in reported] == [True, True, False, True], \
        "the engine had the evaluation's answers to draw as well"


@pytest.mark.parametrize(("engine", "perf", "gpus"), [
    ("local", {}, 1), ("sglang", {"rollout_num_gpus": 6}, 6), ("sglang", {"rollout_num_gpus_per_engine": 2}, 2),
    ("sglang", {"colocate": True, "actor_num_gpus_per_node": 4}, 4)])
def test_a_rate_is_that_of_each_gpu_of_the_engines(engine, perf, gpus):
    """Also where nobody said how many they have: they are one engine's, or with --colocate the trainer's."""
    async def start():
        pass

    run = toy_run(rollouts=1, batch_size=2, max_lag=0, duration=lambda uid, tries: 0.5, train=1.0)
    run.config = replace(run.config, rollout=replace(run.config.rollout, engine=engine),
                         perf=replace(run.config.perf, **perf))
    run.engine = SimpleNamespace(start=start)
    run_virtual(lambda: train(run))
    tokens = sum(sample.response_length for sample in run.trainer.batches[0].samples)
    assert run.journal.rollouts[0][1]["perf/tokens_per_gpu_per_sec"] == pytest.approx(tokens / 0.5 / gpus)


def test_a_failing_evaluation_ends_the_run():
    run = toy_run(rollouts=9, batch_size=2, max_lag=1, duration=lambda uid, tries: 0.5)

    async def evaluation():
        raise ZeroDivisionError("no eval")

    run.evaluation = Evaluating(evaluation, lambda done: done == 2)
    with pytest.raises(ZeroDivisionError, match="no eval"):
        run_virtual(lambda: train(run))
    assert len(run.trainer.batches) <= 3


def told(**settings):
    """The error that a run of these settings ends with."""
    seconds = settings.pop("seconds", None)
    run = toy_run(rollouts=9, batch_size=2, max_lag=1, **settings)

    async def evaluation():
        await asyncio.sleep(0.5)
        raise ZeroDivisionError("no eval")

    async def step(index):
        await asyncio.sleep(seconds)
        if len(run.trainer.batches) == 2:
            raise ZeroDivisionError("no step")
        return {}

    if seconds is not None:
        run.evaluation, run.trainer.step = Evaluating(evaluation, lambda done: done == 2), step
    try:
        run_virtual(lambda: train(run))
    except ZeroDivisionError as error:
        return str(error)


@pytest.mark.parametrize(("settings", "error"), [
    ({"seconds": 1.0, "duration": lambda uid, tries: 0.1}, "no eval"),
    ({"seconds": 0.1, "duration": lambda uid, tries: 0.1}, "no step"),
    ({"duration": uneven(1), "crash": lambda uid: uid == 7}, "prompt 7"),
], ids=["evaluation", "step", "sample"])
def test_of_several_errors_the_first_is_told_and_asyncio_logs_none(settings, error, caplog):
    ended = told(**settings)
    gc.collect()
    assert ended == error
    assert not caplog.text


def test_heartbeats_say_that_sampling_lives():
    run = go(rollouts=3, batch_size=4, max_lag=1, duration=lambda uid, tries: 25.0,
             options={"heartbeat_interval": 10.0})
    beats = [fields for kind, _, fields in run.journal.events if kind == "heartbeat"]
    assert len(beats) >= 5
    assert beats[0] == {"version": 1, "idle_s": 10.0, "sampling": 8, "finished": 0, "dropped": 0, "capacity": 8,
                        "oldest_s": pytest.approx(10.0)}
    assert max(beat["oldest_s"] for beat in beats) <= 25


# --------------------------------------------------------------------------------------------------- mutants


class EarlyReturn(Buffer):
    """Gives the room back when the batch is taken, before the sync."""

    async def take(self):
        taken = await super().take()
        super().release()
        return taken

    def release(self):
        pass


def test_the_tests_above_catch_a_buffer_that_takes_in_finish_order(monkeypatch):
    monkeypatch.setitem(toy_run.__kwdefaults__, "buffer", FinishOrder)
    with pytest.raises(AssertionError):
        test_at_max_lag_0_no_timing_changes_what_is_trained_on(8)


def test_the_tests_above_catch_a_buffer_that_returns_room_before_the_sync(monkeypatch):
    monkeypatch.setitem(toy_run.__kwdefaults__, "buffer", EarlyReturn)
    with pytest.raises(AssertionError):
        for lag in (0, 1, 2, 5):
            test_observed_lag_never_exceeds_max_lag(lag, 0, 0)


def test_the_raw_reward_is_the_scorers_whatever_shape_rewards_makes_of_it():
    def doubled(groups):
        for sample in (sample for group in groups for sample in group.samples):
            sample.reward = 2 * sample.reward + 1
        return groups

    run = toy_run(rollouts=2, batch_size=2, max_lag=0, duration=lambda uid, tries: 0.0)
    plain = go(rollouts=2, batch_size=2, max_lag=0, duration=lambda uid, tries: 0.0)
    run.shape = doubled
    run_virtual(lambda: train(run))
    for (_, shaped), (_, raw) in zip(run.journal.rollouts, plain.journal.rollouts, strict=True):
        assert shaped["rollout/raw_reward"] == raw["rollout/raw_reward"] and "rollout/rewards" not in raw
        assert shaped["rollout/rewards"] == 2 * raw["rollout/raw_reward"] + 1


@pytest.mark.parametrize("reward", ["1.0", math.inf, [1.0]])
def test_a_reward_that_shape_rewards_made_no_number_of_is_named(reward):
    def shaped(groups):
        groups[-1].samples[0].reward = reward
        return groups

    run = toy_run(rollouts=2, batch_size=2, max_lag=0, duration=lambda uid, tries: 0.0)
    run.shape = shaped
    with pytest.raises(RewardError) as caught:
        run_virtual(lambda: train(run))
    assert caught.value.code == "score-not-finite" and "shape_rewards" in str(caught.value)
    assert caught.value.got == repr(reward)


def test_who_selects_from_the_buffer_changes_no_column():
    def select(groups, rollout_id):
        groups[-1].samples[0].columns["versions"][:] = rollout_id
        return groups

    run = toy_run(rollouts=1, batch_size=1, max_lag=0, duration=lambda uid, tries: 0.0)
    run.begun = [toy_group(Prompt(uid, uid, "", (1,)), 1) for uid in range(2)]
    run.select = select

    async def prompted():
        run.prompt(slot := Slot(5))
        return slot

    with pytest.raises(ColumnError) as caught:
        run_virtual(prompted)
    assert caught.value.who == "select_from_buffer"
    run.select = lambda groups, rollout_id: groups[::-1]
    slot = run_virtual(prompted)
    assert slot.prompt.uid == 1 and slot.begun[0].columns["versions"].flags.writeable
