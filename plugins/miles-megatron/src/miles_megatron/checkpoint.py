"""Megatron's torch_dist checkpoints: sharded, independent of the layout, and on disk completely or not at all.

    <save>/iter_0000007/                     published by rename when complete
        *.distcp .metadata metadata.json     tensors: model, optimizer
        common.pt                            numbers: schedule, optimizer groups
        miles.json                           the run's own state
    <save>/latest_checkpointed_iteration.txt "7", written last, also by rename

On trust: common.pt is read with torch's weights_only unpickler, `.metadata` as miles_local's checkpoint_index says. The
JSON is data. Of checkpoints that other programs wrote (foreign.py) the weights are read.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from miles_local import checkpoint_index
from miles_local.stored import check_archives, check_state, write_errors
from torch.distributed.checkpoint.api import CheckpointException

from miles_core.errors import CheckpointError, MilesError
from miles_core.record.publish import TEMPORARY, aside, publish
from miles_core.types import LOCK, TRACKER
from miles_megatron import checkpoint_write, cpu, foreign, index
from miles_megatron.async_save import AsyncSave
from miles_megatron.checkpoint_write import STATE, Staged, of_first_rank
from miles_megatron.optimizer import load_state, numbered_groups, prepare_state
from miles_megatron.shards import few
from miles_megatron.weights import global_parameters, known_by

cpu.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

# It logs what it raises as well, and without a handler of the user's that would go to the terminal.
logging.getLogger("megatron.core.dist_checkpointing").addHandler(logging.NullHandler())

ACTOR = "actor"
_PARTS = ("metadata.json", ".metadata", "common.pt", STATE)
_OF_CHECKPOINTS = {*_PARTS, TRACKER, "config.json"}
_ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where one iteration of a checkpoint lies; after a power cut perhaps where its successor put it aside."""
    target = Path(folder) / f"iter_{iteration:07d}"
    if not target.exists() and iteration == 0 and _tracked(Path(folder)) == foreign.RELEASE:
        return Path(folder) / foreign.RELEASE
    return target if target.exists() or not aside(target).exists() else aside(target)


def exists(folder: str | Path) -> bool:
    """Whether a run ever completed a checkpoint here; then `latest` answers or says what is wrong."""
    return (Path(folder) / TRACKER).is_file()


def latest(folder: str | Path) -> int:
    """The iteration to resume from: the one that the tracker names.

    A kill between the first iteration and the tracker leaves an iteration, complete, that nothing names; it counts.

    Raises:
        CheckpointError: no such folder, a folder that is no checkpoint (a Hugging Face directory, or one iteration
            of a checkpoint), or a tracker that names an iteration which is missing or incomplete.
    """
    folder = Path(folder)
    tracker = folder / TRACKER
    if not tracker.is_file():
        if (first := _unnamed(folder)) is not None:
            return first
        raise _not_a_checkpoint(folder)
    text = _tracked(folder)
    if text == foreign.RELEASE:
        text = "0"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError("the tracker file does not name an iteration", code="tracker-unreadable",
                              got=repr(text[:40]), who=str(tracker),
                              fix=f"write the number of a complete iteration into it, of {_present(folder)}")
    where = iteration_folder(folder, int(text))
    if not where.is_dir():
        raise CheckpointError(f"the tracker names iteration {text}, which does not exist", got=_present(folder),
                              who=str(tracker), fix="write the number of an existing iteration into the tracker",
                              code="tracker-iteration-missing")
    if absent := _absent(where):
        what, fix = "incomplete", f"write the number of a complete iteration into {TRACKER}, of {_present(folder)}"
        if len(absent) == len(_PARTS) and any(where.iterdir()):
            what, fix = "another trainer's", "go on with that trainer; to others weights go by --save-hf and --ref-load"
        raise CheckpointError(f"iteration {text} is {what}", got="no " + ", ".join(absent), who=str(where), fix=fix,
                              code="iteration-incomplete")
    return int(text)


