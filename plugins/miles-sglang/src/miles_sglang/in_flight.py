"""A request in flight, over as many calls as it takes.

A call that is retracted comes back with what it has drawn; the next one goes on from there, with prompt and tokens so
far as its input. So every token has the one version that its call was answered with, and a response is the exact
concatenation of what the calls drew.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config import RunConfig
from miles_core.errors import CheckpointError, EngineError
from miles_core.reading import parse_json
from miles_core.stages.rollout import Request, Response, check_request
from miles_sglang.client import RETRACTIONS, SPECULATION, Answer, Failed


def drain_seconds(config: RunConfig) -> float:
    """In which ended requests come back and servers pause or go on: a minute. In a weight sync that takes less, whoever
    hangs is found before the sync is late."""
    return min(60.0, 0.45 * config.perf.weight_sync_timeout)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against and its answer read with.

    Args:
        vocab: token ids are below it. SGLang takes others and dies of them.
        stops: end-of-sequence ids.
        layers, topk: shape of a row of routed experts; topk 0 without experts.
        context: most tokens of prompt and response.
        longest: most tokens of an input; servers take a few less than the context.
        seeded: requests carry a seed; only deterministic inference takes one.
    """

    vocab: int
    stops: frozenset[int]
    layers: int
    topk: int
    context: int
    longest: int
    seeded: bool = False

    @staticmethod
    def read(folder: Path, eos: int | None, context: int | None) -> ModelFacts:
        """From config.json and generation_config.json, as SGLang reads them.

        Raises:
            CheckpointError: no readable config.json, or one without these constants.
        """
        try:
            text = _text(folder)
            stops = {eos, *_ids(text.get("eos_token_id"))}
            generation = folder / "generation_config.json"
            if generation.is_file():
                stops |= set(_ids(parse_json(generation.read_text(encoding="utf-8")).get("eos_token_id")))
            context = context or int(text["max_position_embeddings"])
            return ModelFacts(
                vocab=int(text["vocab_size"]), stops=frozenset(stops - {None}), layers=int(text["num_hidden_layers"]),
                topk=int(text.get("num_experts_per_tok") or text.get("top_k_experts") or 0), context=context,
                longest=context - 1,
            )  # fmt: skip
        except Exception as error:
            raise CheckpointError("config.json cannot be read", code="config-json-unreadable",
                                  got=f"{type(error).__name__}: {error}", who=f"{folder}/config.json",
                                  fix="name a Hugging Face checkpoint") from error

    def of_servers(self, infos: Sequence[Mapping[str, Any]]) -> ModelFacts:
        """With what all servers said of themselves."""
        longest = min((int(info["max_req_input_len"]) - 1 for info in infos if info.get("max_req_input_len")),
                      default=self.longest)
        return replace(self, longest=min(longest, self.longest),
                       seeded=bool(infos) and all(info.get("enable_deterministic_inference") for info in infos))


