"""Samples on disk, in safetensors with JSON and no pickle: rollouts for --save-debug-rollout-data and
--load-debug-rollout-data, and in a checkpoint the groups that were sampled and not trained on yet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from miles_core.errors import CheckpointError
from miles_core.reading import reading
from miles_core.record.directory import explained, make_folder, publish
from miles_core.stages.buffer import Slot, Taken
from miles_core.types import Batch, Drop, Group, Prompt, Sample, Status

FLOW = "flow.safetensors"
"""File of a checkpoint that holds the samples of what was under way."""


def save_batch(template: str, batch: Batch) -> Path:
    """Write one rollout; `template` holds {rollout_id}. A RunDirectoryError says what is in the way."""
    path = Path(template.format(rollout_id=batch.rollout_id))
    meta = {"rollout_id": batch.rollout_id, "version": batch.version, "groups": [len(g.samples) for g in batch.groups]}
    with explained(path):
        make_folder(path.parent)
    return publish(path, _pack(meta, batch.samples))


def load_batch(template: str, rollout_id: int) -> Batch:
    """Read one rollout back.

    Raises:
        DataError: missing, or not what save_batch wrote.
    """
    path = Path(template.format(rollout_id=rollout_id))
    with reading(f"--load-debug-rollout-data {path}"):
        meta, samples = _unpack(path.read_bytes())
        groups = [_group(samples, size) for size in meta["groups"]]
        return Batch(meta["rollout_id"], groups, meta["version"])


def save_flow(slots: Sequence[tuple[int, Slot]], begun: Sequence[Group]) -> dict[str, object]:
    """What a checkpoint keeps of the buffer: prompts under way, finished groups, and groups that go on later.

    Args:
        slots: as `Buffer.slots` gives them.
        begun: groups that were called back, oldest first.

    Returns:
        Entries of a checkpoint's state; none when nothing is under way.
    """
    if not slots and not begun:
        return {}
    samples: list[Sample] = []
    entries = []
    for round_, slot in slots:
        sampled, drop = _held(slot), slot.outcome if isinstance(slot.outcome, Drop) else None
        entries.append({"round": round_, "prompt": _plain(slot.prompt), "samples": len(sampled),
                        "drop": drop and astuple(drop), "finished": isinstance(slot.outcome, Group)})
        samples += sampled
    for group in begun:
        samples += group.samples
    data = _pack({}, samples)
    meta = {"slots": entries, "begun": [len(group.samples) for group in begun], "digest": sha256(data).hexdigest()}
    return {"flow": meta, "files": {FLOW: data}}


def load_flow(state: Mapping[str, object]) -> tuple[list[Slot], list[Group]]:
    """Slots for `Buffer.restore`, and groups that go on later.

    Raises:
        CheckpointError: the checkpoint's file is not what its state says.
    """
    if "flow" not in state:
        return [], []
    try:
        meta, data = state["flow"], state["files"][FLOW]
        if sha256(data).hexdigest() != meta["digest"]:
            raise ValueError(f"{len(data)} bytes that are not those of the checkpoint")
        _, samples = _unpack(data)
        slots = []
        for entry in meta["slots"]:
            slot = Slot(entry["round"], _prompt(entry["prompt"]))
            sampled = [samples.pop(0) for _ in range(entry["samples"])]
            if entry["drop"] is not None:
                slot.outcome, slot.group = Drop(*entry["drop"]), Group(slot.prompt, sampled) if sampled else None
            elif entry["finished"]:
                slot.outcome = slot.group = Group(slot.prompt, sampled)
            else:
                slot.begun = tuple(sampled)
            slots.append(slot)
        later = [_group(samples, size) for size in meta["begun"]]
        if samples:
            raise ValueError(f"{len(samples)} samples are nobody's")
        return slots, later
    except Exception as error:
        raise CheckpointError("the unfinished groups cannot be read", got=f"{type(error).__name__}: {error}", who=FLOW,
                              code="unfinished-groups-unreadable", fix="resume from an earlier iteration") from error


def _held(slot: Slot) -> Sequence[Sample]:
    """Of a slot's samples, those that are of use later: finished ones, or what was drawn of unfinished ones."""
    if isinstance(slot.outcome, Group):
        return slot.outcome.samples
    aborted = isinstance(slot.outcome, Drop) and slot.outcome.reason == Status.ABORTED and slot.group is not None
    return slot.group.samples if aborted else () if isinstance(slot.outcome, Drop) else slot.begun


def _pack(meta: dict, samples: Sequence[Sample]) -> bytes:
    """Columns are tensors, and all else is one of bytes: safetensors allows its header 100 MB, which texts exceed."""
    arrays = {f"{i}.{name}": np.asarray(array, order="C") for i, sample in enumerate(samples)
              for name, array in sample.columns.items()}
    records = json.dumps({**meta, "samples": [_plain(sample) for sample in samples]}).encode()
    arrays["records"] = np.frombuffer(records, np.uint8)
    return save({**arrays, "digest": np.frombuffer(_sum(arrays), np.uint8)})


def _unpack(data: bytes) -> tuple[dict, list[Sample]]:
    arrays = load(data)
    if arrays.pop("digest").tobytes() != _sum(arrays):
        raise ValueError("its bytes are not those that were written")
    meta = json.loads(arrays.pop("records").tobytes())
    columns: list[dict[str, np.ndarray]] = [{} for _ in meta["samples"]]
    for key, array in arrays.items():
        index, _, name = key.partition(".")
        columns[int(index)][name] = array
    return meta, [Sample(**{**one, "prompt": _prompt(one["prompt"]), "status": Status(one["status"])}, columns=own)
                  for one, own in zip(meta["samples"], columns, strict=True)]


def _sum(arrays: Mapping[str, np.ndarray]) -> bytes:
    total = sha256()
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        total.update(arrays[name].tobytes())
    return total.digest()


def _group(samples: list[Sample], size: int) -> Group:
    """The next group of so many samples, which are taken off the list."""
    taken = [samples.pop(0) for _ in range(size)]
    return Group(taken[0].prompt, taken)


class Replay:
    """Stands in for the buffer: batches come from disk, and nothing is ever sampled."""

    def __init__(self, template: str, first: int):
        self._template, self._next, self._prompts = template, first, 0

    async def reserve(self) -> Slot:
        """Never: there is nothing to sample."""
        await asyncio.Event().wait()

    async def take(self) -> Taken:
        batch = load_batch(self._template, self._next)
        self._next += 1
        self._prompts = max([self._prompts, *(group.prompt.uid + 1 for group in batch.groups)])
        return Taken(batch.groups)

    def release(self) -> None:
        """Nothing to give back."""

    def state_dict(self) -> dict:
        """What a prompt source goes on from: the first prompt after those that were replayed."""
        return {"next": self._prompts, "again": []}


def _prompt(record: dict) -> Prompt:
    messages = record["messages"]
    return Prompt(**{**record, "token_ids": tuple(record["token_ids"]),
                     "messages": None if messages is None else tuple(messages)})


def _plain(value: object) -> object:
    """As JSON has it, samples without their columns; what JSON cannot hold becomes text."""
    if isinstance(value, Prompt | Sample):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.name != "columns"}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
