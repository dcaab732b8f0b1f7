"""Admits requests to endpoints in the order in which they came, as many as there is room for."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from miles_sglang.client import Client
from miles_sglang.in_flight import InFlightRequest


class Endpoint(Protocol):
    """Where requests can be sent: a server, or a router in front of all."""

    client: Client
    load: int


class RequestScheduler:
    """The requests that wait and those that were sent.

    Args:
        endpoints: () -> the endpoints that are open now, each with the most requests it may have in flight.
    """

    def __init__(self, endpoints: Callable[[], Iterable[tuple[Endpoint, int]]]):
        self._endpoints = endpoints
        self._waiting: list[InFlightRequest] = []
        self._sent: dict[InFlightRequest, Endpoint] = {}
        self._freed = asyncio.Event()
        self._due = False

    @property
    def sent(self) -> dict[InFlightRequest, Any]:
        """What has been sent and not been answered."""
        return self._sent

    async def acquire(self, inflight: InFlightRequest) -> Endpoint | None:
        """Wait for a place at an endpoint; None once the request is aborted."""
        if inflight.aborted:
            return None
        inflight.admission = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, inflight)
        if not self._due:  # a rollout's requests come together: the endpoints are looked at once for all of them
            self._due = True
            asyncio.get_running_loop().call_soon(self.admit)
        try:
            return await inflight.admission
        except asyncio.CancelledError:
            admission = inflight.admission
            if admission.done() and not admission.cancelled() and admission.exception() is None:
                self.release(inflight)  # it was admitted at the very moment
            raise

    def admit(self) -> None:
        """Admit every request that has room."""
        self._due, free = False, None
        while self._waiting:
            if self._waiting[0].admission.done():  # aborted or cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            if free is None:
                free = [(endpoint.load, index, endpoint, room) for index, (endpoint, room)
                        in enumerate(self._endpoints()) if endpoint.load < room]
                heapq.heapify(free)
            if not free:
                return
            _, index, endpoint, room = heapq.heappop(free)
            inflight = heapq.heappop(self._waiting)
            endpoint.load += 1
            if endpoint.load < room:
                heapq.heappush(free, (endpoint.load, index, endpoint, room))
            self._sent[inflight] = endpoint
            inflight.admission.set_result(endpoint)

    def release(self, inflight: InFlightRequest) -> None:
        """Its call has ended; give its place to the next one."""
        endpoint = self._sent.pop(inflight, None)
        if endpoint is not None:
            endpoint.load -= 1
            self._freed.set()
            self.admit()

    def end(self, requests: Iterable[InFlightRequest], error: Exception | None = None) -> None:
        """Abort requests that wait, or with an error fail them; those that were sent return by themselves."""
        for inflight in requests:
            inflight.aborted = inflight.aborted or error is None
            inflight.stop.set()
            if inflight.admission is not None and not inflight.admission.done():
                if error is None:
                    inflight.admission.set_result(None)
                else:
                    inflight.admission.set_exception(error)

    async def wait_released(self, requests: Iterable[InFlightRequest], seconds: float) -> bool:
        """Wait until these have been released; False if that takes longer."""
        left = set(requests)
        try:
            async with asyncio.timeout(seconds):
                while left & self._sent.keys():
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return False
        return True
