"""A request on its way: what it sends to servers, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import bisect
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core import rng
from miles_core.stages.rollout import Request, Response
from miles_vllm.client import Answer, Failed

if TYPE_CHECKING:
    from miles_vllm.servers import Server


class Call:
    """One request until it is answered, by one call of a server or several.

    Attributes:
        rid: id of the call that is under way.
        server: who has it.
        ended: it shall not go on.
        reason: how the request ended, None before.
    """

    def __init__(self, request: Request, room: int):
        self.request, self._most = request, min(request.sampling.max_new_tokens, room)
        self.rid, self.failures, self.ended = "", 0, False
        self.server: Server | None = None
        self.reason: str | None = None
        self.answers: list[Answer] = []
        self.stop = asyncio.Event()  # it shall not wait for another try

    @property
    def drawn(self) -> int:
        """Tokens so far."""
        return sum(len(answer.ids) for answer in self.answers)

    def body(self, version: int) -> dict[str, Any]:
        """The next call: everything drawn so far is part of its input, and of the seed of what it draws."""
        request, params, drawn = self.request, self.request.sampling, self.drawn
        self.rid = uuid.uuid4().hex
        past = [token for answer in self.answers for token in answer.ids.tolist()]
        sampling = {
            "temperature": params.temperature, "top_p": params.top_p, "top_k": max(0, params.top_k),
            "max_tokens": self._most - drawn, "logprobs": 0,
            "min_tokens": max(0, params.min_new_tokens - drawn), "ignore_eos": params.ignore_eos,
            "stop": list(params.stop), "detokenize": bool(params.stop),
            "stop_token_ids": [] if params.ignore_eos else list(params.stop_token_ids),
            "skip_special_tokens": params.skip_special_tokens, "spaces_between_special_tokens": False,
            "seed": rng.key(request.key, "vllm", drawn) & (2**62 - 1),
        }
        # Cached prefixes are shared among equal salts: none that older weights computed is shared with later requests.
        return {"request_id": self.rid, "token_ids": [*request.input_ids, *past], "sampling_params": sampling,
                "cache_salt": f"version {version}"}

    def take(self, answer: Answer) -> None:
        """Add what one call drew.

        Raises:
            Failed: as many tokens as nobody asked for.
        """
        count, most = len(answer.ids), self._most - self.drawn
        if answer.reason != "abort" and not 0 < count <= most:
            raise Failed(f"{count} tokens that ended by {answer.reason!r}, where at most {most} were asked for")
        self.answers.append(answer)
        if answer.reason != "abort":
            self.reason = answer.reason
        elif self.drawn >= self._most:
            self.reason = "length"
        elif self.ended:
            self.reason = "abort"

    def response(self, decode: Callable[[np.ndarray], str]) -> Response:
        """Everything as one answer. Each call of several, or of a resumed answer, saw a part of a stop string, so
        one is looked for in all."""
        parts = (("ids", np.int32), ("log_probs", np.float32), ("versions", np.int32))
        ids, log_probs, versions = (np.concatenate([np.zeros(0, dtype), *(getattr(one, part) for one in self.answers)])
                                    for part, dtype in parts)
        stops, reason, end = self.request.sampling.stop, self.reason or "abort", len(ids)

        def stopped(first: int) -> bool:
            text = decode(np.array([*self.request.resumed, *ids[:first]], np.int32))
            return any(stop in text for stop in stops)

        if stops and (len(self.answers) > 1 or self.request.resumed) and stopped(end):
            # A beginning that has one is that of longer ones.
            end, reason = bisect.bisect_left(range(end), True, key=stopped), "stop"
        figures = {"engine_retries": float(self.failures)} if self.failures else {}
        return Response(ids[:end], log_probs[:end], versions[:end], reason, decode(ids[:end]), figures=figures)
