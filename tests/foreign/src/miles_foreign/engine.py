"""The engine: transformers' `generate`, in a thread, for all requests that have come together.

A batch is drawn in one call of `generate`. Its logits processor draws the tokens, so that each draw depends on the
request's key and the token's place, and notes their log-probs; its stopping criterion says who has come to an end.
What is interrupted goes on in a later batch from the tokens that it has, with draws of its own places: nothing is lost
and no token is drawn twice. A row's last bits depend on the rows beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from miles_core import rng
from miles_core.errors import EngineError
from miles_core.stages.rollout import PauseMode, Request, Response, check_request

logging.disable_progress_bar()  # the run has a terminal of its own to fill

MOST = 512
"""Requests of one batch."""


@dataclass(eq=False)
class InFlight:
    """A request and what has been drawn for it.

    Args:
        reason: why it has come to its end; None while it has not.
    """

    request: Request
    ended: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.request.input_ids, *self.tokens]


class HfEngine:
    """See miles_core.stages.rollout.Engine.

    Args:
        tokenizer: of the checkpoint.
        longest: tokens of prompt and response together; None for what the model takes.
    """

    def __init__(self, folder: str, tokenizer: Any, longest: int | None):
        self.version, self.path = 0, f"generate of transformers {transformers.__version__}"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._longest = longest or self._model.config.max_position_embeddings
        self._waiting: list[InFlight] = []
        self._under_way: dict[str, InFlight] = {}
        self._serving, self._some, self._free = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._halt = False
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving.set()
        self._loop = asyncio.create_task(self._serve())

    async def generate(self, request: Request) -> Response:
        check_request(request, self._model.config.vocab_size, experts=False, engine="the engine foreign")
        if len(request.input_ids) >= self._longest:
            raise EngineError(f"request {request.id} leaves no room for an answer", got=len(request.input_ids),
                              fix=f"keep prompts below {self._longest} tokens")
        flight = InFlight(request, asyncio.get_running_loop().create_future())
        self._under_way[request.id] = flight
        self._waiting.append(flight)
        self._some.set()
        try:
            await flight.ended
        finally:
            flight.reason = flight.reason or "abort"  # the caller gave up
            del self._under_way[request.id]
        return Response(np.array(flight.tokens, np.int32), np.array(flight.log_probs, np.float32),
                        np.array(flight.versions, np.int32), flight.reason, self._text(flight))

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        for name in list(self._under_way) if ids is None else ids:
            if name in self._under_way:
                self._under_way[name].reason = self._under_way[name].reason or "abort"
        if not self._serving.is_set():
            self._land()  # nobody else would

    async def pause(self, mode: PauseMode = "retract") -> None:
        self._serving.clear()
        self._halt = True
        if mode == "abort":
            await self.abort()
        async with self._free:  # the batch under way ends after the token that it is at
            self._land()

    async def resume(self) -> None:
        self._halt = False
        self._serving.set()

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        given, own = dict(weights), dict(self._model.named_parameters())
        odd = sorted(own.keys() ^ given.keys()) or [name for name in own if own[name].shape != given[name].shape]
        if odd or version <= self.version:
            raise EngineError("these are not newer weights of this model", got=f"version {version}, {odd[:3]}",
                              who=f"engine foreign at version {self.version}", fix="send every parameter once")
        async with self._free:
            for name, tensor in given.items():
                own[name].copy_(tensor)
            self.version = version

    async def release(self, tags: Sequence[str]) -> None:
        """Holds no memory of a device."""

    async def occupy(self, tags: Sequence[str]) -> None:
        """Takes none."""

    async def stop(self) -> None:
        await self.pause("abort")
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            await self._some.wait()
            await self._serving.wait()
            await self._gathered()
            async with self._free:
                flights = [flight for flight in self._waiting if flight.reason is None][:MOST]
                if flights and not self._halt:
                    try:
                        await asyncio.to_thread(self._draw, flights)
                    except Exception as error:  # noqa: BLE001 - it is the error of each of these requests
                        for flight in flights:
                            flight.reason = "abort"
                            if not flight.ended.done():
                                flight.ended.set_exception(error)
                self._land()

    async def _gathered(self) -> None:
        """Wait until nobody else comes in the same turn of the event loop: batches are the same in every run."""
        count = -1
        while count != len(self._waiting):
            count = len(self._waiting)
            for _ in range(8):
                await asyncio.sleep(0)

    def _land(self) -> None:
        """Tell those that have come to their end."""
        for flight in self._waiting:
            if flight.reason is not None and not flight.ended.done():
                flight.ended.set_result(None)
        self._waiting = [flight for flight in self._waiting if flight.reason is None]
        if not self._waiting:
            self._some.clear()

    def _draw(self, flights: Sequence[InFlight]) -> None:
        """One call of `generate`, until all have come to their end or the engine halts."""
        longest = max(len(flight.context) for flight in flights)
        ids = torch.zeros(len(flights), longest, dtype=torch.int64)
        attended = torch.zeros_like(ids)
        for row, flight in enumerate(flights):
            ids[row, longest - len(flight.context):] = torch.tensor(flight.context)
            attended[row, longest - len(flight.context):] = 1
        most = max(self._room(flight) for flight in flights)
        draw = LogitsProcessorList([lambda _, logits: self._drawn(flights, logits)])
        end = StoppingCriteriaList([lambda *_, **__: torch.tensor(
            [self._halt or flight.reason is not None for flight in flights])])
        self._model.generate(
            ids, attention_mask=attended, logits_processor=draw, stopping_criteria=end,
            generation_config=GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0))

    def _drawn(self, flights: Sequence[InFlight], logits: torch.Tensor) -> torch.Tensor:
        """A token for each row, noted in its flight; logits that leave `generate` no other choice."""
        chosen = torch.zeros(len(flights), dtype=torch.int64)
        for row, flight in enumerate(flights):
            if flight.reason is None:
                chosen[row], log_prob = self._token(flight, logits[row].float())
                flight.tokens.append(int(chosen[row]))
                flight.log_probs.append(min(log_prob, 0.0))
                flight.versions.append(self.version)
                flight.reason = self._finished(flight)
        return torch.full_like(logits, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def _token(self, flight: InFlight, logits: torch.Tensor) -> tuple[int, float]:
        """Draw one of [vocabulary] logits by Gumbel noise: (token, its log-prob before anything is cut off)."""
        sampling, place = flight.request.sampling, len(flight.tokens)
        log_probs = torch.log_softmax(logits / (sampling.temperature or 1.0), 0)
        scores = log_probs.clone()
        if place < sampling.min_new_tokens:
            scores[list(self._stops(flight.request))] = -torch.inf
        if 0 < sampling.top_k < len(scores):
            scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
        if sampling.top_p < 1:
            order = scores.argsort(descending=True)
            before = scores[order].exp().cumsum(0) - scores[order].exp()
            scores[order[before >= sampling.top_p]] = -torch.inf
        if sampling.temperature:
            draw = np.random.default_rng(rng.key(flight.request.key, "draw", place))
            scores = scores.double() + torch.from_numpy(draw.gumbel(size=len(scores)))
        token = int(scores.argmax())
        return token, float(log_probs[token])

    def _finished(self, flight: InFlight) -> str | None:
        sampling = flight.request.sampling
        if flight.tokens[-1] in self._stops(flight.request):
            return "stop"
        if sampling.stop and any(word in self._text(flight) for word in sampling.stop):
            return "stop"
        return "length" if self._room(flight) < 1 else None

    def _stops(self, request: Request) -> set[int]:
        ids = {self._tokenizer.eos_token_id, *request.sampling.stop_token_ids} - {None}
        return set() if request.sampling.ignore_eos else ids

    def _room(self, flight: InFlight) -> int:
        """Tokens that it may still draw."""
        return min(flight.request.sampling.max_new_tokens - len(flight.tokens), self._longest - len(flight.context))

    def _text(self, flight: InFlight) -> str:
        skip = flight.request.sampling.skip_special_tokens
        return self._tokenizer.decode(flight.tokens, skip_special_tokens=skip) if flight.tokens else ""
