"""LocalEngine: the asynchronous contract of an engine over one thread that decodes.

The event loop only hands commands to the thread and waits for their futures. Between two decode steps the thread
carries out the commands in the order in which they came, so every one of them sees whole steps and whole weights.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from miles_core.errors import EngineError
from miles_core.hosts import in_daemon_thread
from miles_core.stages.rollout import PauseMode, Request, Response, check_request
from miles_local.batch import Batch, SequenceState
from miles_local.placing import cache_tokens, decoder_for, device_named, give_back, settle, stream_on
from miles_local.sampling import StopStrings, check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles_local.weights import Weights

SMALL_LAYER = 2_000_000
"""Weights of a layer up to which a decode step runs on one thread: waking a second costs more than it saves."""
STOP_SECONDS = 60.0
"""How long `stop` waits for the step under way."""


@dataclass(frozen=True, slots=True)
class Command:
    """What the thread does between two steps, and the future of the caller."""

    run: Callable[[], object]
    done: Future | None = None


class LocalEngine:
    """Decodes a checkpoint on the CPU or a GPU, with continuous batching and its own weights.

    Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE take the fast path (decode.py, device.py), every other architecture its
    transformers module (modules.py).
    On the CPU's fast path a request's tokens and log-probs have the same bits whatever else runs, whenever it joined,
    and whether its caches were recomputed, for a given number of torch threads.

    Args:
        hf_checkpoint: folder with config.json and, unless `random_init`, safetensors files.
        dtype: of weights and activations; logits and log-probs are float32.
        device: cpu, cuda, or auto for a GPU where torch has one.
        max_batch: requests that decode at once; further ones wait in the order in which they came.
        max_context: longest sequence in tokens, prompt included; default what the checkpoint was made for.
        random_init: seeded random weights instead of the checkpoint's, until the first update.
        tokenizer: with transformers' `decode`; without one, texts are "" and stop strings are refused.
        incoming: the bound hook import_weights, which every stream of weights passes first; inputs: prefill_inputs.

    Raises:
        CheckpointError: nothing there, or an architecture that this engine does not decode.
        EngineError: no such device.
    """

    def __init__(self, hf_checkpoint: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
                 max_batch: int = 256, max_context: int | None = None, random_init: bool = False, tokenizer=None,
                 incoming: Callable[[Iterable], Iterable] | None = None, inputs: Callable | None = None):
        self.version = 0
        self._checkpoint, self._random_init = Path(hf_checkpoint), random_init
        self._incoming = incoming or (lambda stream: stream)
        self.device = device_named(device)
        self._decoder, self.path = decoder_for(self._checkpoint, dtype, max_context, self.device, inputs)
        self.shape = self._decoder.shape
        self.max_context = max_context or self.shape.context
        self._tokenizer = tokenizer
        own_eos = getattr(tokenizer, "eos_token_id", None)
        self._eos = self.shape.eos | (set() if own_eos is None else {own_eos})
        self._max_batch = max_batch
        self._weights: Weights | PreTrainedModel | None = None
        self._orders = itertools.count()
        self._in_flight: dict[str, SequenceState] = {}  # everything that a call waits for
        self._arrivals: list[SequenceState] = []  # not yet handed to the thread
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = False
        self._failure: BaseException | None = None

    # The event loop's side.

    async def start(self) -> None:
        """Load the weights and start the thread; a second call does nothing.

        Raises:
            CheckpointError, EngineError: no weights, or unsuitable ones.
        """
        if self._thread is not None:
            return
        if self._weights is None:
            source = self._decoder.random if self._random_init else self._read
            self._weights = await in_daemon_thread(lambda: self._settled(source))
        self._batch = Batch(self._decoder, self._max_batch, self.max_context,
                            bound=lambda: cache_tokens(self.device, self._decoder.token_bytes))
        self._waiting: deque[SequenceState] = deque()
        self._paused: PauseMode | None = None
        self._failure, self._running = None, True
        ready: Future = Future()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="miles-local-engine", daemon=True)
        self._thread.start()
        torch.set_num_threads(ready.result(STOP_SECONDS))  # what one sets is its own, but new threads get it too

    async def generate(self, request: Request) -> Response:
        """Sample one continuation; many calls may be in flight. Cancelling the call ends the request.

        With "routed_experts" in `request.want`, extra["routed_experts"] is [P+N-1, layers, topk] int32: the experts
        of each position when it was first computed, -1 in layers without experts.

        Raises:
            EngineError: no room in the context, an impossible parameter, an id already in flight, or the engine failed.
        """
        self._must_run()
        seq = self._sequence(request)
        self._in_flight[request.id] = seq
        self._arrivals.append(seq)
        # Submitted once every task that is ready now has added its request: a group then shares one prefill.
        asyncio.get_running_loop().call_soon(self._submit)
        try:
            return await asyncio.wrap_future(seq.answer)
        except asyncio.CancelledError:
            self._submit()
            self._post(Command(lambda: self._abort([seq])))
            raise
        finally:
            del self._in_flight[request.id]

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """End these requests (all when None); their calls return what they have drawn, finish_reason "abort"."""
        chosen = None if ids is None else set(ids)
        self._submit()
        await self._ask(lambda: self._abort([f for f in self._everyone() if chosen is None or f.request.id in chosen]))

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Draw no further token until `resume`; returns once the step under way has ended.

        abort ends all requests, retract drops their caches (recomputed after `resume`), in_place keeps them, also
        across a weight update. Requests that come while paused wait.
        """
        if mode not in ("abort", "retract", "in_place"):
            raise EngineError("unknown pause mode", code="pause-mode-unknown", got=mode,
                              fix="use abort, retract or in_place")
        self._submit()
        await self._ask(lambda: self._pause(mode))

    async def resume(self) -> None:
        """Go on after `pause`; does nothing otherwise."""
        await self._ask(lambda: setattr(self, "_paused", None))

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by this complete stream of (name on disk, tensor), or none of them.

        The stream is read in another thread while decoding goes on, into a second set that takes the old one's place
        once it is complete. Requests in flight are treated as by a retraction unless the engine is paused in place.

        Raises:
            EngineError: unknown, missing, misshapen or non-finite tensors, or a version that is not newer.
        """
        self._must_run()
        self._must_be_newer(version)
        staged = await in_daemon_thread(lambda: self._settled(lambda: self._decoder.stage(self._incoming(weights))))
        await self._ask(lambda: self._swap(staged, version))

    async def release(self, tags: Iterable[str]) -> None:
        """Give a GPU's memory back. All goes that has addresses of what is released; a CPU's memory stays.

        Released weights are gone: an update has to follow. No request may be running.
        """
        if self._decoder.token_bytes is not None:
            await self._ask(lambda: self._release(frozenset(tags)))

    async def occupy(self, tags: Iterable[str]) -> None:
        """Memory is taken as it is needed."""

    async def stop(self) -> None:
        """End the thread; requests in flight return as aborted. The engine can be started again.

        Raises:
            EngineError: the thread did not end within STOP_SECONDS.
        """
        thread = self._thread
        if thread is None:
            return
        self._submit()
        self._post(Command(self._halt))
        await in_daemon_thread(lambda: thread.join(STOP_SECONDS))
        if thread.is_alive():
            raise EngineError(f"the local engine's thread did not end within {STOP_SECONDS:g} s",
                              fix="look at what it computes, e.g. with py-spy", code="local-engine-stop-timeout")
        self._thread = None

    def _read(self) -> Weights | PreTrainedModel:
        return self._decoder.stage(self._incoming(self._decoder.tensors(self._checkpoint)))

    def _settled(self, source: Callable[[], Weights | PreTrainedModel]) -> Weights | PreTrainedModel:
        """What `source` makes, once it is complete on the device."""
        made = source()
        settle(self.device)
        return made

    def _sequence(self, request: Request) -> SequenceState:
        """Check a request and make it ready; see `generate` for the errors."""
        sampling, length, who = request.sampling, len(request.input_ids), f"request {request.id}"
        check(sampling, request.id)
        if request.id in self._in_flight:
            raise EngineError(f"{who} is already in flight", code="request-in-flight",
                              fix="give each request an id of its own")
        if not 0 < length < self.max_context:
            raise EngineError(f"{who} leaves no room in a context of {self.max_context} tokens",
                              code="local-prompt-too-long", got=f"a prompt of {length} tokens",
                              fix="shorten the prompt, or raise max_context")
        check_request(request, self.shape.vocab, bool(self.shape.sparse), "the local engine")
        if sampling.stop and self._tokenizer is None:
            raise EngineError(f"{who} has stop strings and the engine no tokenizer",
                              code="stop-strings-without-tokenizer", got=sampling.stop,
                              fix="give the engine a tokenizer, or use stop_token_ids")
        stops = set() if sampling.ignore_eos else {*sampling.stop_token_ids, *self._eos}
        watch = StopStrings.of(request, self._tokenizer) if sampling.stop else None
        seq = SequenceState(
            order=next(self._orders), request=request, watch=watch,
            stops=np.array(sorted(i for i in stops if 0 <= i < self.shape.vocab), np.int64),
            limit=min(sampling.max_new_tokens, self.max_context - length),
        )  # fmt: skip
        seq.answer.set_running_or_notify_cancel()  # from here on only the thread resolves it
        return seq

    def _submit(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self._post(Command(lambda: self._waiting.extend(arrivals)))

    async def _ask(self, run: Callable[[], object]) -> None:
        """Have the thread do something between two steps, and wait until it has."""
        self._must_run()
        done: Future = Future()
        done.set_running_or_notify_cancel()
        self._post(Command(run, done))
        await asyncio.wrap_future(done)

    def _post(self, command: Command) -> None:
        """Queue a command; without a thread to run it, fail every waiting call."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()
            running = self._running
        if not running:
            self._reject()

    def _must_run(self) -> None:
        if not self._running:
            raise self._gone() from self._failure

    def _gone(self) -> EngineError:
        if self._failure is None:
            return EngineError("the local engine is not running", code="local-engine-not-running",
                               fix="await start() first")
        return EngineError("the local engine failed", got=f"{type(self._failure).__name__}: {self._failure}",
                           fix="see the cause below, then stop() and start() it", code="local-engine-failed")

    def _must_be_newer(self, version: int) -> None:
        if version <= self.version:
            raise EngineError(f"weights must be newer than version {self.version}", code="weights-not-newer",
                              got=f"version {version}")

    # The thread's side.

    def _work(self, ready: Future) -> None:
        threads = torch.get_num_threads()  # the process's: a thread's first look takes that over, so it comes first
        if self.shape.layer_weights <= SMALL_LAYER:
            torch.set_num_threads(1)
        ready.set_result(threads)
        try:
            with torch.inference_mode(), stream_on(self.device):
                while self._running:
                    self._obey()
                    if self._running and self._paused is None:
                        self._decode()
        except BaseException as cause:  # noqa: BLE001 (whatever it is, it must reach those who wait)
            self._failure = cause
        finally:
            with self._wake:
                self._running = False
            self._reject()

    def _obey(self) -> None:
        """Carry out what has been asked for; wait while there is nothing to decode."""
        with self._wake:
            while not self._commands and (self._paused is not None or not (self._batch or self._waiting)):
                self._wake.wait()
        while self._commands:
            command = self._commands[0]  # stays in the queue until it is done, so that a failure finds who waits
            try:
                command.run()
            except EngineError as refusal:
                if command.done is None:
                    raise
                command.done.set_exception(refusal)  # the caller's mistake: the engine goes on
            if command.done is not None and not command.done.done():
                command.done.set_result(None)
            self._commands.popleft()

    def _decode(self) -> None:
        """Admit waiting requests as far as there is room, then draw one token for every row."""
        if self._waiting and (count := self._batch.fitting(self._waiting)):
            joining = [self._waiting.popleft() for _ in range(count)]
            self._finish(self._batch.admit(joining, self._weights, self.version))
        if self._batch:
            self._finish(self._batch.step(self._weights, self.version))

    def _finish(self, ended: list[tuple[SequenceState, str]]) -> None:
        if not ended:
            return
        self._batch.remove([seq for seq, _ in ended])
        for seq, reason in ended:
            seq.answer.set_result(self._response(seq, reason))

    def _response(self, seq: SequenceState, reason: str) -> Response:
        text = ""
        if self._tokenizer is not None:
            skip = seq.request.sampling.skip_special_tokens
            text = self._tokenizer.decode(seq.ids.tolist(), skip_special_tokens=skip)
        extra = {}
        if seq.wants_routing:
            rows = len(seq.request.input_ids) + len(seq.ids) - 1
            routing = seq.routing
            if routing is None:  # aborted before anything was computed
                routing = np.full((rows, self.shape.layers, self.shape.topk), -1)
            extra = {"routed_experts": routing[:rows].astype(np.int32)}
        return Response(seq.ids, seq.log_probs, seq.versions, reason, text, extra)

    def _everyone(self) -> list[SequenceState]:
        return [*self._batch.seqs, *self._waiting]

    def _abort(self, seqs: list[SequenceState]) -> None:
        """End those of `seqs` that have not ended yet."""
        running = set(self._batch.seqs)
        waiting = set(seqs) & set(self._waiting)
        self._waiting = deque(seq for seq in self._waiting if seq not in waiting)
        self._finish([(seq, "abort") for seq in seqs if seq in running])
        for seq in waiting:
            seq.answer.set_result(self._response(seq, "abort"))

    def _retract(self) -> None:
        """Running requests wait again, in the order of arrival; its caches are recomputed when it is admitted."""
        running = sorted(self._batch.seqs, key=lambda seq: seq.order)
        self._batch.remove(running)
        self._waiting.extendleft(reversed(running))

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode == "abort":
            self._abort(self._everyone())
        elif mode == "retract":
            self._retract()

    def _swap(self, staged: Weights | PreTrainedModel, version: int) -> None:
        self._must_be_newer(version)  # again: another update may have come in between
        if self._paused != "in_place":
            self._retract()
        self._weights, self.version = self._decoder.adopt(self._weights, staged), version
        settle(self.device)  # before the memory of what was staged is anybody else's

    def _release(self, tags: frozenset[str]) -> None:
        self._decoder.release()
        if "kv_cache" in tags:
            self._retract()
            self._batch.clear()
        if "weights" in tags:
            self._weights = None
        give_back(self.device)

    def _halt(self) -> None:
        self._abort(self._everyone())
        self._release(frozenset({"kv_cache"}))
        self._running = False

    def _reject(self) -> None:
        """The thread has ended: fail every call that still waits."""
        with self._wake:
            commands, self._commands = self._commands, deque()
            left = [command.done for command in commands if command.done is not None]
            for future in [*left, *(seq.answer for seq in list(self._in_flight.values()))]:
                if not future.done():
                    error = self._gone()
                    error.__cause__ = self._failure
                    future.set_exception(error)
