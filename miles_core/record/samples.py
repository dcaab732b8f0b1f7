"""samples/: the answers of a rollout or of an evaluation with their tokens, one object a line and sample.

    samples/rollout_000003.jsonl
    samples/eval_NAME_000003.jsonl

    rollout_id, prompt_uid, row, index       which sample this is; `groups` tells how many groups the rollout had
    prompt, response, label, status          texts
    images                                   in their order, by their names in the run's folder images
    pieces, token_ids, log_probs, loss_mask, versions    one entry per response token; log_probs are the engine's
    reward, rewards, advantage               the combined score, each scorer's, and the mean advantage of trained tokens

For people and for the report. What a training step can be replayed from is --save-debug-rollout-data.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import publish
from miles_core.types import Sample, images_of

MAX_GROUPS = 64


def sample_file(run_dir: str | os.PathLike[str], name: str, rollout_id: int) -> Path:
    """Where the samples of one rollout lie; `name` as for `write_samples`."""
    return Path(run_dir) / "samples" / f"{quote(name, safe=' ')}_{rollout_id:06d}.jsonl"


def write_samples(run_dir: str | os.PathLike[str], name: str, rollout_id: int, samples: Iterable[Sample],
                  decode_piece: Callable[[int], str], max_tokens: int = 2**18) -> Path | None:
    """Write the samples of one rollout or evaluation; a file that a resumed run writes again is replaced.

    Args:
        name: "rollout", or "eval_" and the name of the dataset.
        decode_piece: the text of one token id.
        max_tokens: keep the first groups with up to so many response tokens, the first one always; 0 writes nothing.
    """
    if max_tokens == 0:
        return None
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.uid, []).append(sample)
    totals = itertools.accumulate(sum(sample.response_length for sample in group) for group in groups.values())
    within = [group for group, total in zip(groups.values(), totals, strict=True) if total <= max_tokens]
    lines = [_line({"rollout_id": rollout_id, "groups": len(groups), **_record(sample, decode_piece)})
             for group in (within or list(groups.values())[:1])[:MAX_GROUPS] for sample in group]
    return publish(sample_file(run_dir, name, rollout_id), b"".join(lines))


def read_samples(path: str | os.PathLike[str]) -> Iterator[dict]:
    """The samples of a file.

    Raises:
        RunDirectoryError: a line is no sample; files are published whole, so something else wrote it.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                sample = json.loads(line)
                hash(sample["prompt_uid"]), sample["response"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RunDirectoryError(f"line {number} is not a sample", code="samples-damaged", who=str(path),
                                        fix="remove the file") from error
            yield sample


def _record(sample: Sample, decode_piece: Callable[[int], str]) -> dict[str, object]:
    """One sample as plain values."""
    length = sample.response_length
    ids = sample.tokens[len(sample.tokens) - length:].tolist() if "tokens" in sample.columns else []
    return {
        "prompt_uid": sample.prompt.uid, "row": sample.prompt.row, "index": sample.index,
        "prompt": sample.prompt.text, "images": images_of(sample.prompt, sample),
        "response": sample.text,
        "pieces": [*map(decode_piece, ids)],
        "token_ids": ids,
        "log_probs": _rounded(sample.columns.get("rollout_log_probs")),  # None of an aborted one, or without an engine
        "loss_mask": sample.columns.get("loss_mask"),
        "versions": sample.columns.get("versions"),
        "reward": _rounded(sample.reward),
        "rewards": {name: _rounded(score) for name, score in sample.rewards.items()},
        "label": sample.prompt.label, "status": str(sample.status), "advantage": _advantage(sample),
        **sample.metadata.get("shown", {})}  # texts of a generator that began with others than the row's


def _advantage(sample: Sample) -> float | None:
    """One number for people: most estimators give every token of a sample the same advantage."""
    array, mask = sample.columns.get("advantages"), sample.columns.get("loss_mask")
    if array is None or mask is None or not mask.any():
        return None
    return _rounded(float(array[mask.astype(bool)].mean()))


def _rounded(value: Any) -> Any:
    """Six digits are plenty to look at; what is not finite becomes null in the file."""
    return value if value is None or isinstance(value, int) else np.round(value, 6)


def _line(record: dict[str, object]) -> bytes:
    dumps = functools.partial(orjson.dumps, default=np.ndarray.tolist,
                              option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    try:
        return dumps(record)
    except TypeError:  # a lone surrogate, which UTF-8 cannot hold and an escape of JSON's can
        names = ("prompt", "images", "response", "pieces", "label")
        texts = {name: orjson.Fragment(json.dumps(record[name])) for name in names}
        return dumps(record | texts)
