"""What the files of a torch_dist checkpoint are, and whether what its index says it holds is what a model wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from miles_local.checkpoint_index import Held, places

from miles_core.errors import CheckpointError
from miles_megatron import cpu

cpu.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

OPTIMIZER = ("optimizer.", "chained_")
"""How names of an optimizer's state begin; the second is how Megatron-LM's of several optimizers do."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per token; Megatron-core cuts or fills their rows when it loads."""

def archives(folder: Path, rank: int, ranks: int) -> list[tuple[Path, int, int | None]]:
    """This rank's share of the tensors in a folder of `.distcp` files, and of its common.pt; see stored.check_archives.

    Raises:
        CheckpointError: as `places`.
    """
    return [*places(folder / ".metadata"), (folder / "common.pt", 0, None)][rank::ranks]


def check(stored: Held, sharded: dict, folder: Path, *, padded: bool = False) -> None:
    """Compare with what a model and its optimizer ask for, before anything is loaded.

    Args:
        sharded: the sharded state dict of this rank.
        padded: the vocabulary may have more rows there, which are left out.

    Raises:
        CheckpointError: weights of another architecture, no optimizer state, or that of another model.
    """
    wrong = {}
    for name, shape in _wanted(sharded):
        if name not in stored:
            wrong[name] = f"no {name}"
        elif stored[name] != shape and not (
                padded and name in VOCABULARY and stored[name][0] > shape[0] and stored[name][1:] == shape[1:]):
            wrong[name] = f"{name} {list(stored[name])} where the model has {list(shape)}"
    weights = [text for name, text in wrong.items() if not name.startswith(OPTIMIZER)]
    state = [text for name, text in wrong.items() if name.startswith(OPTIMIZER)]
    if weights:
        raise CheckpointError("the checkpoint belongs to another architecture", code="checkpoint-architecture-mismatch",
                              got=_few(weights), who=str(folder),
                              fix="use the checkpoint of a run of this --hf-checkpoint")
    if state and not any(name.startswith(OPTIMIZER) for name in stored):
        raise CheckpointError("the checkpoint holds weights without optimizer state, so nothing can be resumed exactly",
                              who=str(folder), fix="start from its weights with --ref-load in place of --load; save "
                              "without --no-save-optim next time", code="checkpoint-without-optimizer")
    if state:
        raise CheckpointError("the optimizer state belongs to another model or optimizer",
                              got=_few(state), code="optimizer-state-mismatch", who=str(folder),
                              fix="resume with the model and the [optimizer] it was saved with, or start from its "
                              "weights with --ref-load")


def unknown(stored: Held, sharded: dict) -> list[str]:
    """Weights of the checkpoint that no rank's model has; every rank calls it."""
    ranks: list[set[str]] = [{name for name, _ in _wanted(sharded)}] * dist.get_world_size()
    if len(ranks) > 1:
        dist.all_gather_object(ranks, ranks[0])
    return sorted(stored.keys() - set().union(*ranks) - {name for name in stored if name.startswith(OPTIMIZER)})


def _wanted(sharded: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in nested_values(sharded):
        for one in nested_values([entry.build()]) if isinstance(entry, ShardedTensorFactory) else [entry]:
            if isinstance(one, ShardedTensor):
                yield one.key, tuple(one.global_shape)


def _few(texts: list[str], most: int = 4) -> str:
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")
