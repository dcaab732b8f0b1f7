"""The forward pass of decode.py on a GPU: whole products, packed prefills, decode steps as CUDA graphs.

What a layer is stays in decode.py. Here a row's bits depend on the shapes that it is computed in: on the rows of its
step, rounded up to a bucket, and on what its prefill was packed with. The same requests, started together, give the
same bits again on the same device. Keys and values are kept in the dtype of the weights, and softmax is float32.

Nothing here needs CUDA but the graphs: on a CPU the same code runs step by step, which is how it is tested.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F

from miles_local.cache import WIDTH, Cache, Prefill, round_up
from miles_local.decode import Decoder, unseen
from miles_local.operands import memory
from miles_local.weights import ModelShape, Weights

logger = logging.getLogger(__name__)

GRAPHS = 32
"""Graphs that are kept; the one that was used longest ago makes room."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens [R], positions [R], width) -> logits [R, V]."""


def row_bucket(count: int, most: int) -> int:
    """Rows of a step that has `count`: 16, 32, 64, ..., at most `most`."""
    return min(16 << max(0, (count - 1).bit_length() - 4), most)


def width_bucket(count: int, most: int) -> int:
    """Positions that a step attends to where `count` are filled: 128, 192, 256, 384, 512, ..., at most `most`."""
    power = 1 << max(7, (count - 1).bit_length())
    return min(power * 3 // 4 if power > 128 and count <= power * 3 // 4 else power, most)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of q [B, N, Q, head_dim] to k and v [B, N, T, head_dim]; causal without a mask [..., Q or 1, T]."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    # By its name: what scaled_dot_product_attention chooses hangs on settings of the process, the trainer's too, and
    # this one sums a row's keys in one order, whatever else is in the batch.
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, is_causal=mask is None)[0]


