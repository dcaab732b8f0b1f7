"""VllmEngine: the contract of an engine over vLLM servers.

From a pause to the next resume no request leaves. A retraction ends what runs, takes what was drawn, and goes on from
there afterwards with what is left; paused in place, servers keep what runs. Either way a server says of each token
which weights drew it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from miles_sglang.background import Background
from miles_sglang.in_flight import check_lengths, drain_seconds

from miles_core.config.load import vocabulary_of
from miles_core.errors import EngineError, MilesError, SyncError
from miles_core.hosts import in_daemon_thread
from miles_core.stages.rollout import Request, Response
from miles_vllm.call import Call
from miles_vllm.checks import check, logprobs_mode
from miles_vllm.client import Failed
from miles_vllm.files import checkpoint_of, discard_others, weights_folder, write
from miles_vllm.servers import Server, Servers

if TYPE_CHECKING:
    import torch

    from miles_core.config import RunConfig
    from miles_core.stages.placement import Placement
    from miles_core.stages.rollout import PauseMode
    from miles_vllm.plugin import VllmOptions

AGAIN = 0.5
"""Seconds after which a request that was ended, and may have been on its way, is ended again."""
RETRIES = 8
"""Times that a request is sent again; with the delays between them about half a minute."""
LONGEST_DELAY = 5.0
STOP_SECONDS = 2.0
"""Seconds for requests to come back with what they have drawn, when all ends."""


class VllmEngine:
    """Samples from vLLM servers; see the module's docstring.

    Args:
        tokenizer: with transformers' `decode`.

    `recover`, set by who builds the run, brings weights to servers that were restarted; `event` is told by kind and
    fields what became of servers and requests.
    """

    def __init__(self, config: RunConfig, options: VllmOptions, tokenizer: Any, placement: Placement):
        self._config, self._options, self._tokenizer = config, options, tokenizer
        self._pool = Servers(config, options, placement)
        self._pool.changed = self._wake
        self._vocabulary = cast("int", vocabulary_of(config))
        self._context = cast("int", config.rollout.rollout_max_context_len)  # the plan has set it
        self._mode = logprobs_mode(config)
        self._calls: dict[str, Call] = {}
        self._pauses, self._pulse = 0, asyncio.Event()
        self._drain_seconds = drain_seconds(config)
        self._control = asyncio.Lock()
        self._background = Background(lambda _: self._wake())
        self._started = False

    @property
    def version(self) -> int:
        """Of the weights that every server in use was seen to have."""
        return self._pool.version

    @property
    def servers(self) -> list[Server]:
        """All of them, alive or not."""
        return self._pool.all

    @property
    def recover(self) -> Callable[[], Awaitable[None]]:
        """Called while there is a live server with other weights than the rest."""
        return self._pool.recover

    @recover.setter
    def recover(self, value: Callable[[], Awaitable[None]]) -> None:
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
        size = self._config.perf.rollout_num_gpus_per_engine
        return f"vLLM servers of {size} GPU{'s'[:size != 1]}, {self._mode.replace('_', ' ')}"

    # Start and end.

    async def start(self) -> None:
        """Start the servers; a second call does nothing.

        Raises:
            EngineError: one of them does not come up; nothing is left running then.
        """
        if self._started:
            return
        self._started = True
        self._background.open()
        try:
            await self._pool.open()
        except BaseException:
            await self.stop()
            raise
        self._pool.serving = True
        for server in self.servers:
            self._background.watch(self._pool.watch(server))
        self._wake()

    async def stop(self) -> None:
        """End all that we started, within seconds; requests in flight return as aborted."""
        self._pool.serving = False
        await self._background.close()
        self._end(list(self._calls.values()))
        with suppress(MilesError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._bring_back(list(self._calls.values()))
        await self._pool.close()
        self._pool.all.clear()
        self._started = False

    # Requests.

    async def generate(self, request: Request) -> Response:
        """Sample one continuation; many calls may be in flight. Cancelling the call ends the request.

        Raises:
            EngineError: a request that does not fit, one that failed RETRIES times, or no server is left.
        """
        if request.id in self._calls:
            raise EngineError(f"request {request.id} is already in flight", code="request-id-in-flight",
                              fix="give each request an id of its own")
        check_lengths(request, self._context, self._context - 1)
        check(request, self._mode, self._vocabulary)
        call = self._calls[request.id] = Call(request, self._context - len(request.input_ids))
        skip = request.sampling.skip_special_tokens
        try:
            while call.reason is None:
                await self._advance(call)
            return call.response(lambda ids: self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip))
        finally:
            del self._calls[request.id]

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """End these requests (all when None); their calls return what they have drawn, finish_reason "abort".

        Raises:
            EngineError: requests do not come back in time.
        """
        chosen = [self._calls[name] for name in (list(self._calls) if ids is None else set(ids)) if name in self._calls]
        self._end(chosen)
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
            self._pool.serving = False
            self._pauses += 1
            if mode == "abort":
                self._end(list(self._calls.values()))
            how = "keep" if mode == "in_place" else "abort"
            await self._pool.each(lambda server: server.client.pause(how, self._drain_seconds))
            if mode != "in_place":
                await self._bring_back(list(self._calls.values()))

    async def resume(self) -> None:
        """Go on after `pause`; does nothing otherwise."""
        async with self._control:
            if not self._background.closed:
                await self._pool.each(lambda server: server.client.resume(self._drain_seconds), self._pool.usable())
                self._pool.serving = True
                self._wake()

    async def release(self, tags: Sequence[str]) -> None:
        """
        Raises:
            EngineError: always; the plan refuses --colocate.
        """
        raise EngineError("the engine vllm does not give its memory back", code="vllm-with-colocate", got=list(tags),
                          fix="give the engines GPUs of their own, or use --engine sglang")

    occupy = release

    # Weights.

    def stale(self, version: int) -> list[Server]:
        """Servers that live and do not serve this version."""
        return self._pool.stale(version)

    async def load(self, folder: Path, version: int) -> None:
        """Have every stale server load a version's files, and take them into use.

        Raises:
            SyncError: one lives and could not, or not whole; it is not used, and neither is the version.
        """
        await self._pool.load(folder, version)

    async def confirm(self, servers: Sequence[Server], version: int) -> None:
        """Take these servers into use with these weights, once they say that they have them.

        Raises:
            SyncError: a server has another version, or cannot be asked; it is not used.
        """
        await self._pool.confirm(servers, version)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Through the driver: it writes the files. The weight sync `vllm` has the trainer write them.

        Raises:
            EngineError: missing or misshapen tensors, or a version that is not newer; nothing has changed then.
            SyncError: see `load`.
        """
        if version <= self.version:
            raise EngineError(f"weights must be newer than version {self.version}", code="weights-not-newer",
                              got=version, who="the engine vllm", fix="send a newer version")
        folder, checkpoint = weights_folder(self._config) / f"version-{version}", checkpoint_of(self._config)
        limit = self._config.perf.update_weight_buffer_size
        try:
            await in_daemon_thread(lambda: write(folder, weights, checkpoint, limit))
        except SyncError as error:
            raise EngineError("the stream of weights is refused", got=str(error), who="the engine vllm",
                              fix="send every tensor in its shape", code="vllm-stream-refused") from error
        await self.load(folder, version)
        discard_others(folder)

    # What a request meets.

    async def _advance(self, call: Call) -> None:
        """One call of a server: what it draws is added, or the request is left for another try."""
        server = await self._place(call)
        if server is None:
            call.reason = "abort"
            return
        oldest, pauses = self.version, self._pauses
        server.load += 1
        call.server = server
        try:
            answer = await server.client.generate(call.body(oldest))
            if len(answer.ids) and not oldest <= answer.versions.min() <= answer.versions.max() <= self.version:
                raise Failed(f"{server.name}: weights of versions {answer.versions.min()} to {answer.versions.max()}, "
                             f"where {oldest} was expected")
            call.take(answer)
            if call.reason is None and pauses == self._pauses:
                raise Failed(f"{server.name}: the request was ended by another client")
            return
        except Failed as error:
            failed = error
        except asyncio.CancelledError:
            self._background.spawn(self._forget(server, call.rid))
            raise
        finally:
            server.load -= 1
            call.server = None
            self._wake()
        await self._again(call, failed)

    async def _place(self, call: Call) -> Server | None:
        """A server with room; None once the request is to end."""
        while not (call.ended or self._background.closed):
            if self._background.failure is not None:
                raise self._background.failure
            free = [server for server in self._pool.usable() if server.load < self._options.concurrency]
            if self._pool.serving and free:
                return min(free, key=lambda server: server.load)
            await self._pulse.wait()
        return None

    async def _again(self, call: Call, why: Failed) -> None:
        """Wait before another try; nothing of the failed call counts, and all of the calls before it does.

        Raises:
            EngineError: it was the last try.
        """
        if self._background.closed or call.ended:
            call.reason = "abort"
            return
        call.failures += 1
        if call.failures > RETRIES:
            raise EngineError(f"request {call.request.id} failed {call.failures} times", got=str(why),
                              code="request-retries-exhausted", fix="look at the logs of the engines") from why
        number, attempt, reason = call.request.id, call.failures, str(why)[:300]
        self.event("request_failed", request=number, attempt=attempt, why=reason, level="detail",
                   text=f"request {number}, attempt {attempt}: {reason}")
        self._pool.doubt()
        with suppress(TimeoutError):
            await asyncio.wait_for(call.stop.wait(), min(LONGEST_DELAY, 0.1 * 2 ** (call.failures - 1)))

    def _end(self, calls: Iterable[Call]) -> None:
        for call in calls:
            call.ended = True
            call.stop.set()
        self._wake()

    async def _bring_back(self, calls: Sequence[Call]) -> None:
        """End the calls of these requests at the servers, and wait for what they have drawn.

        Raises:
            EngineError: some do not come back.
        """
        until = asyncio.get_running_loop().time() + self._drain_seconds
        named = [(call, call.rid) for call in calls if call.server is not None]
        while left := [(call, rid, call.server) for call, rid in named if call.server is not None and call.rid == rid]:
            if asyncio.get_running_loop().time() > until:
                raise EngineError(f"{len(left)} requests did not come back within {self._drain_seconds:g} s",
                                  who=", ".join(sorted({server.name for _, _, server in left})), fix="look at its log",
                                  code="requests-not-drained")
            # Again and again: a request may have been on its way to the server.
            for server in {server for _, _, server in left}:
                rids = [rid for _, rid, one in left if one is server]
                await asyncio.gather(server.client.abort(rids), return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    while any(call.server is not None and call.rid == rid for call, rid, _ in left):
                        await self._pulse.wait()

    def _wake(self) -> None:
        """Let all who wait for something look again."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def _forget(self, server: Server, rid: str) -> None:
        with suppress(MilesError):
            await server.client.abort([rid])