def of_another_program(folder: str | Path) -> bool:
    """Whether `--load` takes this folder's weights and nothing else (foreign.py).

    Raises:
        CheckpointError: as `latest`.
    """
    return exists(folder) and not (iteration_folder(folder, latest(folder)) / STATE).is_file()


def weights_alone(folder: str | Path) -> bool:
    """Whether `--load` is a start and not a resume: a Hugging Face directory, or what another program saved.

    Raises:
        CheckpointError: as `latest`.
    """
    begun = exists(folder) or _unnamed(Path(folder)) is not None
    return of_another_program(folder) or not begun and (Path(folder) / "config.json").is_file()


def others(iteration: Path) -> checkpoint_index.Held | None:
    """The tensors in one iteration of another program's checkpoint; None where it is ours, or no checkpoint."""
    if (iteration / STATE).is_file() or not (iteration / ".metadata").is_file():
        return None
    return checkpoint_index.read(iteration / ".metadata", tensors_only=False)


Part = tuple[Sequence[torch.nn.Module], object | None, object | None]
"""A trained model: its chunks, wrapped or not, and both or none of optimizer and schedule."""


def save(folder: str | Path, iteration: int, parts: Mapping[str, Part],
         state: Mapping[str, object] | None = None, *, async_save: AsyncSave | None = None) -> Path:
    """Write a checkpoint; every rank calls it. What was complete before stays valid until this one is.

    Args:
        parts: the trained models by name, the actor at the top and each other in a folder of its name.
        state: anything that JSON can hold, and under "files" names and bytes of files to put beside it.
        async_save: who writes it beside training, after the one before; then this returns when all is planned, and
            the models may change after its `settle`.

    Raises:
        CheckpointError: the disk is full or cannot be written.
        WaitError: the checkpoint before takes too long.
    """
    if async_save is not None:
        async_save.wait()
    target = Path(folder) / f"iter_{iteration:07d}"
    first = dist.get_rank() == 0
    with contextlib.ExitStack() as unpublished:
        temporary = unpublished.enter_context(publish(target, writer=first))
        unpublished.enter_context(write_errors(target))
        planned = []
        for (where, (chunks, optimizer, scheduler)), name in zip(_folders(temporary, parts), parts, strict=True):
            if first:
                where.mkdir(exist_ok=True)
            _barrier()
            with _frozen_heap():
                if optimizer is not None:
                    prepare_state(optimizer)
                sharded = sharded_entries(chunks, optimizer, loading=False)
                if scheduler is not None:
                    sharded["scheduler"] = scheduler.state_dict()
                stage = None if async_save is None else partial(async_save.staged, name)
                planned.append(checkpoint_write.Part(sharded, where, stage))
        staged = Staged(unpublished.pop_all(), planned, temporary, target, iteration, dict(state or {}))
    if async_save is None:
        staged.publish()
    else:
        async_save.start(target, staged.publish)
    return target


def load(folder: str | Path, parts: Mapping[str, Part], iteration: int | None = None) -> tuple[int, dict]:
    """Fill the models and, where given, optimizers and schedules; every rank calls it, under any layout.

    Args:
        iteration: another than the latest.

    Returns:
        The iteration, and the state that `save` was given.

    Raises:
        CheckpointError: as `latest`, or a checkpoint that cannot be read or does not fit the model.
    """
    # Another run may save into the folder meanwhile, and a network file system shows each host the tracker of its time.
    iteration = of_first_rank(latest(folder)) if iteration is None else iteration
    source = iteration_folder(folder, iteration)
    if absent := _absent(source):
        raise CheckpointError(f"iteration {iteration} is missing or incomplete", got="no " + ", ".join(absent),
                              who=str(source), fix=f"choose one of {_present(Path(folder))}",
                              code="iteration-missing-or-incomplete")
    for (where, part), name in zip(_folders(source, parts), parts, strict=True):
        if not where.is_dir():
            raise CheckpointError(f"the checkpoint holds no {name}", code="checkpoint-part-missing",
                                  got=f"no folder {name}", who=str(source),
                                  fix="resume with the plugins that the run had, or start over with --ref-load")
        foreign_names = None if (source / STATE).is_file() else others(where)
        stored = checkpoint_index.read(where / ".metadata") if foreign_names is None else foreign_names
        try:
            check_archives(index.archives(where, dist.get_rank(), dist.get_world_size()))
            saved_state = _state(source, iteration) if foreign_names is None else {}
            _load_part(where, stored, foreign_names is not None, *part)
        except MilesError:
            raise
        except (Exception, CheckpointException) as error:  # torch's own is a BaseException; a flipped bit raises any
            raise CheckpointError("the checkpoint cannot be read or does not fit this model", got=_first_line(error),
                                  who=str(where), fix="use the checkpoint of a run of the same model and optimizer, or "
                                  "an earlier iteration", code="checkpoint-does-not-fit") from error
    return iteration, saved_state


