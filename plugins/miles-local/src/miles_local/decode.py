"""The forward pass of Llama and its kin (weights.FAMILIES) over a key-value cache, with the same bits in any batch.

What a layer has, such as biases, norms of queries and keys, a window or experts, ModelShape says.

A row's result must not depend on the rows beside it, on the width of the cache, or on whether a position was computed
by a prefill or by a decode step. Matrix libraries pick another order of summation for another shape, so:

  * the number of rows is always a multiple of ROWS; where that is not enough (`linear`), every product has the one
    shape [TILE, in] x [in, out];
  * a router's scores are padded to whole cache lines: rows of few outputs would begin at other offsets of the
    libraries' vectors, and so be summed in an order that depends on their place;
  * attention is two batched products in float32, with query rows padded to QUERY_ROWS and keys summed in chunks of
    KEY_CHUNK. Keys beyond a row's length or before its window get weight zero, and adding zeros changes nothing;
  * an expert's outputs are added in the order of the experts' numbers.

plugins/miles-local/tests/ holds this to exact equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from miles_local.cache import CPU, Cache, Prefill, round_up
from miles_local.products import ROWS, linear, weighted
from miles_local.weights import Layer, ModelShape, Weights, read_tensors

QUERY_ROWS, QUERY_DEPTH = 8, 128
"""Row counts of attention's products are multiples of QUERY_ROWS where heads are at most QUERY_DEPTH wide: those
products are shallow, and a decode step has few query rows per key head (seen up to 5 rows)."""
QUERY_CHUNK = 256
"""Positions of a prefill that attend at once, which bounds the memory for attention scores."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def unseen(positions: torch.Tensor, width: int, window: int | None) -> torch.Tensor:
    """[Q, width] to add to the scores of queries at `positions` [Q]: -inf at keys after one or before its window."""
    behind = positions[:, None] - torch.arange(width, device=positions.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, -torch.inf)


