"""Who is admitted where, and what it costs to find out."""

import asyncio
from types import SimpleNamespace

import pytest
from miles_sglang.request_scheduler import RequestScheduler
from miles_testing.clock import run_virtual


class Waiting:
    """What the scheduler uses of a request."""

    def __init__(self, order):
        self.order, self.aborted, self.admission, self.stop = order, False, None, asyncio.Event()

    def __lt__(self, other):
        return self.order < other.order


@pytest.mark.parametrize("servers", [1, 3, 50])
def test_requests_that_come_together_are_spread_with_one_look_at_the_servers(servers):
    async def story():
        endpoints, looks = [SimpleNamespace(load=0, name=name) for name in range(servers)], []
        scheduler = RequestScheduler(lambda: looks.append(1) or [(endpoint, 4) for endpoint in endpoints])
        requests = [Waiting(order) for order in range(4 * servers + 2)]
        calls = [asyncio.ensure_future(scheduler.acquire(request)) for request in reversed(requests)][::-1]
        done, waiting = await asyncio.wait(calls, timeout=0.1)
        assert waiting == set(calls[-2:]), "the first come are served"
        assert {endpoint.load for endpoint in endpoints} == {4} and len(looks) == 1
        scheduler.release(requests[0])
        assert (await asyncio.wait_for(calls[-2], 5)) is calls[0].result() and len(done) == 4 * servers
        scheduler.end(requests[-1:])
        assert await asyncio.wait_for(calls[-1], 5) is None

    run_virtual(story)
