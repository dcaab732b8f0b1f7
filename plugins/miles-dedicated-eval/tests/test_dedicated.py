"""On virtual time: training goes on, whose weights are evaluated, and what is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from miles_dedicated_eval.dedicated import DedicatedEvaluation
from miles_testing.clock import run_virtual
from miles_testing.toy import toy_run

from miles_core.errors import EngineError, RewardError
from miles_core.evaluation import Evaluation
from miles_core.loop import train


class Engine:
    """Has the version that it was brought to; remembers its life."""

    def __init__(self):
        self.version, self.life = 0, []

    async def start(self):
        self.life.append("start")

    async def stop(self):
        self.life.append("stop")


class Timed(DedicatedEvaluation):
    """Takes so many seconds; one row of `done` for each: rollout's weights, begin, end, versions at both."""

    def __init__(self, seconds, interval=2, error=None, lost=None, **options):
        super().__init__(Evaluation([], interval), Engine(), **options)
        self.seconds, self.error, self.lost, self.done = seconds, error, lost, []

    def due(self, done, last):
        return done in (0, last) or done % self.interval == 0

    async def __call__(self):
        begin, version = asyncio.get_running_loop().time(), self._engine.version
        await asyncio.sleep(self.seconds)
        if self.error is not None and version == 3:
            raise self.error
        self.done.append((version - 1, begin, asyncio.get_running_loop().time(), self._engine.version - 1))
        return [("a", {"eval/a": float(version)}, [])]


def go(evaluation, saves=None, **settings):
    """A run whose rollouts take a second each and whose weights reach any engine at once; its events by kind."""
    run = toy_run(rollouts=8, batch_size=2, duration=lambda uid, tries: 0.5, train=0.4,
                  **{"max_lag": 0, **settings})
    sent, events = run.weight_sync.sync, []

    async def sync(trainer, engine, version):
        if engine is None:
            return await sent(trainer, engine, version)
        if version != evaluation.lost:
            engine.version = version
        return {}

    async def save(done):
        events.append(("checkpoint", done, asyncio.get_running_loop().time()))

    def event(kind, rollout_id=None, **fields):
        events.append((kind, rollout_id, asyncio.get_running_loop().time()))

    run.weight_sync = SimpleNamespace(sync=sync)
    run.evaluation, run.save, run.journal.event = evaluation, save, event
    run.journal.evaluation = lambda name, rollout_id, metrics, samples: event("eval", rollout_id)
    if saves:
        run._saves, run._state = lambda done: done % saves == 0, lambda: {"a": 1}
    reported = run.journal.rollout

    def rollout(batch, metrics):
        reported(batch, metrics)
        event("metrics", batch.rollout_id)

    run.journal.rollout = rollout

    async def story():
        if isinstance(evaluation, DedicatedEvaluation):
            evaluation.serve()
        await train(run)

    run_virtual(story)
    return run, {kind: [row[1:] for row in events if row[0] == kind] for kind, *_ in events}


@pytest.mark.parametrize("max_lag", [0, 2])
def test_training_takes_as_long_as_without_evaluations(max_lag):
    """Each evaluation takes longer than a rollout, and has the weights of its own rollout to its end."""
    evaluation = Timed(0.9 if max_lag else 1.7)
    _, alone = go(Evaluation([], None), max_lag=max_lag)
    _, events = go(evaluation, max_lag=max_lag)
    assert dict(events["metrics"]) == pytest.approx(dict(alone["metrics"])), "every rollout is done when it would be"
    assert [(first, last) for first, *_, last in evaluation.done] == [(n, n) for n in (0, 2, 4, 6, 8)]
    assert [rollout_id for rollout_id, _ in events["eval"]] == [0, 2, 4, 6, 8], "in order, the last before the end"
    assert evaluation._engine.life == ["start", "stop"]


def test_a_slow_evaluation_has_the_next_wait():
    evaluation = Timed(3.5)
    _, events = go(evaluation)
    spans = [(begin, end) for _, begin, end, _ in evaluation.done]
    assert [first for first, *_ in evaluation.done] == [0, 2, 4, 6, 8] and "eval_skipped" not in events
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), "one at a time"


def test_a_slow_evaluation_has_the_next_skipped_but_not_the_last():
    evaluation = Timed(5.5, skips=True)
    _, alone = go(Evaluation([], None))
    _, events = go(evaluation)
    assert [rollout_id for rollout_id, _ in events["eval"]] == [0, 6, 8]
    assert [rollout_id for rollout_id, _ in events["eval_skipped"]] == [2, 4]
    assert dict(events["metrics"]) == pytest.approx(dict(alone["metrics"]))


@pytest.mark.parametrize("skips", [False, True])
def test_no_checkpoint_skips_an_evaluation_of_earlier_weights(skips):
    """A run that goes on from it evaluates the checkpoint's own weights again, and no others."""
    evaluation = Timed(2.5, skips=skips)
    _, events = go(evaluation, saves=3)
    ends = dict(events["eval"])
    for done, time in events["checkpoint"]:
        assert all(rollout_id in ends and ends[rollout_id] <= time for rollout_id in (0, 2, 4, 6, 8)
                   if rollout_id < done and rollout_id not in dict(events.get("eval_skipped", ()))), done
    assert [done for done, _ in events["checkpoint"]] == [3, 6]


def test_an_engine_that_fails_leaves_an_evaluation_missing_and_the_run_goes_on():
    evaluation = Timed(0.5, error=EngineError("gone", code="x"))
    run, events = go(evaluation)
    assert [rollout_id for rollout_id, _ in events["eval"]] == [0, 4, 6, 8]
    assert [rollout_id for rollout_id, _ in events["eval_missing"]] == [2]
    assert len(run.trainer.batches) == 8


def test_an_engine_whose_servers_are_all_gone_has_no_weights_to_evaluate():
    evaluation = Timed(0.5, lost=3)
    _, events = go(evaluation)
    assert [rollout_id for rollout_id, _ in events["eval"]] == [0, 4, 6, 8]
    assert [rollout_id for rollout_id, _ in events["eval_missing"]] == [2]


def test_a_scorer_that_fails_ends_the_run_by_the_next_rollout():
    evaluation = Timed(0.5, error=RewardError("bad", code="x"))
    with pytest.raises(RewardError, match="bad"):
        go(evaluation)
    assert evaluation._engine.life == ["start", "stop"] and [first for first, *_ in evaluation.done] == [0]


def test_an_engine_that_does_not_start_ends_the_run(caplog):
    evaluation = Timed(0.5)

    async def start():
        raise EngineError("no start", code="x")

    evaluation._engine.start = start
    with pytest.raises(EngineError, match="no start"):
        go(evaluation)
    assert not caplog.records
