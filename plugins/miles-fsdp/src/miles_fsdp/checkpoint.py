"""Checkpoints of torch.distributed.checkpoint, which any number of ranks loads; Hugging Face directories; hashes.

    <save>/iter_0000007/          published by rename when complete
        tensors/                  what trains and its optimizer, a file of each rank
        fsdp.json                 optimizer steps, and those of a rollout, the actor's directory if not all of it
                                  trains, the run's own state, and digests
    <save>/latest_checkpointed_iteration.txt "7", written last

On trust: the tensors' index is read as miles_local's checkpoint_index says, and nothing but tensors is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from miles_local import checkpoint_index
from miles_local.companions import copy_companions
from miles_local.stored import check_archives, check_state, digest, write_errors
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from miles_core.config.tables import Checkpoint
from miles_core.errors import CheckpointError
from miles_core.record.publish import publish, write_text
from miles_core.types import TRACKER, Sample
from miles_fsdp.async_save import AsyncSave
from miles_fsdp.models import Models, directory
from miles_fsdp.ranks import Ranks
from miles_fsdp.trained import Trained

STATE, TENSORS, INDEX = "fsdp.json", "tensors", ".metadata"


def latest(folder: str) -> int | None:
    """The iteration to go on from; None where nothing was saved yet.

    A kill between the first iteration and the tracker leaves an iteration, complete, that nothing names; it counts.

    Raises:
        CheckpointError: the tracker names none of this trainer's, or is not there beside several.
    """
    tracker, iterations = Path(folder, TRACKER), sorted(path.name for path in Path(folder).glob("iter_*"))
    if not tracker.is_file() and not iterations:
        return None
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8").strip()
        got = f"{TRACKER} says {text[:40]!r}, and that iteration has no {STATE}"
    else:
        text = iterations[0].removeprefix("iter_") if len(iterations) == 1 else ""
        got = f"no {TRACKER} beside {', '.join(iterations)}"
    if not text.isdecimal() or not Path(folder, f"iter_{int(text):07d}", STATE).is_file():
        raise CheckpointError("there is no checkpoint of the trainer fsdp here", code="fsdp-checkpoint-missing",
                              got=got, who=folder,
                              fix="name a folder that --trainer fsdp saved to; Hugging Face directories of other "
                              "trainers' checkpoints come from `miles convert dist-to-hf`")
    return int(text)


def save(folder: Path, iteration: int, models: Models, ranks: Ranks, state: dict[str, Any], *, whole: bool,
         beside: AsyncSave | None = None) -> None:
    """Write a checkpoint; every rank calls it. What was complete before stays valid until this one is.

    Args:
        whole: with the optimizer.
        beside: who writes it beside training, after the one before.

    Raises:
        CheckpointError: the disk is full or cannot be written.
        WaitError: the checkpoint before takes too long.
    """
    if beside is not None:
        beside.wait()
    document = {"iteration": iteration, "steps": {name: one.steps for name, one in models.trained.items()},
                "rollout_steps": models.rollout_steps, "optimizer": whole, "warm": models.warm, "base": models.base,
                "state": state}
    target, tensors = folder / f"iter_{iteration:07d}", _tensors(models, whole)
    if beside is None:
        _write(target, iteration, lambda: tensors, document, ranks)
    else:
        copies = beside.staged(tensors)
        beside.start(target, partial(_write, target, iteration, copies.result, document, ranks))


def _write(target: Path, iteration: int, tensors: Callable[[], dict[str, Any]], document: dict[str, Any], ranks: Ranks,
           beside: AsyncSave | None = None) -> None:
    """Write and publish it, in a thread if `beside` is given, whose ranks have a group of their own."""
    first, group = ranks.index == 0, None if beside is None else beside.group
    with ExitStack() as publishing:
        with publish(target, writer=first) as temporary, write_errors(target):
            ranks.wait(group)  # the folder is there
            save_tensors(tensors(), checkpoint_id=temporary / TENSORS, process_group=group)
            if first:
                _write_state(temporary, document)
            ranks.wait(group)
            if beside is not None:
                publishing.enter_context(beside.publishing)
                beside.going_on()
        if first:
            write_text(target.parent / TRACKER, f"{iteration}\n")
    ranks.wait(group)


def _write_state(folder: Path, document: dict[str, Any]) -> None:
    """What lies beside the tensors, with digests of their index and of itself."""
    state = document["state"]
    files = state.get("files", {})
    for name, data in files.items():
        (folder / name).write_bytes(data)
    saved = {**document, "index": _digest([(folder / TENSORS / INDEX).read_bytes()]),
             "state": {**state, "files": sorted(files)} if files else state}
    base = saved.pop("base")  # may be written anew where the directory moves
    (folder / STATE).write_text(json.dumps({**saved, "base": base, "digest": digest(saved)}))


def start(folder: str, iteration: int, paths: Checkpoint) -> str:
    """The Hugging Face directory that the actor began with, and that has what does not train of it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the directory of what does not train is gone.
    """
    where = Path(folder, f"iter_{iteration:07d}", STATE)
    try:
        saved = json.loads(where.read_text(encoding="utf-8"))
        source: str | None = saved["base"]
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(where, error) from error
    if source is not None and not Path(source, "config.json").is_file():
        raise CheckpointError("the weights that this checkpoint adds to are gone", code="fsdp-base-missing", got=source,
                              who=str(where), fix="put the directory back, or name its place now in this file")
    warm = saved.get("warm") and directory(paths.ref_load)
    return source or str(paths.ref_load if warm else paths.hf_checkpoint)


def load(folder: str, iteration: int, models: Models, ranks: Ranks) -> dict[str, Any]:
    """Fill models and optimizer from a checkpoint, whatever the number of ranks that saved it; the run's state.

    Raises:
        CheckpointError: it cannot be read, is not what was written, or is of another model.
    """
    where = Path(folder, f"iter_{iteration:07d}")
    try:
        saved = json.loads((where / STATE).read_text(encoding="utf-8"))
        if not saved["optimizer"]:
            raise CheckpointError("the checkpoint holds weights without optimizer state, so nothing can be resumed "
                                  "exactly", code="fsdp-checkpoint-without-optimizer", who=str(where),
                                  fix="start from a directory of --save-hf; save without --no-save-optim next time")
        _check(where, saved, ranks)
        tensors = _tensors(models, whole=True)
        # Not the optimizer's groups: this run has its own, which may be other parameters' together.
        state = {name: {**part, "optimizer": {"state": part["optimizer"]["state"]}} for name, part in tensors.items()}
        stored = checkpoint_index.read(where / TENSORS / INDEX, tensors_only=False)  # before torch reads it
        wanted = flatten_state_dict(state)[0].keys()
        if missing := sorted(wanted - stored.keys()):
            raise ValueError(f"no tensor {missing[0]}")
        if surplus := [name for name in stored if ".optimizer." not in name and name not in wanted]:
            raise ValueError(f"no place for {surplus[0]}")
        load_tensors(state, checkpoint_id=where / TENSORS)
        before = saved.get("rollout_steps", models.rollout_steps)  # older checkpoints do not say
        for name, one in models.trained.items():
            _restore(one, tensors[name])
            # The schedule goes on after as many rollouts, however many steps each of them takes now.
            one.steps = round(saved["steps"][name] * models.rollout_steps / before)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        raise _unreadable(where, error) from error
    run: dict[str, Any] = saved["state"]
    if files := run.get("files"):
        run = {**run, "files": {name: (where / name).read_bytes() for name in files}}
    return run


def _check(where: Path, saved: dict[str, Any], ranks: Ranks) -> None:
    """Whether it is what was written; of the tensors each rank looks at a share."""
    digested = {name: one for name, one in saved.items() if name not in ("base", "digest")}  # a base may move
    check_state(digested, saved.get("digest"), where / STATE)
    if "iteration" in saved and where.name != f"iter_{saved['iteration']:07d}":
        raise ValueError(f"{STATE} is of iteration {saved['iteration']}")
    if "index" in saved and saved["index"] != _digest([(where / TENSORS / INDEX).read_bytes()]):
        raise ValueError(f"{TENSORS}/{INDEX} is not what was written")
    check_archives(checkpoint_index.places(where / TENSORS / INDEX)[ranks.index :: ranks.size])


def _unreadable(where: Path, error: BaseException) -> CheckpointError:
    return CheckpointError("the checkpoint cannot be read, or is of another model", code="fsdp-checkpoint-unreadable",
                           got=str(error).strip().split("\n")[-1].strip(), who=str(where),
                           fix="take an earlier one, or start anew without --load")


def _tensors(models: Models, whole: bool) -> dict[str, Any]:
    """By model."""
    trained = StateDictOptions(ignore_frozen_params=True)
    tensors: dict[str, dict[str, Any]] = {}
    for name, one in models.trained.items():
        tensors[name] = {"model": get_model_state_dict(one.module, options=trained)}
        if whole:
            tensors[name]["optimizer"] = _optimizer_tensors(one)
    return tensors


def _optimizer_tensors(trained: Trained) -> dict[str, Any]:
    """torch makes the state of an optimizer that has taken no step, as an actor's whose critic warms up, by a step with
    gradients of zero; it is not to count, or every later step would be scaled as the one after it."""
    fresh = not trained.optimizer.state
    tensors = get_optimizer_state_dict(trained.module, trained.optimizer)
    if fresh:
        for state in trained.optimizer.state.values():
            state["step"].zero_()
        tensors = get_optimizer_state_dict(trained.module, trained.optimizer)
    return tensors


def _restore(trained: Trained, tensors: dict[str, Any]) -> None:
    set_model_state_dict(trained.module, tensors["model"], options=StateDictOptions(strict=False))  # all were there
    set_optimizer_state_dict(trained.module, trained.optimizer, tensors["optimizer"])


def export(folder: Path, stream: Iterable[tuple[str, torch.Tensor]], source: str, dtype: torch.dtype) -> None:
    """Write a Hugging Face directory with what `source` holds beside its weights; one rank calls it.

    Args:
        dtype: of the parameters, for config.json.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    with publish(folder, beside=False) as temporary, write_errors(folder):
        save_torch_state_dict({name: tensor.to("cpu", copy=True) for name, tensor in stream}, temporary,
                              filename_pattern="model{suffix}.safetensors", max_shard_size="5GB")
        copy_companions(Path(source), temporary, dtype, {"quantization_config": None})  # the weights are plain


def hashes(stream: Iterable[tuple[str, torch.Tensor]], samples: Iterable[Sample]) -> dict[str, dict[str, str]]:
    """Of every weight, and of every column over all samples with their rewards: equal ones mean equal bits."""
    weights = {}
    for name, tensor in stream:
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        weights[name] = _digest([f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), flat.numpy().tobytes()])
    samples = list(samples)
    names = sorted({name for sample in samples for name in sample.columns})
    columns = {name: _digest(_bytes(sample.columns.get(name)) for sample in samples) for name in names}
    columns["reward"] = _digest(_bytes(None if one.reward is None else np.float64(one.reward)) for one in samples)
    return {"weights": weights, "batch": columns}


def _bytes(value: Any) -> bytes:
    array = np.asarray(value)
    return b"none " if value is None else f"{array.dtype.str} {array.shape} ".encode() + array.tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