def _state(source: Path, iteration: int) -> dict:
    read = json.loads((source / STATE).read_text())
    saved_state = read["state"]
    check_state(saved_state, read.get("digest"), source / STATE)
    if read.get("iteration", iteration) != iteration:
        raise CheckpointError("the checkpoint is of another iteration than its folder", code="iteration-misnamed",
                              got=f"{STATE} of iteration {read['iteration']}", who=str(source),
                              fix=f"give the folder its own number, and write it into {TRACKER}")
    if "files" in saved_state:
        saved_state["files"] = {name: (source / Path(name).name).read_bytes() for name in saved_state["files"]}
    return saved_state


def _load_part(source: Path, stored: checkpoint_index.Held, other: bool, chunks: Sequence[torch.nn.Module], optimizer,
               scheduler) -> None:
    if optimizer is not None:
        prepare_state(optimizer)
    with _frozen_heap():
        sharded = sharded_entries(chunks, optimizer, loading=True, named_as=stored if other else None)
    index.check(stored, sharded, source, padded=other)
    if more := index.unknown(stored, sharded):
        raise CheckpointError("the checkpoint holds weights that the model does not have", got=few(more),
                              who=str(source), code="checkpoint-weights-unknown", fix=known_by())
    with warnings.catch_warnings():
        # torch deprecates the ShardedTensor that Megatron still reads with: nothing that the reader could fix.
        warnings.simplefilter("ignore", FutureWarning)
        common = foreign.WithoutCommon() if other else None
        loaded = dist_checkpointing.load(sharded, str(source), common_strategy=common)
    for key, chunk in _named(chunks):
        _fill(chunk, loaded[key])
    if optimizer is not None:
        load_state(optimizer, scheduler, loaded["optimizer"], loaded["scheduler"])


def _folders(folder: Path, parts: Mapping[str, Part]) -> Iterator[tuple[Path, Part]]:
    for name, part in parts.items():
        yield folder if name == ACTOR else folder / name, part


def _fill(chunk: torch.nn.Module, tensors: dict) -> None:
    """load_state_dict that excuses the extra state, which is not saved, and nothing else."""
    missing, unexpected = chunk.load_state_dict(tensors, strict=False)
    if wrong := [name for name in missing if not name.endswith("_extra_state")] + unexpected:
        raise KeyError(f"tensors missing or unexpected: {wrong}")