class InFlightRequest:
    """One request until it is answered.

    Args:
        order: earlier requests are admitted before later ones.

    Raises:
        EngineError: a request that no server should see: no room, ids outside of the vocabulary, unknown wants.
    """

    def __init__(self, request: Request, order: int, facts: ModelFacts, decode: Callable[[np.ndarray, bool], str]):
        check_lengths(request, facts.context, facts.longest)
        check_request(request, facts.vocab, facts.topk > 0, "SGLang")
        self.request, self.order, self._facts, self._decode = request, order, facts, decode
        self.rid = ""
        self.aborted = False
        self.failures = 0
        self.reason: str | None = None
        self.admission: asyncio.Future | None = None  # resolved with a endpoint once the request may leave
        self.stop = asyncio.Event()  # it shall not wait for another try
        self.ids = np.zeros(0, np.int32)
        self._log_probs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._experts: list[np.ndarray] = []
        self._again: list[np.ndarray] = []
        self._counts: dict[str, int] = {}
        self._calls, self._read = 0, None  # calls, and the text of the last one where its reader decoded it

    def __lt__(self, other: InFlightRequest) -> bool:
        return self.order < other.order

    def body(self, cache_key: str | None = None) -> dict[str, Any]:
        """The next call: everything drawn so far is part of its input.

        The id is new for each call and never the beginning of another: SGLang aborts all that begin with it.
        """
        sampling, drawn = self.request.sampling, len(self.ids)
        least, stops = max(0, sampling.min_new_tokens - drawn), set(sampling.stop_token_ids)
        if least:  # of the ends that it knows itself SGLang holds back the tokenizer's alone
            stops |= self._facts.stops
        self.rid = f"{uuid.uuid4().hex}-{self.request.id}"
        params = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_new_tokens": self._room,
            "min_new_tokens": least, "stop": list(sampling.stop), "stop_token_ids": sorted(stops),
            "ignore_eos": sampling.ignore_eos, "skip_special_tokens": sampling.skip_special_tokens,
            "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip
        if self._facts.seeded:
            params["sampling_seed"] = self.request.key & (2**62 - 1)
        ids = self.request.unexpanded or self.request.input_ids
        body = {"rid": self.rid, "input_ids": [*ids, *self.ids.tolist()], "sampling_params": params,
                "return_logprob": True}
        if "routed_experts" in self.request.want:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self._rows}
        if self.request.adapter is not None:
            body["lora_path"] = self.request.adapter
        if self.request.images:
            body["image_data"] = [f"data:;base64,{base64.b64encode(one).decode()}" for one in self.request.images]
        if cache_key is not None:
            body["extra_key"] = cache_key  # prefixes are shared among equal keys alone
        return body

    def take(self, answers: list[Answer], versions: list[int]) -> None:
        """Add what one call drew: its pieces, and the version of each.

        Raises:
            Failed: it is no answer to what was asked, or lacks the routed experts; nothing is added.
            EngineError: the server has expanded images to another number of tokens than the trainer has.
        """
        last = answers[-1]
        count = sum(len(answer.ids) for answer in answers)
        length = last.counts.get("prompt_tokens", self._length)
        if last.reason != "abort" and not 0 < count <= self._room:
            raise Failed(f"{count} tokens that ended by {last.reason!r}, where at most {self._room} were asked for")
        if count and length != self._length:
            if not self.request.images:
                raise Failed(f"an answer to {length} tokens of input, and not to all {self._length}")
            raise EngineError("SGLang expands the images of a request to another number of tokens than the trainer has",
                              got=f"{length} tokens of input, not {self._length}",
                              who=f"request {self.request.id}", code="sglang-image-tokens",
                              fix="let servers use the checkpoint's own image processor, and its settings")
        if count and "routed_experts" in self.request.want:
            if last.experts is None:
                if last.reason == "abort":  # in the waiting queue; the tokens are drawn again
                    return
                raise Failed("routed experts were requested but not returned; --router smg keeps them")
            self._experts.append(self._read_experts(last.experts, count))
            again = _computed_again(answers, versions)
            self._again.append(np.concatenate([np.zeros(len(self._experts[-1]) - count, np.int8), again]))
        self._calls, self._read = self._calls + 1, last.text
        self.ids = np.concatenate([self.ids, *(answer.ids for answer in answers)])
        for answer, version in zip(answers, versions, strict=True):
            self._log_probs.append(answer.log_probs)
            self._versions.append(np.full(len(answer.ids), version, np.int32))
        for name, number in last.counts.items():
            self._counts[name] = self._counts.get(name, 0) + number
        self.reason = self._ended(last.reason, count)

    def response(self) -> Response:
        """Everything as one answer."""
        ids, experts, text = self.ids, {}, self._read
        if text is None or self._calls > 1:
            text = self._text()
        if self._experts:
            experts["routed_experts"] = _joined(self._experts, np.int16)
            experts["computed_again"] = _joined(self._again, np.int8)
        response = Response(
            output_ids=ids, log_probs=_joined(self._log_probs, np.float32), versions=_joined(self._versions, np.int32),
            finish_reason=self.reason or "abort", extra=experts, figures=self._figures(),
            text=text,
        )  # fmt: skip
        return self._cut(response, self._end())

    @property
    def _length(self) -> int:
        """Tokens of the next call's input."""
        return len(self.request.input_ids) + len(self.ids)

    @property
    def _room(self) -> int:
        """The most tokens that the next call may draw."""
        whole = min(self.request.sampling.max_new_tokens, self._facts.context - len(self.request.input_ids))
        return whole - len(self.ids)

    @property
    def _rows(self) -> int:
        """Positions whose experts have come."""
        return sum(len(rows) for rows in self._experts)

    def _read_experts(self, flat: np.ndarray, count: int) -> np.ndarray:
        """[rows, layers, topk]; the server computed prompt and tokens but the last, and may add a row at the end."""
        shape = (self._facts.layers, self._facts.topk)
        rows = self._length + count - 1 - self._rows
        if flat.size % (shape[0] * shape[1]) or flat.size < rows * shape[0] * shape[1]:
            raise Failed(f"{flat.size} routed experts do not make {rows} rows of {shape[0]} layers x {shape[1]}")
        return flat.reshape(-1, *shape)[:rows]

    def _ended(self, reason: str | None, new: int) -> str | None:
        """How the request ended, None when it has to go on. An end among the last tokens of a call is a stop, whatever
        else is true of them: SGLang looks for the abort first, then for the length, and hides it behind either."""
        if reason not in ("abort", "length"):
            return reason
        if self._first_stop(len(self.ids) - new) is not None or new and self._stopped():
            return "stop"
        full = len(self.ids) >= self.request.sampling.max_new_tokens or self._length > self._facts.longest
        if full or reason == "length":
            return "length"
        return "abort" if self.aborted else None

    def _first_stop(self, begin: int) -> int | None:
        """Tokens up to the first that ends the answer, of those from `begin` on."""
        sampling = self.request.sampling
        if sampling.ignore_eos:
            return None
        begin = max(begin, sampling.min_new_tokens)
        stops = np.flatnonzero(np.isin(self.ids[begin:], [*self._facts.stops, *sampling.stop_token_ids]))
        return begin + int(stops[0]) + 1 if stops.size else None

    def _text(self, end: int | None = None) -> str:
        return self._decode(self.ids[:end], self.request.sampling.skip_special_tokens)

    def _end(self) -> int:
        """Tokens of the answer, of all that were drawn.

        Each call of several, or of a resumed answer, saw a part of a stop string. And drafts are accepted in blocks:
        where one reaches max_new_tokens or meets an abort, SGLang ends there before it looks for an end within it.
        """
        drafted, ends = any(self._counts.get(name) for name in SPECULATION), [len(self.ids)]
        if drafted and (stop := self._first_stop(0)) is not None:
            ends.append(stop)
        if (drafted or self._calls > 1 or self.request.resumed) and self._stopped():
            # A beginning that has one is that of longer ones.
            ends.append(bisect.bisect_left(range(len(self.ids)), True, key=self._stopped))
        return min(ends)

    def _stopped(self, end: int | None = None) -> bool:
        """Whether the first tokens have a stop string, which may have begun in what they go on from."""
        request, stops = self.request, self.request.sampling.stop
        ids = np.array([*request.resumed, *self.ids[:end]], np.int32) if stops else self.ids[:0]
        text = self._decode(ids, request.sampling.skip_special_tokens)
        return any(stop in text for stop in stops)

    def _cut(self, response: Response, end: int) -> Response:
        """Its first `end` tokens, and why they are the last."""
        if end == len(self.ids):
            return response
        experts = {name: rows[: len(self.request.input_ids) + end - 1] for name, rows in response.extra.items()}
        return Response(
            output_ids=self.ids[:end], log_probs=response.log_probs[:end], versions=response.versions[:end],
            finish_reason="stop", text=self._text(end), extra=experts, figures=response.figures,
        )  # fmt: skip

    def _figures(self) -> dict[str, float]:
        counts, figures = self._counts, {}
        if prompt := counts.get("prompt_tokens"):
            figures["prefix_cache_hit_rate"] = counts.get("cached_tokens", 0) / prompt
        correct, proposed, steps = (counts.get(name, 0) for name in SPECULATION)
        if proposed:
            figures["spec_accept_rate"] = correct / proposed
            figures["spec_accept_length"] = 1 + correct / steps
        if retractions := counts.get(RETRACTIONS):
            figures["engine_retractions"] = float(retractions)
            if self._again:
                figures["experts_computed_again"] = float(np.mean(np.concatenate(self._again) > 0))
        if self.failures:
            figures["engine_retries"] = float(self.failures)
        return figures


