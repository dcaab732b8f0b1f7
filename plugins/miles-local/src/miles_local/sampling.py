"""Drawing tokens: keyed uniforms, the inverse of the cumulative distribution, and stop strings.

Draw i of a request depends on (its key, i) and on its logits alone, so neither timing nor batching changes a token.
Everything here is computed row by row, with the same bits whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.errors import EngineError
from miles_core.stages.rollout import Request, SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK, _DEVICE_CHUNK = 1 << 23, 1 << 25
"""Logits that one pass may hold, so that large vocabularies do not multiply the peak memory; and that on a GPU."""


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 whose output bits look independent of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[n] float64 in [0, 1): draw number `counts` of the streams `keys` (both [n] uint64).

    The key is mixed first, so that neighbouring keys do not give shifted copies of one stream. 52 bits are used:
    then u x total rounds to less than total, and the inverse below can never run past the last token.
    """
    bits = _mix(_mix(keys) + (counts + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of n rows is drawn.

    Args:
        temperature: [n] float32; 0 is greedy.
        top_p: [n] float32.
        top_k: [n] int64; below 1 means off.
        uniform: [n] float64, see `uniforms`.
        banned: for some rows (index into n), ids that may not be drawn now.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    uniform: np.ndarray
    banned: Sequence[tuple[int, np.ndarray]] = ()


def draw(logits: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token per row.

    Args:
        logits: [n, V] float32, on any device.

    Returns:
        tokens [n] int64, and their log-probs [n] float32 under log_softmax(logits / temperature), before top-k, top-p
        and the ban cut it; at temperature 1 for greedy rows.

    Raises:
        EngineError: a row's logits are not finite.
    """
    step = max(1, (_DEVICE_CHUNK if logits.is_cuda else _CHUNK) // logits.shape[1])
    if len(logits) <= step:
        return _draw(logits, draws)
    tokens, log_probs = [], []
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        banned = [(row - start, ids) for row, ids in draws.banned if start <= row < start + step]
        part = Draws(draws.temperature[rows], draws.top_p[rows], draws.top_k[rows], draws.uniform[rows], banned)
        got = _draw(logits[rows], part)
        tokens.append(got[0])
        log_probs.append(got[1])
    return np.concatenate(tokens), np.concatenate(log_probs)


def _draw(logits: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    greedy, device = draws.temperature == 0, logits.device
    if not (draws.temperature == 1).all():
        divisor = torch.from_numpy(np.where(greedy, np.float32(1), draws.temperature))
        logits = logits / divisor.to(device)[:, None]
    log_probs = torch.log_softmax(logits, -1)
    allowed = _restrict(log_probs, draws)
    _, cumulative = _summed(allowed.exp())
    target = (torch.from_numpy(draws.uniform).to(device)[:, None] * cumulative[:, -1:]).to(cumulative.dtype)
    # right=True: the first id whose cumulative weight exceeds the target; it has weight itself.
    tokens = torch.searchsorted(cumulative, target, right=True)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device)[:, None], allowed.argmax(-1, keepdim=True), tokens)
    drawn = log_probs.gather(1, tokens.clamp_(max=logits.shape[1] - 1))[:, 0].cpu().numpy()
    if not np.isfinite(drawn).all():
        raise EngineError("the model's logits are not finite", code="logits-not-finite",
                          fix="check whether the last weight update diverged")
    return tokens[:, 0].cpu().numpy(), drawn


def _summed(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [n, V] and their cumulative sums: `probs` themselves, on a GPU as integers.

    A GPU may add floats in another order each time, and refuses to in torch's deterministic mode. Integers have one
    sum. They have 52 bits, as a uniform has: u x total then is less than total here, too.
    """
    if probs.device.type == "cpu":
        return probs, probs.cumsum(-1, dtype=torch.float64)
    return _integers(probs)


def _integers(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = probs.double()
    weights = (wide * (2.0**52 / wide.sum(-1, keepdim=True))).long()
    return weights, weights.cumsum(-1)


def _restrict(log_probs: torch.Tensor, draws: Draws) -> torch.Tensor:
    """`log_probs` with -inf where a row may not draw; the same tensor when nothing is restricted.

    top-k keeps the k likeliest ids, top-p the likeliest ids before which less than p has been accumulated. Both are
    measured on the same, unrestricted distribution (without banned ids), ties in the order of the ids.
    """
    limited = np.flatnonzero((draws.top_p < 1) | ((draws.top_k > 0) & (draws.top_k < log_probs.shape[1])))
    if not len(limited) and not draws.banned:
        return log_probs
    allowed = log_probs.clone()
    for row, ids in draws.banned:
        allowed[row, torch.from_numpy(ids).to(allowed.device)] = -torch.inf
    if not len(limited):
        return allowed
    device = allowed.device
    rows = torch.from_numpy(limited).to(device)
    ordered, order = allowed[rows].sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    weights, cumulative = _summed(probs)
    before = cumulative - weights
    total = weights.sum(-1, keepdim=True, dtype=cumulative.dtype)
    top_k = torch.from_numpy(np.where(draws.top_k > 0, draws.top_k, log_probs.shape[1])[limited]).to(device)[:, None]
    top_p = torch.from_numpy(draws.top_p[limited].astype(np.float64)).to(device)[:, None]
    cut = (torch.arange(ordered.shape[1], device=device) >= top_k) | ((before >= top_p * total) & (top_p < 1))
    cut[:, 0] = False
    allowed[rows] = allowed[rows].scatter(1, order, ordered.masked_fill(cut, -torch.inf))
    return allowed


def check(sampling: SamplingParams, name: str) -> None:
    """Reject invalid parameters.

    Raises:
        EngineError: naming the parameter.
    """
    wrong = {
        "temperature": not (np.isfinite(sampling.temperature) and sampling.temperature >= 0),
        "top_p": not 0 < sampling.top_p <= 1,
        "max_new_tokens": sampling.max_new_tokens < 1,
        "min_new_tokens": sampling.min_new_tokens < 0,
        "stop": "" in sampling.stop,
    }
    for parameter, bad in wrong.items():
        if bad:
            raise EngineError(f"request {name} has an invalid {parameter}", code="sampling-parameter-invalid",
                              got=repr(getattr(sampling, parameter)),
                              fix="temperature >= 0, 0 < top_p <= 1, max_new_tokens >= 1, no empty stop string")


class StopStrings:
    """Watches one response for stop strings, decoding only its newest tokens.

    A token's text may depend on its neighbours and a character may take several tokens. So the text since
    `_start` is decoded twice, with and without the tokens after `_read`, and their difference is what is new; while it
    ends in an incomplete character, nothing is new yet.

    Args:
        tokenizer: with transformers' `decode`.
        stops: the strings.
        skip_special_tokens: as for the response's text.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...], skip_special_tokens: bool):
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special_tokens
        self._keep = max(map(len, stops)) - 1
        self._ids: list[int] = []
        self._start = self._read = 0
        self._tail = ""

    @classmethod
    def of(cls, request: Request, tokenizer) -> StopStrings:
        """Those of a request; one may have begun in the response that it resumes."""
        watch = cls(tokenizer, request.sampling.stop, request.sampling.skip_special_tokens)
        for token in request.resumed:
            watch.hit(token)
        return watch

    def hit(self, token: int) -> bool:
        """Take the next token; True once a stop string has appeared."""
        self._ids.append(token)
        old = self._decode(self._ids[self._start : self._read])
        new = self._decode(self._ids[self._start :])
        fresh = new[len(old) :]
        stopped = any(stop in self._tail + fresh for stop in self._stops)
        if not new.endswith("\N{REPLACEMENT CHARACTER}"):
            self._tail = (self._tail + fresh)[-self._keep :] if self._keep else ""
            self._start, self._read = self._read, len(self._ids)
        return stopped

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
