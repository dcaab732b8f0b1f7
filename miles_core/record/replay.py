"""Rollouts on disk, for --save-debug-rollout-data and --load-debug-rollout-data: safetensors with JSON, no pickle."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from miles_core.errors import DataError
from miles_core.record.directory import publish
from miles_core.stages.buffer import Slot, Taken
from miles_core.types import Batch, Group, Prompt, Sample, Status


def save_batch(template: str, batch: Batch) -> Path:
    """Write one rollout; `template` holds {rollout_id}."""
    path = Path(template.format(rollout_id=batch.rollout_id))
    arrays = {f"{i}.{name}": np.ascontiguousarray(array) for i, sample in enumerate(batch.samples)
              for name, array in sample.columns.items()}
    groups = [[_record(sample) for sample in group.samples] for group in batch.groups]
    meta = {"rollout_id": batch.rollout_id, "version": batch.version, "groups": groups}
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, save(arrays, {"miles": json.dumps(meta)}))
    return path


def load_batch(template: str, rollout_id: int) -> Batch:
    """Read one rollout back.

    Raises:
        DataError: missing, or not what save_batch wrote.
    """
    path = Path(template.format(rollout_id=rollout_id))
    try:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta, arrays = json.loads(header["__metadata__"]["miles"]), load(data)
    except FileNotFoundError:
        raise DataError("there is no saved rollout", who=str(path),
                        fix="check --load-debug-rollout-data and --num-rollout") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError("this is no saved rollout", got=str(error), who=str(path),
                        fix="write it with --save-debug-rollout-data") from None
    columns: dict[int, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        index, _, name = key.partition(".")
        columns.setdefault(int(index), {})[name] = array
    groups, index = [], 0
    for records in meta["groups"]:
        samples = []
        for record in records:
            samples.append(_sample(record, columns[index]))
            index += 1
        groups.append(Group(samples[0].prompt, samples))
    return Batch(meta["rollout_id"], groups, meta["version"])


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

    def untrained(self) -> list[Prompt]:
        return []

    def state_dict(self) -> dict:
        """What a prompt source goes on from: the first prompt after those that were replayed."""
        return {"next": self._prompts, "again": []}


def _record(sample: Sample) -> dict:
    prompt = sample.prompt
    return {
        "uid": prompt.uid, "row": prompt.row, "text": prompt.text, "label": prompt.label, "stream": prompt.stream,
        "metadata": json.loads(json.dumps(dict(prompt.metadata), default=str)), "index": sample.index,
        "response": sample.text, "response_length": sample.response_length, "status": str(sample.status),
        "rewards": sample.rewards, "reward": sample.reward, "rollout": sample.rollout,
    }  # fmt: skip


def _sample(record: dict, columns: dict[str, np.ndarray]) -> Sample:
    size = len(columns["tokens"]) - record["response_length"]
    prompt = Prompt(record["uid"], record["row"], record["text"], tuple(int(t) for t in columns["tokens"][:size]),
                    record["label"], record["metadata"], None, record["stream"])
    return Sample(prompt, record["index"], columns, record["response_length"], record["response"],
                  Status(record["status"]), record["rewards"], record["reward"], record["rollout"])
