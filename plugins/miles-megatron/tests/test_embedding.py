"""Rows in place of embeddings, and positions: whichever part of a micro-batch a rank has, it gets its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron.embedding import positions, replacement
from miles_megatron.microbatch import assemble

from miles_core.columns import Columns
from miles_core.errors import HookError
from miles_core.types import Prompt, Sample

ROWS = {5: {1: torch.full((2, 3), 1.0)}, 7: {}, 6: {0: torch.full((1, 3), 2.0), 4: torch.full((1, 3), 3.0)}}
"""By a sample's length."""
FOLDER = Path("models")
CHUNK = torch.nn.Identity()


def sample(length):
    columns = {"tokens": np.arange(length, dtype=np.int32), "loss_mask": np.ones(2, np.uint8),
               "rollout_log_probs": np.zeros(2, np.float32), "versions": np.zeros(2, np.int32)}
    return Sample(Prompt(0, 0, "", tuple(range(length - 2))), 0, columns, 2)


def hook(one, chunk, folder):
    assert (chunk, folder) == (CHUNK, FOLDER)
    return ROWS[one.length]


def whole():
    """[32] what the rows of samples with 5, 7 and 6 tokens become; 0 for those that stay."""
    rows = torch.zeros(32)
    rows[1:3], rows[12], rows[16] = 1, 2, 3
    return rows


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_part_of_the_rows_gets_its_own_and_they_have_no_gradient(parts):
    """Sequence parallelism: a rank embeds a stretch of the rows."""
    batch = assemble(Columns(), [sample(5), sample(7), sample(6)], sequence_parallel=32)
    replaced = replacement(hook, batch, CHUNK, FOLDER)
    embedded = torch.zeros(32, 1, 3, requires_grad=True)
    size = 32 // parts
    out = torch.cat([replaced(embedded[n * size : (n + 1) * size], n * size) for n in range(parts)])
    assert torch.equal(out[:, 0, 0], whole()) and torch.equal(out[:, 0, 2], whole())
    out.sum().backward()
    assert torch.equal(embedded.grad[:, 0, 1] == 0, whole() > 0)


def test_context_parallel_ranks_get_the_rows_that_they_have():
    """In whatever order these lie."""
    batch = assemble(Columns(), [sample(5), sample(7), sample(6)], sequence_parallel=32)
    places = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    for mine in places.chunk(2):
        batch.places = mine.numpy()
        out = replacement(hook, batch, CHUNK, FOLDER)(torch.zeros(16, 1, 3), 0)
        assert torch.equal(out[:, 0, 0], whole()[mine])


def test_nothing_is_replaced_where_nobody_returns_rows_and_rows_beyond_a_sample_are_refused():
    batch = assemble(Columns(), [sample(7)])
    assert replacement(hook, batch, CHUNK, FOLDER) is None
    with pytest.raises(HookError) as caught:
        replacement(lambda *_: {6: torch.zeros(2, 3)}, batch, CHUNK, FOLDER)
    assert caught.value.code == "embedding-rows-outside"


def test_positions_are_places_in_a_sample_unless_somebody_says_otherwise():
    """On ranks of context parallelism those of the rows that they have."""
    batch = assemble(Columns(), [sample(5), sample(7)], sequence_parallel=16)
    assert positions(lambda *_: {}, batch, FOLDER) is None
    said = torch.tensor([[3, 3, 4], [5, 6, 6]])
    whole = positions(lambda one, _: {2: said} if one.length == 7 else {}, batch, FOLDER)
    assert whole[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 3, 3, 4, 5, 6, 0, 1, 2, 3]
    assert whole[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 6, 5, 6, 0, 1, 2, 3]
    batch.places = np.array([7, 1, 12])
    mine = positions(lambda one, _: {2: said} if one.length == 7 else {}, batch, FOLDER)
    assert mine.tolist() == [[3, 1, 0], [5, 1, 0]]