def sharded_entries(chunks: Sequence[torch.nn.Module], optimizer, *, loading: bool,
                    named_as: checkpoint_index.Held | None = None) -> dict:
    """What Megatron saves and loads. The metadata makes the optimizer's state independent of the layout.

    Args:
        named_as: what another program's checkpoint holds, to be asked for by its names.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        **(foreign.metadata(named_as) if named_as is not None else {}),
    }
    with foreign.stacked_as(named_as, chunks):
        sharded = _tensors(chunks, metadata)
    if named_as is not None:
        foreign.rename(sharded, named_as)
    if optimizer is not None:
        # State of layers and experts is stacked as they are, unless some of them have none.
        apart = _tensors(chunks, metadata | {"singleton_local_shards": True}) if _partly_frozen(chunks) else sharded
        state = optimizer.sharded_state_dict(apart, is_loading=loading, metadata=metadata)
        sharded["optimizer"] = numbered_groups(optimizer, state, loading=loading)
    return sharded


def _tensors(chunks: Sequence[torch.nn.Module], metadata: Mapping[str, object]) -> dict[str, dict]:
    """Extra state is empty for local layers, and as objects it would be unpickled by torch on load."""
    return {key: {name: entry for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
                  if not isinstance(entry, ShardedObject)}
            for key, chunk in _named(chunks)}


def _partly_frozen(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether a parameter trains in one layer or expert and not in another; every rank calls it."""
    kinds = {(re.sub(r"\.\d+(?=\.)", "", name), one.requires_grad) for name, one in global_parameters(chunks).items()
             if isinstance(one, torch.nn.Parameter)}
    ranks = [kinds] * dist.get_world_size()
    if len(ranks) > 1:
        dist.all_gather_object(ranks, kinds)
    everywhere = set().union(*ranks)
    return any((kind, not trains) in everywhere for kind, trains in everywhere)


def _named(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Chunks of an interleaved pipeline are told apart; a sole one is called "model", as Megatron-LM does."""
    for i, chunk in enumerate(chunks):
        yield "model" if len(chunks) == 1 else f"model{i}", unwrap_model(chunk)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """DistributedOptimizer calls gc.collect() to make its state dict; without the heap of before it takes no time."""
    if gc.get_freeze_count():  # most of it is hidden already, and is to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def never_saved(folder: str | Path, *, own: bool = False) -> bool:
    """Whether no save was ever completed here: no such folder, nothing in it, or what a kill left of the first one.

    Args:
        own: the run saves here, too, so that files beside its checkpoints are its script's.
    """
    folder = Path(folder)
    ours = (TEMPORARY, LOCK)
    return not folder.exists() or (folder.is_dir() and all(
        p.name.startswith(ours) or (own and p.is_file() and p.name not in _OF_CHECKPOINTS) for p in folder.iterdir()))


def _tracked(folder: Path) -> str:
    tracker = folder / TRACKER
    return tracker.read_text(errors="replace").strip() if tracker.is_file() else ""


def _absent(iteration: Path) -> list[str]:
    parts = [part for part in _PARTS if part != STATE or not foreign.wrote(iteration)]
    return [part for part in parts if not (iteration / part).is_file()]


def _unnamed(folder: Path) -> int | None:
    """The sole iteration of a folder without a tracker, if it is complete."""
    iterations = [path for path in folder.glob("iter_*") if _ITERATION.fullmatch(path.name)]
    whole = len(iterations) == 1 and not _absent(iterations[0])
    return int(_ITERATION.fullmatch(iterations[0].name)[1]) if whole else None


def _not_a_checkpoint(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError("the checkpoint folder does not exist", code="checkpoint-folder-missing",
                               who=str(folder), fix="correct --load, or leave it out to start from --hf-checkpoint")
    if _ITERATION.fullmatch(folder.name) or (folder / "metadata.json").is_file():
        return CheckpointError("this is one iteration of a checkpoint", who=str(folder),
                               fix=f"give the folder above it, {folder.parent}", code="checkpoint-is-one-iteration")
    if (folder / "config.json").is_file():
        return CheckpointError("this is a Hugging Face directory, not a torch_dist checkpoint",
                               code="checkpoint-is-hugging-face", who=str(folder),
                               fix="give it as --hf-checkpoint, or convert it with miles convert hf-to-dist")
    return CheckpointError("this is not a checkpoint", got=f"no {TRACKER}; {_present(folder)}", who=str(folder),
                           fix="give a folder that a run saved into with --save", code="not-a-checkpoint")


def _present(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("iter_*") if not path.name.startswith(TEMPORARY))
    return "iterations present: " + ", ".join(names) if names else "no iterations present"


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # torch's wrapper, which says nothing
        return _first_line(next(iter(error.failures.values()))[0])
    text = str(error).strip() or type(error).__name__
    return next(line for line in text.splitlines() if line.strip())[:300]


def _barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
