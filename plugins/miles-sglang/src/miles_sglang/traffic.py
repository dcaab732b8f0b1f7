"""Traffic: which request may leave, and where to; in the order in which requests came, as many as there is room for."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from miles_sglang.client import Client
from miles_sglang.flight import Flight


class Lane(Protocol):
    """Where requests can be sent: a server, or a router in front of all."""

    client: Client
    load: int


class Traffic:
    """The requests that wait and those in the air.

    Args:
        lanes: () -> the lanes that are open now, each with the most requests it may have in the air.
    """

    def __init__(self, lanes: Callable[[], Iterable[tuple[Lane, int]]]):
        self._lanes = lanes
        self._waiting: list[Flight] = []
        self._air: dict[Flight, Lane] = {}
        self._landed = asyncio.Event()

    @property
    def air(self) -> dict[Flight, Any]:
        """What has been sent and not been answered."""
        return self._air

    async def place(self, flight: Flight) -> Lane | None:
        """Wait for a place in a lane; None once the flight is aborted."""
        if flight.aborted:
            return None
        flight.go = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, flight)
        self.admit()
        try:
            return await flight.go
        except asyncio.CancelledError:
            if flight.go.done() and not flight.go.cancelled() and flight.go.exception() is None:
                self.land(flight)  # it was admitted at the very moment
            raise

    def admit(self) -> None:
        """Let leave whatever can."""
        while self._waiting:
            if self._waiting[0].go.done():  # aborted or cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            free = [(lane.load, index, lane) for index, (lane, room) in enumerate(self._lanes()) if lane.load < room]
            if not free:
                return
            lane = min(free)[2]
            flight = heapq.heappop(self._waiting)
            lane.load += 1
            self._air[flight] = lane
            flight.go.set_result(lane)

    def land(self, flight: Flight) -> None:
        """Its call is over; its place is another's."""
        lane = self._air.pop(flight, None)
        if lane is not None:
            lane.load -= 1
            self._landed.set()
            self.admit()

    def end(self, flights: Iterable[Flight], error: Exception | None = None) -> None:
        """Abort flights that wait, or with an error fail them; those in the air come back by themselves."""
        for flight in flights:
            flight.aborted = flight.aborted or error is None
            flight.stop.set()
            if flight.go is not None and not flight.go.done():
                if error is None:
                    flight.go.set_result(None)
                else:
                    flight.go.set_exception(error)

    async def landing(self, flights: Iterable[Flight], seconds: float) -> bool:
        """Wait until these are out of the air; False if that takes longer."""
        left = set(flights)
        try:
            async with asyncio.timeout(seconds):
                while left & self._air.keys():
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            return False
        return True
