"""Survey: every GPU alone, the GPUs of a node in pairs, the nodes in pairs, and what that says of each node."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import WaitError
from miles_core.hosts import Handle
from miles_core.waits import within
from miles_ray import cluster
from miles_ray.cluster import Bundle
from miles_ray.host import Actor, RayHost
from miles_ray.probe import Alone, Probe
from miles_ray.verdicts import Blame, Pair, blame, low, rounds

START_TIMEOUT = 120.0
"""Seconds that a process may take to start and import torch."""
GRACE = 10.0
"""Seconds beyond the timeout in which members of a group give up by themselves."""
COLUMNS = ("node", "rack", "GPUs", "TFLOP/s", "memory", "within", "between", "verdict")
"""Of the table; the least of a node's GPUs, and medians over pairs; memory and pairs in GB/s."""


@dataclass(frozen=True, slots=True)
class Place:
    """One GPU, or a process on a CPU.

    Args:
        name: such as "10.0.0.3 gpu 5".
        node: address of its node.
        rack: "" where none is known.
    """

    name: str
    node: str
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured, and who is to blame.

    Args:
        alone: by place; none for one that gave no answer.
        faults: place -> what is wrong with it.
        ways: among the places of each node; between: among the nodes, with their racks.
        pairs: bandwidth [1e9 bytes/s] of two places of a node, or of two nodes; 0 where it failed.
    """

    places: Sequence[Place]
    alone: Mapping[str, Alone]
    faults: Mapping[str, str]
    ways: Blame
    between: Blame
    pairs: Mapping[Pair, float]

    def verdicts(self) -> dict[str, list[str]]:
        """Node -> what is wrong there; empty for a good one."""
        reasons: dict[str, list[str]] = {}
        for place in self.places:
            mine = reasons.setdefault(place.node, [])
            if place.name in self.faults:
                mine.append(f"bad {_within(place)}: {self.faults[place.name]}")
            if place.name in self.ways.units:
                mine.append(f"bad link of {_within(place)}: {self.ways.units[place.name]}")
        for node, reason in self.ways.groups.items():
            reasons[node].append(f"bad links among its GPUs: {reason}")
        for node, reason in self.between.units.items():
            reasons[node].append(f"bad node: {reason}")
        for node, rack in {place.node: place.rack for place in self.places}.items():
            if rack in self.between.groups:
                reasons[node].append(f"bad rack {rack}: {self.between.groups[rack]}")
        return reasons

    def bad(self) -> list[str]:
        """Nodes to leave out."""
        return [node for node, reasons in self.verdicts().items() if reasons]

    def table(self) -> Iterator[str]:
        """A line for each node and for each slow way that nothing else explains; the flag that leaves bad nodes out."""
        rows = [COLUMNS, *(self._row(node, reasons) for node, reasons in self.verdicts().items())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        yield from ("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows)
        for (one, other), reason in {**self.ways.pairs, **self.between.pairs}.items():
            yield f"slow between {one} and {other}: {self.pairs[one, other]:.3g} GB/s, {reason}"
        if bad := self.bad():
            yield "leave out: --ray.exclude " + " ".join(bad)

    def _row(self, node: str, reasons: Sequence[str]) -> tuple[str, ...]:
        mine = [place for place in self.places if place.node == node]
        names = {place.name for place in mine}
        alone = [self.alone[name] for name in names & self.alone.keys()]
        inside = [speed for pair, speed in self.pairs.items() if {*pair} <= names]
        outside = [speed for pair, speed in self.pairs.items() if node in pair]
        figures = [min(values) if values else None for values in (
            [one.tflops for one in alone], [one.memory_gbs for one in alone])]
        figures += [statistics.median(speeds) if speeds else None for speeds in (inside, outside)]
        return (node, mine[0].rack or "-", str(len(mine)), *("-" if one is None else f"{one:.3g}" for one in figures),
                "; ".join(reasons) or "good")


class Survey:
    """Measures, and names the culprits. Every wait is bounded; who does not answer is ended.

    Args:
        start: makes the process of a place, which hosts a Probe and can be killed.
        share: less than this share of the median is bad.
        timeout: of one measure [s].
    """

    def __init__(self, places: Sequence[Place], start: Callable[[Place], Any], *, share: float = 0.8,
                 timeout: float = 60.0):
        self._places, self._start = places, start
        self._share, self._timeout = share, timeout
        self._probes: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self._groups = 0

    async def run(self) -> Findings:
        """All of it."""
        try:
            alone = await self._each_alone()
            return await self._ways(alone, self._faults(alone))
        finally:
            await asyncio.gather(*(probe.close() for probe in self._probes.values()))

    async def _each_alone(self) -> dict[str, Alone]:
        self._probes = {place.name: self._start(place) for place in self._places}
        await self._answers({**self._probes}, "meet", START_TIMEOUT)
        return await self._answers({**self._probes}, "alone", self._timeout)

    async def _answers(self, probes: Mapping[str, Handle], method: str, timeout: float) -> dict[str, Any]:
        """Of those who answer in time; the others are ended, and why is a fault of theirs."""
        calls = [self._ask(probe, method, timeout) for probe in probes.values()]
        answers = dict(zip(probes, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for name in [name for name, answer in answers.items() if isinstance(answer, Exception)]:
            error = answers.pop(name)
            self._failed[name] = (f"no answer within {timeout:g} s" if isinstance(error, WaitError)
                                  else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            self._probes.pop(name).kill()
        return answers

    async def _ask(self, probe: Handle, method: str, timeout: float, *args: object) -> Any:
        def late() -> WaitError:
            return WaitError(f"no answer to {method}()", code="probe-timeout", got=f"{timeout:g} s",
                             fix="look at the node's GPU, dmesg and network")

        async with within(timeout, late):
            return await probe.call(method, *args)

    def _faults(self, alone: Mapping[str, Alone]) -> dict[str, str]:
        """Place -> why it is left out of what follows."""
        faults = self._failed | {name: one.fault for name, one in alone.items() if one.fault}
        for what, unit in (("tflops", "of computing"), ("memory_gbs", "of memory bandwidth"),
                           ("free_gib", "of free memory")):
            slow = low({name: getattr(one, what) for name, one in alone.items()}, self._share)
            faults |= {name: f"{reason} {unit}" for name, reason in slow.items() if name not in faults}
        return faults

    async def _ways(self, alone: Mapping[str, Alone], faults: Mapping[str, str]) -> Findings:
        good = [place for place in self._places if place.name not in faults]
        nodes: dict[str, list[str]] = {}
        for place in good:
            nodes.setdefault(place.node, []).append(place.name)
        within_nodes: dict[Pair, float] = {}
        for pairs in _side_by_side([rounds(names) for names in nodes.values()]):
            within_nodes |= await self._round({pair: pair for pair in pairs})
        ways = blame(within_nodes, {place.name: place.node for place in good}, self._share)
        fit = {node: left for node, names in nodes.items()
               if node not in ways.groups and (left := [name for name in names if name not in ways.units])}
        between: dict[Pair, float] = {}
        for pairs in rounds([*fit]):
            between |= await self._round({(one, other): (*fit[one], *fit[other]) for one, other in pairs})
        racks = {place.node: place.rack for place in good if place.node in fit}
        return Findings(self._places, alone, faults, ways, blame(between, racks, self._share), within_nodes | between)

    async def _round(self, groups: Mapping[Pair, Sequence[str]]) -> dict[Pair, float]:
        return dict(zip(groups, await asyncio.gather(*(self._measure(names) for names in groups.values()))))

    async def _measure(self, names: Sequence[str]) -> float:
        """Bandwidth of one group; 0 if it failed, and its processes are started afresh: a group cannot be left."""
        speeds = await self._together(names)
        if all(isinstance(speed, float) for speed in speeds):
            return min(speeds)
        for one in names:  # who is to blame shows later
            self._probes[one].kill()
            self._probes[one] = self._start(next(place for place in self._places if place.name == one))
        await asyncio.gather(*(self._ask(self._probes[one], "meet", START_TIMEOUT) for one in names),
                             return_exceptions=True)
        return 0.0

    async def _together(self, names: Sequence[str]) -> list[Any]:
        """What each member of a group measured, or its error."""
        self._groups += 1
        name, bound = f"group-{self._groups}", self._timeout + GRACE
        at, = await asyncio.gather(self._ask(self._probes[names[0]], "meet", bound), return_exceptions=True)
        if isinstance(at, BaseException):
            return [at]
        calls = (self._ask(self._probes[one], "together", bound, at, name, index, len(names))
                 for index, one in enumerate(names))
        return await asyncio.gather(*calls, return_exceptions=True)


def _side_by_side(tournaments: Sequence[Iterator[list[Pair]]]) -> Iterator[list[Pair]]:
    """The rounds of several tournaments at once."""
    while pairs := [pair for one in tournaments for pair in next(one, [])]:
        yield pairs


def _within(place: Place) -> str:
    return place.name.removeprefix(place.node).strip()


async def measured(group: Any, bundles: Sequence[Bundle], *, share: float = 0.8, timeout: float = 60.0) -> Findings:
    """The survey of a placement group's bundles, in Ray actors."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = ray.remote(num_cpus=0.5, num_gpus=0 if bundles[0].gpu is None else 0.5, max_restarts=0,
                      runtime_env={"env_vars": cluster.VISIBLE})(Actor)
    at = {f"{one.host} {'cpu' if one.gpu is None else 'gpu'} {one.local}": one for one in bundles}

    def start(place: Place) -> RayHost:
        one = at[place.name]
        actor = kind.options(scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=one.index)).remote()
        return RayHost(place.name, actor, Probe, (one.host, None if one.gpu is None else one.local, timeout))

    places = [Place(name, one.host, one.rack) for name, one in at.items()]
    return await Survey(places, start, share=share, timeout=timeout).run()