def _text(folder: Path) -> Mapping[str, Any]:
    """What config.json says of the text model; where that leaves sizes out, as Gemma 3's does, transformers' own."""
    config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    text = {**config, **config.get("text_config", {})}
    if {"vocab_size", "num_hidden_layers", "max_position_embeddings"} <= text.keys():
        return text
    from transformers import AutoConfig

    return {**AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().to_dict(), **text}


def check_lengths(request: Request, context: int, longest: int) -> None:
    """
    Args:
        context: most tokens of prompt and response.
        longest: most tokens of an input.

    Raises:
        EngineError: a prompt that leaves no room for a token or is empty, or limits that no response can keep.
    """
    who, sampling, length = f"request {request.id}", request.sampling, len(request.input_ids)
    if not 0 < length <= longest:
        raise EngineError(f"{who} leaves no room in a context of {context} tokens; an input has at most {longest}",
                          code="prompt-exceeds-context", got=f"a prompt of {length} tokens",
                          fix="shorten the prompt, or raise the context length")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens or sampling.max_new_tokens < 1:
        raise EngineError(f"{who} has invalid lengths", code="sampling-lengths-invalid",
                          got=f"min_new_tokens {sampling.min_new_tokens}, max_new_tokens {sampling.max_new_tokens}",
                          fix="at least one new token, and not fewer than min_new_tokens")


def _computed_again(answers: Sequence[Answer], versions: Sequence[int]) -> np.ndarray:
    """[N] int8 of the tokens of one call: 1 where the server may have computed what predicts them once more, after it
    had drawn them, and 2 where it did so by newer weights. It tells the experts of the last time.

    A streamed piece says how often the request was retracted until then, so tokens of later pieces are safe; without
    pieces all of them are in doubt.
    """
    retractions = [answer.counts.get(RETRACTIONS, 0) for answer in answers]
    last = retractions.index(retractions[-1]) if retractions[-1] else -1
    kinds = [0 if i > last else 1 + (versions[i] < versions[last]) for i in range(len(answers))]
    return np.repeat(np.array(kinds, np.int8), [len(answer.ids) for answer in answers])


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, dtype)
