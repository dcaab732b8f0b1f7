"""What a hook costs, and what is recorded of it: seconds and calls of each plugin's hooks, without the core's work."""

from __future__ import annotations

import asyncio
import time
import timeit
from dataclasses import replace

import pytest
from miles_testing.clock import run_virtual

from miles_core.config.tables import RunConfig
from miles_core.plugins import bind, fit, select
from miles_core.resume import Hosted
from miles_core.types import Rank

SOURCE = """
import asyncio, time
from miles_core import hookimpl

class Timed:
    @hookimpl("reward", name="quick")
    def quick(self, sample):
        return 1.0

    @hookimpl("reward", name="slow")
    def slow(self, samples):
        time.sleep(0.002)
        return [1.0]

    @hookimpl
    async def generate(self, prompt):
        await asyncio.sleep(0.02)
        return []

    @hookimpl
    def train_step(self, proceed, access):
        time.sleep(0.01)
        return proceed()

    @hookimpl
    def filter_group(self, group):
        raise ValueError(group)

    @hookimpl
    def export_weights(self, stream):
        yield from stream
"""


@pytest.fixture
def clock(monkeypatch):
    """Time that passes in time.sleep alone."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.fixture
def bound(tmp_path):
    """(role, source of the plugin) -> its hooks."""
    (tmp_path / "timed.py").write_text(SOURCE)
    (one,) = select.select([(str(tmp_path / "timed.py"), "--plugin")], [])
    config = RunConfig(options={"timed": {}})
    return lambda role, source=one.source: bind.bind([replace(one, source=source)], config, role)


def test_calls_and_seconds_are_those_since_they_were_last_asked_for(bound, clock):
    hooks = bound("rollout")
    hooks.reward["slow"](samples=None)
    for _ in range(3):
        hooks.reward["quick"](sample=None)
    took = hooks.timings()
    assert took == {"perf/hook_calls/timed/reward": 4, "perf/hooks/timed/reward": pytest.approx(0.002)}
    assert hooks.timings() == {}


def test_of_many_calls_some_are_timed_and_stand_for_all(bound, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))  # a second passes from one look to the next
    hooks = bound("rollout")
    for _ in range(fit.ALL + 3 * fit.EACH):
        hooks.reward["quick"](sample=None)
    looks = fit.ALL + 3
    assert next(clock) == 2 * looks
    assert hooks.timings()["perf/hooks/timed/reward"] == fit.ALL + 3 * fit.EACH


def test_waits_count_and_so_do_calls_that_fail(bound, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: asyncio.get_running_loop().time())
    hooks = bound("rollout")

    async def main():
        await hooks.generate["timed"](None, None)
        with pytest.raises(ValueError, match="group"):
            hooks.filter_group("group")

    run_virtual(main)
    took = hooks.timings()
    assert took["perf/hooks/timed/generate"] == pytest.approx(0.02) and took["perf/hook_calls/timed/filter_group"] == 1


def test_what_proceed_takes_is_not_the_plugins(bound, clock):
    hooks = bound("trainer")
    for _ in range(fit.ALL + 3):
        assert hooks.train_step(lambda: time.sleep(0.02) or {"loss": 1.0}, None) == {"loss": 1.0}
    took = hooks.timings()
    assert took["perf/hooks/timed/train_step"] == pytest.approx(0.01 * (fit.ALL + 3))
    assert list(hooks.export_weights(item for item in [1])) == [1] and hooks.timings() == {}, "its time comes later"


def test_the_optimizer_steps_of_a_rollout_add_up(bound, clock):
    hooks = bound("trainer")

    class Trainer:
        def step(self, index):
            return hooks.train_step(lambda: {"loss": 1.0}, None)

    hosted = Hosted(Trainer(), hooks, Rank(), steps=3)
    for _ in range(2):
        assert [hosted.step(index) for index in range(3)] == [{"loss": 1.0}, {"loss": 1.0}, {
            "loss": 1.0, "perf/hooks/timed/train_step": pytest.approx(0.03), "perf/hook_calls/timed/train_step": 3}]


def test_the_cores_own_parts_are_not_timed(bound):
    hooks = bound("rollout", "built-in")
    hooks.reward["quick"](sample=None)
    assert not hooks.timings() and bound("trainer", "built-in").train_step(lambda: {"loss": 1.0}, None) == {"loss": 1.0}


def test_a_hook_costs_little_over_a_direct_call_and_less_where_nobody_implements_it(bound):
    """No more than the plainest wrapper there is adds to a call, 90 ns where a call takes 20. It is the CPU's time, the
    least of many; how much faster a call without any wrapper is depends on the processor."""
    hooks = bound("rollout")
    quick = hooks.instances["timed"].quick

    def wrapped(*args, **kwargs):
        return quick(*args, **kwargs)

    ways = {"direct": ("f(None)", {"f": quick}), "wrapped": ("f(None)", {"f": wrapped}),
            "bound": ("f(None)", {"f": hooks.reward["quick"]}),
            "absent": ("if h.shape_rewards is not None: h.shape_rewards(None)", {"h": hooks}), "empty": ("pass", {})}
    timers = {way: timeit.Timer(statement, timer=time.thread_time, globals=names)
              for way, (statement, names) in ways.items()}
    least = dict.fromkeys(timers, float("inf"))
    for _ in range(40):
        for way, timer in timers.items():
            least[way] = min(least[way], timer.timeit(5000))
    cost = {way: took - least["empty"] for way, took in least.items()}
    print({way: round(took / 5000 * 1e9) for way, took in cost.items()})
    assert cost["bound"] <= 1.2 * cost["wrapped"]
    assert cost["absent"] <= 1.5 * cost["direct"]
