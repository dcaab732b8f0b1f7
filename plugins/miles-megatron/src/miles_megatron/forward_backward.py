"""Forward and backward: micro-batches through Megatron-core's own schedule, and the columns that passes fill.

Every rank knows the whole rollout, runs its data-parallel share of it, and reads the large columns of that alone. What
a pass finds is put into one buffer over all response tokens of the rollout, in which each token is written by one rank
only, and the buffers are added up: after that every rank has the column of every sample, under any layout, and the sum
is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from miles_local.transfer import on_device

from miles_core.columns import Columns
from miles_core.types import Sample
from miles_megatron import cpu
from miles_megatron.embedding import Blocks, Positions, Rows, last_keys, positions, replacement
from miles_megatron.microbatch import MicroBatch, assemble
from miles_megatron.model_on_rank import ModelOnRank
from miles_megatron.on_policy import engine_order
from miles_megatron.packed_layout import packed_rows

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

LossOf = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(hidden states, micro-batch) -> its share of the loss; called on the last pipeline stage."""


def run(model: ModelOnRank, columns: Columns, parts: Sequence[Sequence[Sample]], loss_of: LossOf, *, name: str,
        around: Callable | None = None, embedding: Rows | None = None,
        rope: Positions | None = None, blocks: Blocks | None = None, forward_only: bool = False) -> None:
    """One pass of Megatron's schedule over micro-batches.

    Losses are sums whose weights are fixed before the step (stages/loss.py), so Megatron is asked to scale nothing:
    per-token loss with a token count of zero.

    Args:
        parts: this data-parallel rank's micro-batches, the same number on every rank.
        name: the model's, for the hook.
        around: the bound hook `microbatch`.
        embedding, rope, blocks: the bound hooks `embedding_rows`, `rope_positions` and `attention_blocks`.
    """
    settings = model.settings
    context = parallel_state.get_context_parallel_group() if settings.context_parallel_size > 1 else None
    split = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
    device = cpu.device()
    # Packed when their turn comes; the chunks of an interleaved pipeline each go through all of them.
    batches = (assemble(columns, part, group=context, sequence_parallel=split, device=device) for part in parts)
    iterators = itertools.tee(batches, len(model.wrapped))

    def forward_step(waiting, module):
        batch: MicroBatch = next(waiting)

        def proceed(packed):
            tokens = on_device(packed.rows["tokens"], device).to(torch.int64)[None]
            chunk = unwrap_model(module)
            asks = embedding is not None and chunk.pre_process
            replaced = replacement(embedding, batch, chunk, model.folder) if asks else None
            turning = None if rope is None else positions(rope, batch, model.folder)
            last = None if blocks is None else last_keys(blocks, batch, model.folder)
            padding = on_device(packed.rows["padding"], device) if model.balances else None
            rows = packed_rows(batch.boundaries, replaced, turning, last, padding)
            return module(tokens, None, None, packed_seq_params=rows)

        hidden = proceed(batch.packed) if around is None else around(proceed, batch.packed, name)

        def reduced(output):
            value = loss_of(output, batch)
            return value, torch.zeros((), dtype=torch.int), {}  # a count of zero: nothing is left to divide

        return hidden, reduced

    several = len(model.wrapped) > 1
    with engine_order(model.config):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(iterators) if several else iterators[0],
            model=model.wrapped if several else model.wrapped[0],
            num_microbatches=len(parts), seq_length=1, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip


class ColumnScatter:
    """Scatters what a pass computes for the trained rows into the columns of all samples on all ranks.

    Args:
        samples: all that any rank's share is of, in one order on every rank.
    """

    def __init__(self, samples: Sequence[Sample]):
        self.samples = samples
        lengths = [sample.response_length for sample in samples]
        self._first = dict(zip(map(id, samples), np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
        self._total = sum(lengths)
        self._buffers: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, Sequence[Sample], dict[str, torch.Tensor]]] = []

    def put(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> None:
        """[N, ...] by column, of the micro-batch's trained rows; copied from the device when the pass is over."""
        detached = {name: rows.detach() for name, rows in values.items()}
        self._waiting.append((batch.sample, batch.offset, batch.samples, detached))

    def _copy(self, sample_of: torch.Tensor, offset: torch.Tensor, samples: Sequence[Sample],
              values: Mapping[str, torch.Tensor]) -> None:
        starts = torch.tensor([self._first.get(id(sample), 0) for sample in samples])  # an unknown one has no rows
        where = starts[sample_of.cpu()] + offset.cpu()
        for name, rows in values.items():
            if name not in self._buffers:
                self._buffers[name] = torch.zeros(self._total, *rows.shape[1:], dtype=rows.dtype)
            self._buffers[name][where] = rows.to(self._buffers[name])

    def scatter(self) -> None:
        """Into the columns of every sample; rows that are not trained on hold 0. Every rank calls it."""
        for waiting in self._waiting:
            self._copy(*waiting)
        self._waiting.clear()
        if dist.get_world_size() > 1:
            self._exchange()
        for name, values in self._buffers.items():
            array = values.numpy()
            for sample in self.samples:
                first = self._first[id(sample)]
                sample.columns[name] = array[first : first + sample.response_length].copy()

    def _exchange(self) -> None:
        shapes = {name: (tuple(values.shape), values.dtype) for name, values in self._buffers.items()}
        known: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(known, shapes)  # earlier pipeline stages have found nothing
        for name, (shape, dtype) in {k: v for each in known for k, v in each.items()}.items():
            mine = parallel_state.get_tensor_model_parallel_rank() == 0 and name in self._buffers
            values = self._buffers[name] if mine else torch.zeros(shape, dtype=dtype)
            dist.all_reduce(values)
            self._buffers[name] = values
