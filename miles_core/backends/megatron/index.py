"""What a checkpoint's index says it holds, read without trust, and whether that is what a model wants.

`.metadata` is a pickle that torch reads with the full unpickler, so it is read here first with one that knows the few
classes it may hold. Entries other than tensors, which torch would unpickle too, are refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from miles_core.backends.megatron import cpu
from miles_core.errors import CheckpointError

cpu.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

Held = Mapping[str, tuple[int, ...]]
"""Tensor name -> its whole shape."""

OPTIMIZER = "optimizer."

_SAFE_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "torch.distributed._shard.")
_SAFE_NAMES = {
    ("torch", "Size"), ("torch", "dtype"), ("torch.serialization", "_get_layout"), ("torch._utils", "_rebuild_tensor"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "list"),
    ("builtins", "dict"), ("builtins", "slice"), ("builtins", "int"), ("pathlib", "PosixPath"), ("pathlib", "Path"),
}  # fmt: skip


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _SAFE_NAMES or (module.startswith(_SAFE_MODULES) and "." not in name):
            found = super().find_class(module, name)
            if dtype or not module.startswith(_SAFE_MODULES) or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def read(path: Path) -> Held:
    """The tensors of a `.metadata` file.

    Raises:
        CheckpointError: not the index of tensors that it should be.
    """
    entries = _read(path).state_dict_metadata
    for name, entry in entries.items():
        if not hasattr(entry, "chunks"):
            raise CheckpointError("the checkpoint holds something else than tensors", got=name, who=str(path),
                                  fix="use a checkpoint that miles wrote")
    return {name: tuple(entry.size) for name, entry in entries.items()}


def places(path: Path) -> list[tuple[Path, int, int]]:
    """File, first byte and size of everything that a `.metadata` file tells of, in the order of the files.

    Raises:
        CheckpointError: it cannot be read, or leads out of its folder.
    """
    stored = [(one.relative_path, one.offset, one.length) for one in (_read(path).storage_data or {}).values()]
    if wrong := [name for name, _, _ in stored if Path(name).name != name]:
        raise CheckpointError("the checkpoint's index leads out of its folder", got=wrong[0], who=str(path),
                              fix="do not load checkpoints from strangers")
    return [(path.parent / name, begin, size) for name, begin, size in sorted(stored)]


def _read(path: Path):
    try:
        with open(path, "rb") as file:
            return _MetadataReader(file).load()
    except Exception as error:
        raise CheckpointError("the checkpoint's index cannot be trusted or read", who=str(path),
                              got=(str(error).strip() or type(error).__name__).splitlines()[0][:300],
                              fix="use another iteration; do not load checkpoints from strangers") from error


def check(held: Held, sharded: dict, folder: Path) -> None:
    """Compare with what a model and its optimizer ask for, before anything is loaded.

    Args:
        sharded: the sharded state dict of this rank.

    Raises:
        CheckpointError: weights of another architecture, no optimizer state, or that of another model.
    """
    wrong = {}
    for name, shape in _wanted(sharded):
        if name not in held:
            wrong[name] = f"no {name}"
        elif held[name] != shape:
            wrong[name] = f"{name} {list(held[name])} where the model has {list(shape)}"
    weights = [text for name, text in wrong.items() if not name.startswith(OPTIMIZER)]
    state = [text for name, text in wrong.items() if name.startswith(OPTIMIZER)]
    if weights:
        raise CheckpointError("the checkpoint is of another architecture", got=_few(weights), who=str(folder),
                              fix="use the checkpoint of a run of this --hf-checkpoint")
    if state and not any(name.startswith(OPTIMIZER) for name in held):
        raise CheckpointError("the checkpoint holds weights without optimizer state, so nothing can be resumed exactly",
                              who=str(folder), fix="start from its weights with --ref-load in place of --load; save "
                              "without --no-save-optim next time")
    if state:
        raise CheckpointError("the optimizer state is of another model or optimizer", got=_few(state), who=str(folder),
                              fix="resume with the model and the [optimizer] it was saved with, or start from its "
                              "weights with --ref-load")


def unknown(held: Held, sharded: dict) -> list[str]:
    """Weights of the checkpoint that no rank's model has; every rank calls it."""
    ranks: list[set[str]] = [{name for name, _ in _wanted(sharded)}] * dist.get_world_size()
    if len(ranks) > 1:
        dist.all_gather_object(ranks, ranks[0])
    return sorted(held.keys() - set().union(*ranks) - {name for name in held if name.startswith(OPTIMIZER)})


def _wanted(sharded: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in nested_values(sharded):
        for one in nested_values([entry.build()]) if isinstance(entry, ShardedTensorFactory) else [entry]:
            if isinstance(one, ShardedTensor):
                yield one.key, tuple(one.global_shape)


def _few(texts: list[str], most: int = 4) -> str:
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")
