"""Survey: a bad GPU, a bad node, a bad rack and a bad link are told apart, with processes that are really slow."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time

import pytest
import torch.distributed as dist
from miles_ray.probe import Probe
from miles_ray.survey import Place, Survey
from miles_ray.verdicts import blame, low, rounds

from miles_core.hosts import ProcessHost

DELAY, SHARE = 4.0, 0.04
"""Seconds that a slow way takes longer than the milliseconds of another, and what counts as slow: just being busy does
not make a machine 25 times as slow."""


class Node(Probe):
    """A node whose messages to some others are late.

    Args:
        slow: what the names of both ends are asked for: (mine, other) -> late.
    """

    passes = 2
    typical = staticmethod(min)  # of a machine that is busy with other things

    def __init__(self, name, late, timeout):
        super().__init__("127.0.0.1", None, timeout)
        self._name, self._late, self._members = name, late, None

    def together(self, *args):
        self._members = None
        return super().together(*args)

    def _sum(self, data):
        if self._members is None:
            self._members = [None] * dist.get_world_size()
            dist.all_gather_object(self._members, self._name)
        if any(self._late(self._name, other) for other in self._members if other != self._name):
            time.sleep(DELAY)
        super()._sum(data)


def uplink_of_a(mine, other):
    return (mine[0] == "a") != (other[0] == "a")


def nic_of_c(mine, other):
    return mine == "c1"


def one_way(mine, other):
    return {mine, other} == {"b1", "c1"}


def never(mine, other):
    return False


class Stopped(Node):
    """a1 is stopped for a while in each product, c1 for good; d1 has no GPU."""

    def alone(self):
        if self._name == "c1":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._name == "d1":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return super().alone()

    def _multiply(self, left, right):
        if self._name != "a1":
            return super()._multiply(left, right)
        words = f"sleep {DELAY}; while kill -CONT {os.getpid()}; do sleep 1; done"
        with subprocess.Popen(["sh", "-c", words], stderr=subprocess.DEVNULL) as waking:
            os.kill(os.getpid(), signal.SIGSTOP)
            waking.kill()
        return super()._multiply(left, right)


class Dying(Node):
    """c1 ends at every exchange."""

    def _sum(self, data):
        if self._name == "c1":
            os._exit(1)
        super()._sum(data)


class Wrong(Probe):
    """Its second product, or all of them, have one wrong number."""

    def __init__(self, always):
        super().__init__("127.0.0.1", None, 1.0)
        self._always, self._times = always, 0

    def _multiply(self, left, right):
        product = super()._multiply(left, right)
        self._times += 1
        product[3, 5] += 2 * (self._always or self._times == 2)
        return product


def surveyed(kind, places, late=never, timeout=60.0):
    """The findings of one process for each place."""
    survey = Survey(places, lambda place: ProcessHost(place.name, kind, place.node, late, timeout), share=SHARE,
                    timeout=timeout)

    async def main():
        async with asyncio.timeout(200):
            return await survey.run()

    return asyncio.run(main())


RACKED = [Place(f"{node} cpu 0", node, node[0]) for node in ("a1", "a2", "b1", "c1")]


@pytest.mark.full
@pytest.mark.parametrize(("late", "bad", "links"), [
    (uplink_of_a, {"a1": "bad rack a", "a2": "bad rack a"}, 0), (nic_of_c, {"c1": "bad node"}, 0), (one_way, {}, 1),
    (never, {}, 0),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_slow_rack_a_slow_node_and_a_slow_link_are_told_apart(late, bad, links):
    findings = surveyed(Node, RACKED, late)
    said = {node: " ".join(reasons) for node, reasons in findings.verdicts().items() if reasons}
    assert said.keys() == bad.keys() and all(said[node].startswith(bad[node]) for node in bad), said
    assert findings.bad() == [*bad]
    lines = [*findings.table()]
    assert sum(line.startswith("slow between b1 and c1") for line in lines) == links
    assert len(findings.pairs) == 6, "every two have met"
    assert (lines[-1] == f"leave out: --ray.exclude {' '.join(bad)}") == bool(bad)


@pytest.mark.full
def test_a_gpu_that_is_slow_alone_or_stopped_is_bad_and_its_rack_is_not():
    findings = surveyed(Stopped, RACKED, timeout=40.0)
    said = findings.verdicts()
    assert said["a2"] == said["b1"] == []
    assert "bad cpu 0" in said["a1"][0] and "of computing" in said["a1"][0]
    assert said["c1"] == ["bad cpu 0: no answer within 40 s"]
    assert [*findings.pairs] == [("a2", "b1")], "the bad ones take part in nothing more"


@pytest.mark.full
def test_who_dies_in_every_exchange_is_bad_and_who_was_with_it_is_not():
    assert surveyed(Dying, RACKED).bad() == ["c1"]


def test_who_does_not_answer_is_named_and_the_survey_ends():
    findings = surveyed(Stopped, [Place("c1 cpu 0", "c1"), Place("d1 cpu 0", "d1")], timeout=5.0)
    assert findings.verdicts() == {
        "c1": ["bad cpu 0: no answer within 5 s"],
        "d1": ["bad cpu 0: RuntimeError: CUDA error: uncorrectable ECC error encountered"]}


@pytest.mark.parametrize(("always", "fault"), [(True, "wrong products"), (False, "products that change")])
def test_one_wrong_number_of_a_product_is_noticed(always, fault):
    assert Wrong(always).alone().fault == fault


def test_a_good_probe_has_no_fault():
    alone = Probe("127.0.0.1", None, 1.0).alone()
    assert alone.fault == "" and alone.tflops > 0 and alone.memory_gbs > 0


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_every_two_meet_once_and_nobody_meets_two_at_a_time(count):
    units = [str(number) for number in range(count)]
    played = [*rounds(units)]
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in played)
    assert sorted(tuple(sorted(pair)) for pairs in played for pair in pairs) == [*itertools.combinations(units, 2)]


CLUSTER = {f"{rack}{number}": rack for rack in "abcd" for number in range(4)}


def speeds(slow, base=100.0):
    """Of all pairs of CLUSTER; those across racks have half of it, as behind a switch that is shared."""
    return {(one, other): base * (1 if CLUSTER[one] == CLUSTER[other] else 0.5) * (0.3 if slow(one, other) else 1)
            for one, other in itertools.combinations(CLUSTER, 2)}


@pytest.mark.parametrize(("slow", "units", "groups", "pairs"), [
    (lambda one, other: False, [], [], 0),
    (lambda one, other: "b2" in (one, other), ["b2"], [], 0),
    (lambda one, other: {"b2", "c3"} & {one, other}, ["b2", "c3"], [], 0),
    (lambda one, other: (one[0] == "b") != (other[0] == "b"), [], ["b"], 0),
    (lambda one, other: "b" in (one[0], other[0]), [], ["b"], 0),
    (lambda one, other: "b" in (one[0], other[0]) or "c1" in (one, other), ["c1"], ["b"], 0),
    (lambda one, other: {one, other} == {"a0", "d3"}, [], [], 1),
    (lambda one, other: {one[0], other[0]} == {"a", "d"}, [], [], 16),
], ids=range(8))
def test_who_explains_the_slow_pairs(slow, units, groups, pairs):
    made = blame(speeds(slow), CLUSTER, 0.8)
    assert ([*made.units], [*made.groups], len(made.pairs)) == (units, groups, pairs)


def test_of_two_nodes_or_two_racks_none_is_blamed():
    assert blame({("a", "b"): 1.0}, {}, 0.8).units == {}
    pairs = {("a1", "a2"): 9.0, ("b1", "b2"): 9.0, **{(f"a{i}", f"b{j}"): 1.0 for i in (1, 2) for j in (1, 2)}}
    made = blame(pairs, {name: name[0] for pair in pairs for name in pair}, 0.8)
    assert not made.units and not made.groups


def test_a_node_whose_gpus_are_all_slow_with_each_other_is_bad_as_a_whole():
    pairs = {(f"{node}{i}", f"{node}{j}"): 1.0 if node == "x" else 9.0
             for node in "xyz" for i, j in itertools.combinations(range(3), 2)}
    made = blame(pairs, {name: name[0] for pair in pairs for name in pair}, 0.8)
    assert [*made.groups] == ["x"] and not made.units and not made.pairs


def test_low_is_less_than_a_share_of_the_median():
    assert [*low({"a": 100.0, "b": 79.0, "c": 99.0, "d": 81.0}, 0.8)] == ["b"]
    assert low({}, 0.8) == {}
