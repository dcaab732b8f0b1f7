"""SglangEngine: the contract of an engine over a pool of SGLang servers.

The gate is here and not in the servers: from a pause to the next resume no request leaves, so nothing can reach a
server between the first byte of an update and the version that it is confirmed to have. A retraction ends what runs,
takes what was drawn, and goes on from there afterwards. The servers are idle meanwhile, so their caches can be emptied,
and each token has exactly one version.

Paused in place, servers keep what runs. Answers are then streamed, and a piece has the version that the server had when
the piece before it left: never newer than the weights that drew it, and older by at most one piece at an update.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from miles_core.config.tables import RunConfig
from miles_core.errors import EngineError
from miles_core.stages.placement import Placement, engines, logs
from miles_core.stages.rollout import PauseMode, Request, Response
from miles_sglang.awake import awake
from miles_sglang.background import Background
from miles_sglang.client import Answer, Client, Failed
from miles_sglang.hardware import readers
from miles_sglang.in_flight import InFlightRequest, ModelFacts, drain_seconds
from miles_sglang.launch import Server
from miles_sglang.plugin import sglang_options
from miles_sglang.reader import Call
from miles_sglang.readers import Readers, backend
from miles_sglang.request_scheduler import RequestScheduler
from miles_sglang.server_pool import ServerPool

if TYPE_CHECKING:
    import numpy as np
    import torch

MEMORY_SECONDS = 120.0
"""Seconds that a server may take to give its memory back, or to take it again."""
RETRIES = 8
"""Times that a request is sent again; with the delays between them about half a minute."""
LONGEST_DELAY = 5.0
STOP_SECONDS = 2.0
"""Seconds for requests to come back with what they have drawn, when all ends."""


class SglangEngine:
    """Samples from SGLang servers; see the module's docstring.

    Args:
        tokenizer: with transformers' `decode`.

    `recover`, set by who builds the run, brings weights to servers that were restarted; `event` is told by kind and
    fields what became of servers, router and requests.
    """

    def __init__(self, config: RunConfig, tokenizer, placement: Placement):
        self._config, self._tokenizer, rollout = config, tokenizer, config.rollout
        self._pool = ServerPool(config, placement)
        self._scheduler = RequestScheduler(self._pool.endpoints)
        self._pool.admit = self._scheduler.admit
        self._in_flight: dict[str, InFlightRequest] = {}
        self._orders = itertools.count()
        self._open, self._released = True, set()
        self._mode: PauseMode = "retract"
        self._streams = rollout.pause_generation_mode == "in_place"
        self._caches = uuid.uuid4().hex  # a server that runs already may have caches of another run's version 1
        self._readers = Readers(readers(sglang_options(config)), backend(tokenizer), logs(config) / "readers.log",
                                lambda kind, **fields: self.event(kind, **fields))
        self._drain_seconds = drain_seconds(config)
        self._control = asyncio.Lock()
        self._background = Background(lambda error: self._scheduler.end(list(self._in_flight.values()), error))
        self._started = False
        self._facts = ModelFacts.read(Path(config.checkpoint.hf_checkpoint), getattr(tokenizer, "eos_token_id", None),
                                      rollout.rollout_max_context_len)

    @property
    def version(self) -> int:
        """Of the weights that every server in use was seen to have."""
        return self._pool.version

    @property
    def servers(self) -> list[Server]:
        """All of them, alive or not."""
        return self._pool.servers

    @property
    def recover(self) -> Callable[[], Awaitable]:
        """Called while there is a live server with other weights than the rest."""
        return self._pool.recover

    @recover.setter
    def recover(self, value: Callable[[], Awaitable]) -> None:
        self._pool.recover = value

    @property
    def event(self) -> Callable[..., None]:
        """Called with a kind and fields."""
        return self._pool.event

    @event.setter
    def event(self, value: Callable[..., None]) -> None:
        self._pool.event = value

    @property
    def path(self) -> str:
        """What it runs on, for the log."""
        options = sglang_options(self._config)
        if options.rollout_external:
            return f"servers that run at {', '.join(options.rollout_external_engine_addrs)}"
        count, size = engines(self._config)
        return f"{count} server{'s'[:count != 1]} of {size} GPU{'s'[:size != 1]}, router {options.router or 'none'}"

    # Requests.

    async def generate(self, request: Request) -> Response:
        """Sample one continuation; many calls may be in flight. Cancelling the call ends the request.

        With "routed_experts" in `request.want`, extra["routed_experts"] is [P+N-1, layers, topk], uint8, or int16 where
        one is beyond 255 or -1: the experts of each position when it was last computed by the call that drew the next
        token. extra["computed_again"], [P+N-1] int8, is 1 where that was after the token was drawn, as the server had
        retracted the request, and 2 where it was by newer weights as well.

        Raises:
            EngineError: a request that does not fit, one that failed RETRIES times, or no server is left.
        """
        if request.id in self._in_flight:
            raise EngineError(f"request {request.id} is already in flight", code="request-id-in-flight",
                              fix="give each request an id of its own")
        inflight = InFlightRequest(request, next(self._orders), self._facts, self._decode)
        self._in_flight[request.id] = inflight
        try:
            while inflight.reason is None:
                await self._advance(inflight)
            return inflight.response()
        finally:
            del self._in_flight[request.id]

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """End these requests (all when None); their calls return what they have drawn, finish_reason "abort".

        Raises:
            EngineError: requests do not come back in time.
        """
        chosen = list(self._in_flight.values()) if ids is None else [
            self._in_flight[name] for name in set(ids) if name in self._in_flight]
        self._scheduler.end(chosen)
        if not self._open and self._mode == "in_place":
            await self._pool.abort([inflight.rid for inflight in chosen])  # paused servers return no result
        else:
            await self._bring_back(chosen)

    # Pauses.

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Draw no further token until `resume`; requests that come meanwhile wait.

        abort ends all requests, retract has them go on from their tokens so far, in_place keeps them in the servers.

        Raises:
            EngineError: requests do not come back in time.
        """
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError("unknown pause mode", code="pause-mode-unknown", got=mode,
                              fix="use abort, retract or in_place")
        async with self._control:
            self._open, self._mode = False, mode
            self._pool.serving = False
            if mode == "abort":
                self._scheduler.end(list(self._in_flight.values()))
            await self._halt(mode)

    async def resume(self) -> None:
        """Go on after `pause`; does nothing otherwise. While memory is released, `occupy` is what lets go."""
        async with self._control:
            self._open = True
            await self._let_go()

    async def release(self, tags: Sequence[str]) -> None:
        """Give device memory back; no request may be in flight, and none leaves until all is occupied again.

        Raises:
            EngineError: requests are in flight.
        """
        async with self._control:
            if count := len(self._scheduler.sent):
                raise EngineError("memory cannot be released while requests are in flight", got=f"{count} of them",
                                  fix="pause() first, or wait for them", code="release-with-requests-in-flight")
            self._released |= set(tags)
            self._pool.serving = self._pool.memory = False
            await self._halt("abort")
            await self._pool.each(lambda server: server.client.call(
                "/release_memory_occupation", {"tags": list(tags)}, timeout=MEMORY_SECONDS))

    async def occupy(self, tags: Sequence[str]) -> None:
        """Take released memory again; a server that cannot is restarted."""
        async with self._control:
            await self._pool.each(lambda server: server.client.call(
                "/resume_memory_occupation", {"tags": list(tags)}, timeout=MEMORY_SECONDS))
            self._released -= set(tags)
            self._pool.memory = not self._released
            await self._let_go()

    # Weights.

    def stale(self, version: int) -> list[Server]:
        """Servers that live and do not serve this version."""
        return [server for server in self.servers if server.alive and server.version != version]

    async def confirm(self, servers: Sequence[Server], version: int) -> None:
        """Take these servers into use with these weights, once they say that they have them and have no older cache.

        Raises:
            SyncError: a server has another version, or cannot be asked; it is not used.
        """
        # Paused in place, requests keep a cache that cannot be emptied; new ones share none of it (see `_ask`).
        flush = self._mode != "in_place" and "kv_cache" not in self._released
        await self._pool.confirm(servers, version, flush=flush)
        async with self._control:
            await self._let_go()

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """
        Raises:
            EngineError: always. A weight sync sends them to the servers, between `pause` and `confirm`.
        """
        raise EngineError("weights cannot be sent to SGLang servers through the driver", code="weights-through-driver",
                          got=f"weight_sync {self._config.perf.weight_sync}", who="--weight-sync",
                          fix="use ipc, broadcast, disk or disk-delta")

    # Start and end.

    async def start(self) -> None:
        """Start or reach servers and router; a second call does nothing.

        Raises:
            EngineError: one of them does not come up; nothing is left running then.
        """
        if self._started:
            return
        self._started = True
        self._background.open()
        try:
            await self._readers.open()
            await self._pool.open()
        except BaseException:
            await self.stop()
            raise
        self._facts = self._facts.of_servers([server.info for server in self.servers])
        self._open = self._pool.serving = True
        for server in self.servers:
            self._background.watch(self._pool.watch(server))
        if self._pool.router is not None:
            self._background.watch(self._pool.watch_router())
        self._scheduler.admit()

    async def stop(self) -> None:
        """End all that we started, within seconds; requests in flight return as aborted."""
        self._open = self._pool.serving = False
        await self._background.close()
        requests = list(self._in_flight.values())
        self._scheduler.end(requests)
        if self._scheduler.sent:
            await asyncio.wait([asyncio.ensure_future(self._pool.abort(None))], timeout=STOP_SECONDS)
            await self._scheduler.wait_released(requests, STOP_SECONDS)
        await self._pool.close()
        await self._readers.close()
        self._started = False

    # What a request meets.

    async def _advance(self, inflight: InFlightRequest) -> None:
        """One call for a request: what it draws is added, or it is left for another try."""
        if self._background.failure is not None:
            raise self._background.failure
        endpoint = await self._scheduler.acquire(inflight)
        if endpoint is None:
            inflight.reason = "abort"
            return
        try:
            answers, versions = await self._ask(endpoint.client, inflight)
            inflight.take(answers, versions)
            if inflight.reason is None and self._pool.serving:
                raise Failed(f"{endpoint.client.name}: the request was ended by the server or another client; it says "
                             f"{answers[-1].message!r}")
            return
        except Failed as error:
            failed = error
        except asyncio.CancelledError:
            self._background.spawn(self._pool.abort([inflight.rid]))
            raise
        finally:
            self._scheduler.release(inflight)
        await self._again(inflight, failed)

    async def _again(self, inflight: InFlightRequest, why: Failed) -> None:
        """Wait before another try; nothing of the failed call counts, and all of the calls before it does.

        Raises:
            EngineError: it was the last try.
        """
        if self._background.closed or inflight.aborted:
            inflight.reason = "abort"
            return
        inflight.failures += 1
        if inflight.failures > RETRIES:
            got = str(why) if self._pool.loss is None else f"{why}; {self._pool.loss}"
            raise EngineError(f"request {inflight.request.id} failed {inflight.failures} times",
                              code="request-retries-exhausted", got=got,
                              fix="look at the logs of the engines and the router") from why
        number, attempt, reason = inflight.request.id, inflight.failures, str(why)[:300]
        self.event("request_failed", request=number, attempt=attempt, why=reason, level="detail",
                   text=f"request {number}, attempt {attempt}: {reason}")
        self._pool.doubt()
        # A server may still draw for a call that was cut off.
        self._background.spawn(self._pool.abort([inflight.rid]))
        with suppress(TimeoutError):
            await asyncio.wait_for(inflight.stop.wait(), min(LONGEST_DELAY, 0.1 * 2 ** (inflight.failures - 1)))

    async def _ask(self, client: Client, inflight: InFlightRequest) -> tuple[list[Answer], list[int]]:
        """The answer of one call, its pieces with the version of each."""
        sent = version = self.version
        versions = []
        # Caches are shared among equal keys: a prefix computed by older weights is not shared with later requests.
        key = f"{self._caches}/{sent}" if self._streams else None
        body = inflight.body(key) | ({"stream": True} if self._streams else {})
        answers = await self._readers.pieces(Call(client.url, client.name, orjson.dumps(body), self._streams,
                                                  inflight.request.sampling.skip_special_tokens), client)
        for piece in answers:
            if piece.rid != inflight.rid:
                raise Failed(f"{client.name}: an answer to another request, {piece.rid}")
            versions.append(version)
            version = self._check_version(piece, sent, newest=None if self._streams else sent)
        return answers, versions

    def _check_version(self, answer: Answer, oldest: int, newest: int | None = None) -> int:
        """The version stated in an answer; before the first sync a server may call its weights anything."""
        if self.version == 0:
            return 0
        if answer.version.isdecimal() and oldest <= int(answer.version) <= (newest or int(answer.version)):
            return int(answer.version)
        self._caches = uuid.uuid4().hex  # what it has cached is of those weights
        self._background.spawn(self._pool.recheck())
        raise Failed(f"an answer from weights of version {answer.version!r} where {oldest} was expected")

    def _decode(self, ids: np.ndarray, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) if len(ids) else ""

    # What servers are told.

    async def _halt(self, mode: PauseMode) -> None:
        if mode != "in_place":
            await self._bring_back(list(self._scheduler.sent))
        how = "in_place" if mode == "in_place" else "abort"
        await self._pool.each(lambda server: server.client.pause(how, self._drain_seconds))

    async def _let_go(self) -> None:
        if self._open and not self._released and not self._background.closed:
            await self._pool.each(lambda server: server.client.resume(self._drain_seconds),
                                  filter(self._pool.usable, self.servers))
            await self._pool.route()
            self._pool.serving = True
            self._scheduler.admit()

    async def _bring_back(self, requests: Sequence[InFlightRequest]) -> None:
        """End the calls of these requests at the servers, and wait for what they have drawn."""
        until = awake() + self._drain_seconds
        while awake() < until:
            if not (left := [inflight for inflight in requests if inflight in self._scheduler.sent]):
                return
            everything = len(left) == len(self._scheduler.sent)
            # Again and again: a request may have been on its way to the server.
            await self._pool.abort(None if everything else [inflight.rid for inflight in left])
            if await self._scheduler.wait_released(left, 1.0):
                return
        raise EngineError(f"{len(left)} requests did not come back within {self._drain_seconds:g} s",
                          who=", ".join(sorted({endpoint.client.name for endpoint in self._scheduler.sent.values()})),
                          fix="look at its log", code="requests-not-drained")
