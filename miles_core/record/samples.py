"""samples/: the answers of a rollout or of an evaluation with their tokens, one object a line and sample.

    samples/rollout_000003.jsonl
    samples/eval_NAME_000003.jsonl

    rollout_id, prompt_uid, row, index       which sample this is; `groups` tells how many groups the rollout had
    prompt, response, label, status          texts
    pieces, token_ids, log_probs, loss_mask, versions    one entry per response token; log_probs are the engine's
    reward, rewards, advantage               the combined score, each scorer's, and the mean advantage of trained tokens

For people and for the report. What a training step can be replayed from is --save-debug-rollout-data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import publish
from miles_core.types import Sample

MAX_GROUPS = 64
_FILE = re.compile(r"(.+)_(\d{6,})\.jsonl")


def sample_file(run_dir: str | os.PathLike[str], name: str, rollout_id: int) -> Path:
    """Where the samples of one rollout lie; `name` as for `write_samples`."""
    return Path(run_dir) / "samples" / f"{quote(name, safe=' ')}_{rollout_id:06d}.jsonl"


def write_samples(run_dir: str | os.PathLike[str], name: str, rollout_id: int, samples: Iterable[Sample],
                  decode_piece: Callable[[int], str], max_groups: int | None = MAX_GROUPS) -> Path | None:
    """Write the samples of one rollout or evaluation; a file that a resumed run writes again is replaced.

    Args:
        name: "rollout", or "eval_" and the name of the dataset.
        decode_piece: the text of one token id.
        max_groups: keep the first so many prompts with all their samples; None keeps all, 0 writes nothing.
    """
    if max_groups == 0:
        return None
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.uid, []).append(sample)
    pieces: dict[int, str] = {}
    lines = [
        _line({"rollout_id": rollout_id, "groups": len(groups), **_record(sample, pieces, decode_piece)})
        for group in list(groups.values())[:max_groups]
        for sample in group]
    return publish(sample_file(run_dir, name, rollout_id), "".join(lines))


def list_samples(run_dir: str | os.PathLike[str]) -> list[tuple[str, int, Path]]:
    """(name, rollout_id, path) of every file of a run, rollouts first, in order."""
    files = [(unquote(match[1]), int(match[2]), path) for path in Path(run_dir, "samples").glob("*.jsonl")
             if (match := _FILE.fullmatch(path.name))]
    return sorted(files, key=lambda item: (item[0] != "rollout", item[0], item[1]))


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


def _record(sample: Sample, pieces: dict[int, str], decode_piece: Callable[[int], str]) -> dict[str, object]:
    """One sample as plain values. Ids repeat a lot, so their texts are looked up once and kept in `pieces`."""
    length = sample.response_length
    ids = sample.tokens[len(sample.tokens) - length:].tolist() if "tokens" in sample.columns else []
    for token in ids:
        if token not in pieces:
            pieces[token] = decode_piece(token)
    return {
        "prompt_uid": sample.prompt.uid,
        "row": sample.prompt.row,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "pieces": [pieces[token] for token in ids],
        "token_ids": ids,
        "log_probs": _column(sample, "rollout_log_probs"),
        "loss_mask": _column(sample, "loss_mask"),
        "versions": _column(sample, "versions"),
        "reward": _finite(sample.reward),
        "rewards": {name: _finite(score) for name, score in sample.rewards.items()},
        "label": sample.prompt.label,
        "status": str(sample.status),
        "advantage": _advantage(sample)}


def _column(sample: Sample, name: str) -> list | None:
    """A per-token column as a list; None when the sample has none (an aborted one, or no engine)."""
    array = sample.columns.get(name)
    if array is None or not np.issubdtype(array.dtype, np.floating):
        return None if array is None else array.tolist()
    rounded = array.astype(np.float64).round(6).tolist()
    return rounded if np.isfinite(array).all() else [_finite(value) for value in rounded]


def _advantage(sample: Sample) -> float | None:
    """One number for people: most estimators give every token of a sample the same advantage."""
    array, mask = sample.columns.get("advantages"), sample.columns.get("loss_mask")
    if array is None or mask is None or not mask.any():
        return None
    return _finite(float(array[mask.astype(bool)].mean()))


def _finite(value: float | None) -> float | None:
    """Strict JSON has no NaN; six digits are plenty to look at."""
    if value is None or isinstance(value, int):
        return value
    return round(float(value), 6) if math.isfinite(value) else None


def _line(record: dict[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