class Attention:
    """softmax(q k^T x scale + mask) v in float32, for one shape; its buffers serve one layer after another.

    Args:
        count, queries, width: N, M and T below; T a multiple of ROWS.
        lead: leading size of the view [lead, N x M / lead, T] of the scores that masks are added to.
        head_dim: of queries, keys and values.
    """

    def __init__(self, count: int, queries: int, width: int, lead: int, head_dim: int):
        self._lead, self._scale = lead, head_dim**-0.5
        padded = round_up(queries, QUERY_ROWS if head_dim <= QUERY_DEPTH else ROWS)
        # Rows beyond M hold zeros, then leftovers: no product mixes rows.
        self._q = torch.zeros(count, padded, head_dim)
        self._weights = torch.zeros(count, padded, width)
        self._queries = queries

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q [N, M, head_dim], k and v [N, T, head_dim] -> [N, M, head_dim]."""
        live, width = slice(0, self._queries), k.shape[1]
        self._q[:, live] = q
        torch.bmm(self._q, k.transpose(1, 2), out=self._weights)
        scores = (self._weights[:, live] * self._scale).view(self._lead, -1, width).add_(mask)
        self._weights[:, live] = torch.softmax(scores, -1).view(-1, self._queries, width)
        return weighted(self._weights, v)[:, live]


class BaseDecoder:
    """What the engine asks of every decoder beside weights, prefills and steps.

    Args:
        token_bytes: of the cache for one position of one row, where its size is bounded.
    """

    token_bytes: int | None = None

    def adopt(self, old: Any, new: Any) -> Any:
        """The weights to decode with from now on: the new ones, or the old ones filled with them."""
        return new

    def bucket(self, count: int, cache: Cache) -> int:
        """How many rows of the cache a step of `count` computes."""
        return round_up(count)

    def release(self) -> None:
        """Let go of what belongs to the present weights and cache."""


class Decoder(BaseDecoder):
    """The forward pass for one shape; the weights are an argument, so that replacing them is one assignment.

    Args:
        shape: the model's constants.
        max_context: longest sequence, in tokens.
        dtype: of weights and activations; attention, its cache and softmax are always float32.
        device: where all of it is computed.
    """

    _linear = staticmethod(linear)

    def __init__(self, shape: ModelShape, max_context: int, dtype: torch.dtype, device: torch.device = CPU):
        self.shape, self._dtype, self.device = shape, dtype, device
        angles = torch.outer(torch.arange(max_context).float(), torch.tensor(shape.inverse_frequencies))
        sin, cos = angles.sin() * shape.rope_scale, angles.cos() * shape.rope_scale
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)[:, None]
        # (-b, a) x (sin, sin) is (b, a) x (-sin, sin): the sign is taken once, here.
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)[:, None]

    def stage(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """See Weights.from_stream."""
        return Weights.from_stream(self.shape, self._dtype, stream, self.device)

    def tensors(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's, for `stage`; see read_tensors. Some hold what follows from their config.json as well."""
        known = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(self.shape.layers)}
        return read_tensors(folder, known | ({"lm_head.weight"} if self.shape.tied else set()))

    def random(self) -> Weights:
        """See Weights.random."""
        return Weights.random(self.shape, self._dtype, device=self.device)

    def prefill(self, weights: Weights, sequences: list[tuple[int, ...]], trace: bool = False) -> Prefill:
        """Compute whole sequences, U of them, from nothing. With `trace`, the routed experts too."""
        s = self.shape
        count, width = len(sequences), round_up(max(map(len, sequences)))
        padded = torch.zeros(count, width, dtype=torch.int64)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(width).clamp_(max=len(self._cos) - 1).repeat(count)
        result = Prefill(logits=torch.empty(0))

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.float().view(count, width, s.kv_heads, -1).transpose(1, 2).contiguous() for x in (k, v))
            result.k.append(k)
            result.v.append(v)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            q = q.float().view(count, width, s.heads, -1).transpose(1, 2)
            parts = []
            for start in range(0, width, QUERY_CHUNK):
                end = min(width, start + QUERY_CHUNK)
                queries = q[:, :, start:end].reshape(count * s.kv_heads, -1, s.head_dim)
                mask = unseen(torch.arange(start, end), end, s.windows[index])
                attention = Attention(*queries.shape[:2], end, count * s.heads, s.head_dim)
                part = attention(queries, k[:, :end], v[:, :end], mask)
                parts.append(part.reshape(count, s.heads, end - start, -1).transpose(1, 2))
            return torch.cat(parts, 1).reshape(count * width, -1)

        routes: list[torch.Tensor] | None = [] if trace else None
        hidden = self._forward(weights, padded.view(-1), positions, attend, routes)
        last = torch.zeros(round_up(count), dtype=torch.int64)
        last[:count] = torch.arange(count) * width + torch.tensor([len(ids) - 1 for ids in sequences])
        result.logits = self._logits(weights, hidden[last])[:count]
        if routes is not None:
            result.routing = torch.stack(routes, 1).view(count, width, s.layers, s.topk)
        return result

    def step(self, weights: Weights, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor,
             trace: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed one token per cache row 0..R-1 and write its keys and values.

        Args:
            tokens, positions: [R] int64, R a multiple of ROWS; rows that stand for nothing have token and position 0.

        Returns:
            logits [R, V] float32, and routed experts [R, layers, topk] int16 with `trace`.
        """
        s, rows = self.shape, len(tokens)
        width = round_up(int(positions.max()) + 1)
        heads = torch.arange(rows * s.kv_heads).view(rows, s.kv_heads)
        places = (heads * cache.width + positions[:, None]).view(-1)
        masks = {window: unseen(positions, width, window)[:, None] for window in set(s.windows)}
        attention = Attention(rows * s.kv_heads, s.heads // s.kv_heads, width, rows, s.head_dim)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for tensor, new in ((cache.k[index], k), (cache.v[index], v)):
                tensor.view(-1, s.head_dim).index_copy_(0, places, new.float().reshape(-1, s.head_dim))
            queries = q.float().reshape(rows * s.kv_heads, -1, s.head_dim)
            keys, values = (x[:rows, :, :width].flatten(0, 1) for x in (cache.k[index], cache.v[index]))
            return attention(queries, keys, values, masks[s.windows[index]]).reshape(rows, -1)

        routes: list[torch.Tensor] | None = [] if trace else None
        hidden = self._forward(weights, tokens, positions, attend, routes)
        return self._logits(weights, hidden), None if routes is None else torch.stack(routes, 1)

    def _forward(self, weights: Weights, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend,
                 routes: list[torch.Tensor] | None) -> torch.Tensor:
        """[R] tokens -> [R, hidden] before the last norm. `attend` owns keys and values, `routes` collects experts."""
        s = self.shape
        cos, sin = self._cos[positions], self._sin[positions]
        turned = s.heads + s.kv_heads
        x = F.embedding(tokens, weights.embed)
        for index, layer in enumerate(weights.layers):
            qkv = self._linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(x), turned + s.kv_heads, s.head_dim)
            qk = qkv[:, :turned]
            if layer.head_norm is not None:
                qk = self._norm(qk, None).mul_(layer.head_norm)
            qk = qk.roll(s.head_dim // 2, -1).mul_(sin).add_(qk.mul_(cos))
            mixed = attend(index, qk[:, : s.heads], qk[:, s.heads :], qkv[:, turned:])
            x += self._linear(mixed.to(x.dtype), layer.o, layer.o_bias)
            h = self._norm(x, layer.post_norm)
            if layer.router is not None:
                x += self._experts(h, layer, routes)
                continue
            x += self._mlp(h, layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
            if routes is not None:
                routes.append(torch.full((len(x), s.topk), -1, dtype=torch.int16, device=x.device))
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm over the last axis; rounded to the model's dtype before the weight, as transformers does.

        The steps of F.rms_norm and its bits, in four fifths of the time.
        """
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(self.shape.eps).rsqrt_()
        normed = (wide * scale).to(x.dtype)
        return normed if weight is None else normed.mul_(weight)

    def _logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(self._norm(hidden, weights.norm), weights.head).float()

    def _experts(self, x: torch.Tensor, layer: Layer, routes: list[torch.Tensor] | None) -> torch.Tensor:
        """x [R, hidden] through its topk experts, each expert's rows padded to a multiple of ROWS."""
        s = self.shape
        scores = self._linear(x, layer.router)[:, : s.experts].float()
        if s.renormalise:  # the experts' softmax, which is what softmax over all and renormalising comes to
            best, chosen = scores.topk(s.topk, -1)
            weight = torch.softmax(best, -1)
        else:
            weight, chosen = torch.softmax(scores, -1).topk(s.topk, -1)
        if routes is not None:
            routes.append(chosen.to(torch.int16))
        chosen, order = chosen.sort(-1)  # contributions are added in this order
        weight = weight.gather(1, order)

        flat = chosen.view(-1)
        by_expert = flat.argsort(stable=True)  # (row, slot) pairs, expert after expert
        sizes = torch.bincount(flat, minlength=s.experts)
        padded = (sizes + ROWS - 1) // ROWS * ROWS
        shift = (padded.cumsum(0) - padded) - (sizes.cumsum(0) - sizes)
        places = torch.empty_like(flat)
        places[by_expert] = torch.arange(len(flat), device=x.device) + shift[flat[by_expert]]
        total = int(padded.sum())
        gathered, shares = x.new_zeros(total, s.hidden), weight.new_zeros(total, 1)
        gathered[places], shares[places] = x.repeat_interleave(s.topk, 0), weight.view(-1, 1)
        used = [(expert, size) for expert, size in enumerate(padded.tolist()) if size]
        sizes_used = [size for _, size in used]
        done = [self._mlp(part, layer.gate_up[e], layer.down[e], share=share) for part, share, (e, _) in
                zip(gathered.split(sizes_used), shares.split(sizes_used), used, strict=True)]
        each = torch.cat(done)[places].view(len(x), s.topk, -1)
        out = each[:, 0].clone()
        for slot in range(1, s.topk):
            out += each[:, slot]
        return out

    def _mlp(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None,
             down_bias: torch.Tensor | None = None, share: torch.Tensor | None = None) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]; `share` [R, 1] multiplies what lies in between, as Megatron's experts do."""
        gate, up = self._linear(x, gate_up, gate_up_bias).chunk(2, -1)
        inner = F.silu(gate).mul_(up)
        return self._linear(inner if share is None else (inner * share).to(x.dtype), down, down_bias)