class DeviceDecoder(Decoder):
    """Decoder's arguments and methods; weights, activations and cache have one dtype and lie on `device`."""

    _linear = staticmethod(F.linear)

    def __init__(self, shape: ModelShape, max_context: int, dtype: torch.dtype, device: torch.device):
        super().__init__(shape, max_context, dtype, device)
        self.token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
        # How many rows an expert gets is known on the device alone, so a step of a mixture cannot be captured.
        self.graphs = Graphs(device) if device.type == "cuda" and not shape.sparse else None

    def adopt(self, old: Weights | None, new: Weights) -> Weights:
        """The old set, filled with the new one: graphs have its addresses."""
        if old is None:
            return new
        fresh = new.slots()
        for name, (place, _) in old.slots().items():
            place.copy_(fresh[name][0])
            if (function := new.rounded_inputs.get(memory(fresh[name][0]))) is not None:
                old.rounded_inputs[memory(place)] = function
        return old

    def bucket(self, count: int, cache: Cache) -> int:
        return row_bucket(count, cache.rows)

    def release(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def prefill(self, weights: Weights, sequences: list[tuple[int, ...]], trace: bool = False) -> Prefill:
        """As Decoder.prefill, but what is padded is the attention alone: U sequences have T tokens together."""
        s, device = self.shape, self.device
        lengths = torch.tensor([len(ids) for ids in sequences])
        count, width = len(sequences), round_up(int(lengths.max()), WIDTH)
        live = torch.arange(width) < lengths[:, None]
        places = live.view(-1).nonzero()[:, 0].to(device)
        positions = torch.arange(width).expand(count, -1)[live].to(device)
        tokens = torch.tensor([token for ids in sequences for token in ids], device=device)
        columns = torch.arange(width, device=device)
        masks = {window: None if window is None else unseen(columns, width, window).to(self._dtype)
                 for window in set(s.windows)}
        result = Prefill(logits=torch.empty(0))

        def spread(x: torch.Tensor) -> torch.Tensor:
            """[T, N, head_dim] -> [U, N, width, head_dim]."""
            padded = x.new_zeros(count * width, *x.shape[1:]).index_copy_(0, places, x)
            return padded.view(count, width, *x.shape[1:]).transpose(1, 2)

        def mix(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = map(spread, (q, k, v))
            result.k.append(k)
            result.v.append(v)
            k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
            mixed = attend(q, k, v, masks[s.windows[index]])
            return mixed.transpose(1, 2).reshape(count * width, -1)[places]

        routes: list[torch.Tensor] | None = [] if trace else None
        hidden = self._forward(weights, tokens, positions, mix, routes)
        result.logits = self._logits(weights, hidden[(lengths.cumsum(0) - 1).to(device)])
        if routes is not None:
            result.routing = torch.zeros(count, width, s.layers, s.topk, dtype=torch.int16)
            result.routing[live] = torch.stack(routes, 1).cpu()
        return result

    def step(self, weights: Weights, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor,
             trace: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = width_bucket(int(positions.max()) + 1, cache.width)
        if self.graphs is not None:
            def step(tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
                return self._step(weights, cache, tokens, positions, width)

            return self.graphs.run(step, (weights, cache), tokens, positions, width), None
        routes: list[torch.Tensor] | None = [] if trace else None
        logits = self._step(weights, cache, tokens.to(self.device), positions.to(self.device), width, routes)
        return logits.float(), None if routes is None else torch.stack(routes, 1).cpu()

    def _step(self, weights: Weights, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor, width: int,
              routes: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Logits [R, V]; waits for nothing on the device, so that it can be captured."""
        s, rows = self.shape, len(tokens)
        heads = torch.arange(rows * s.kv_heads, device=self.device).view(rows, s.kv_heads)
        places = (heads * cache.width + positions[:, None]).view(-1)
        masks = {window: unseen(positions, width, window).to(self._dtype)[:, None, None] for window in set(s.windows)}

        def mix(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for tensor, new in ((cache.k[index], k), (cache.v[index], v)):
                tensor.view(-1, s.head_dim).index_copy_(0, places, new.reshape(-1, s.head_dim))
            keys, values = (x[:rows, :, :width] for x in (cache.k[index], cache.v[index]))
            # The query heads of a key head are its query rows: then no key is repeated.
            queries = q.reshape(rows, s.kv_heads, -1, s.head_dim)
            return attend(queries, keys, values, masks[s.windows[index]]).reshape(rows, -1)

        hidden = self._forward(weights, tokens, positions, mix, routes)
        return self._linear(self._norm(hidden, weights.norm), weights.head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.shape.eps)


class Graphs:
    """CUDA graphs of decode steps, by rows and width, captured when they are first needed.

    They share a pool of memory, and what goes in and out lies in buffers for the most rows. Graphs have addresses of
    the weights and the cache, so other ones make them worthless. Where a capture fails, steps run one kernel at a time.
    """

    def __init__(self, device: torch.device):
        self._device, self.failed = device, False
        self.clear()

    def clear(self) -> None:
        """Free them and their memory."""
        self._graphs: OrderedDict[tuple[int, int], torch.cuda.CUDAGraph] = OrderedDict()
        self._owner: tuple | None = None
        self._pool = self._tokens = self._positions = self._logits = None

    def run(self, step: Step, owner: tuple[Weights, Cache], tokens: torch.Tensor, positions: torch.Tensor,
            width: int) -> torch.Tensor:
        """Logits [R, V] float32 of a step.

        Args:
            owner: weights and cache that `step` uses.
            tokens, positions: [R], on the host.
        """
        weights, cache = owner
        if self.failed:
            return step(tokens.to(self._device), positions.to(self._device), width).float()
        if self._owner != (weights, cache, cache.layout):
            self.clear()
            self._owner = (weights, cache, cache.layout)
            self._tokens, self._positions = torch.zeros(2, cache.rows, dtype=torch.int64, device=self._device)
        rows = len(tokens)
        self._tokens[:rows] = tokens
        self._positions[:rows] = positions
        graph = self._graphs.get((rows, width)) or self._capture(step, rows, width)
        if graph is None:
            return self.run(step, owner, tokens, positions, width)
        self._graphs.move_to_end((rows, width))
        graph.replay()
        return self._logits[:rows].float()

    def _capture(self, step: Step, rows: int, width: int) -> torch.cuda.CUDAGraph | None:
        """None where it fails, once and for all."""
        fed = self._tokens[:rows], self._positions[:rows]
        first = step(*fed, width)  # libraries choose kernels and set themselves up outside of the capture
        if self._logits is None:
            self._logits = first.new_empty(len(self._tokens), first.shape[1])
        if len(self._graphs) >= GRAPHS:
            self._graphs.popitem(last=False)
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Only what this thread does is forbidden meanwhile: a trainer may work in another one.
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream(),
                                  capture_error_mode="thread_local"):
                self._logits[:rows].copy_(step(*fed, width))
        except RuntimeError as error:
            logger.warning("CUDA graphs are off, decode steps run kernel by kernel: %s", str(error).splitlines()[0])
            self.clear()
            self.failed = True
            return None
        self._graphs[rows, width] = graph
        return graph
