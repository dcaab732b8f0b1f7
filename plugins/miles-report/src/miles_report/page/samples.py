"""The sample files of a run as the page wants them: chosen, cut to size, columns that are constant as one value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from miles_core.record.samples import read_samples
from miles_report.page.document import Limits, short
from miles_report.page.history import History
from miles_report.page.thumbnails import thumbnail

Item = tuple[str, int, Path]
"""Name, rollout and path."""
_FILE = re.compile(r"(.+)_(\d{6,})\.jsonl")


def list_samples(run_dir: str | os.PathLike[str]) -> list[Item]:
    """Every sample file of a run (miles_core/record/samples.py), rollouts first, in order."""
    files = [(unquote(match[1]), int(match[2]), path) for path in Path(run_dir, "samples").glob("*.jsonl")
             if (match := _FILE.fullmatch(path.name))]
    return sorted(files, key=lambda item: (item[0] != "rollout", item[0], item[1]))


def surviving(files: Sequence[Item], history: History) -> list[Item]:
    """The files but for those that a later start does again and has not got to yet. An eval at the rollout that one
    resumes at stands: it is of the checkpoint's weights. Of what was there before a start from scratch none does."""
    starts = [(start["time"] - 2, start.get("resumed_from")) for start in history.starts[1:]]

    def superseded(name: str, rollout_id: int, path: Path) -> bool:
        later = [began for began, first in starts if first is None or first < rollout_id + (name == "rollout")]
        return bool(later) and path.stat().st_mtime < max(later)

    return [item for item in files if not superseded(*item)]


def chosen(files: Sequence[Item], limits: Limits, newest: int = 0) -> list[Item]:
    """Of each name as many as the limits allow: the newest, and of the others some that are spread evenly."""
    names, items = list(dict.fromkeys(name for name, _, _ in files)), []
    evals = sum(name != "rollout" for name in names)
    for name in names:
        mine = [item for item in files if item[0] == name]
        count = limits.rollouts if name == "rollout" else max(2, limits.evals // evals)
        late = min(newest, count - 1, len(mine))
        items += spread(mine[:len(mine) - late], count - late) + mine[len(mine) - late:]
    return items


def excerpt(item: Item, limits: Limits, files: int = 1) -> dict[str, object]:
    """One file's groups from the first on, until its share of samples or bytes is used up; at least one sample.

    The images of prompts are in `images`, by name, each once: None for one that cannot be shown.

    Args:
        files: how many share the limits.
    """
    name, rollout_id, path = item
    share, room = max(1, limits.samples // files), limits.megabytes * 1e6 / files
    shown, left, seen, total, full = [], 0, set(), 0, False
    images: dict[str, str | None] = {}
    for sample in read_samples(path):
        new = sample["prompt_uid"] not in seen
        seen.add(sample["prompt_uid"])
        total = sample.get("groups") or 0
        # A group that was begun is finished, up to twice the share: groups are what one compares.
        if full or (shown and (room <= 0 or len(shown) >= (share if new else 2 * share))):
            full, left = True, left + 1
            continue
        compact = _compact(sample, limits)
        folder = path.parents[1] / "images"
        fresh = {image: thumbnail(folder, image) for image in compact["images"] if image not in images}
        images |= fresh
        room -= len(json.dumps([compact, fresh], ensure_ascii=False))
        shown.append(compact)
    return {"name": name, "rollout": rollout_id, "samples": shown, "samples_left": left,
            "recorded": len(seen), "groups": max(total, len(seen)), "images": images}


def spread(items: Sequence, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[-1:])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _compact(sample: dict, limits: Limits) -> dict[str, object]:
    pieces, ids = sample.get("pieces") or [], sample.get("token_ids") or []
    cut = len(pieces) - limits.tokens
    compact = {
        "uid": sample["prompt_uid"], "row": sample.get("row"), "i": sample.get("index"), "n": len(ids),
        "prompt": short(sample.get("prompt") or "", limits.characters),
        "pieces": pieces[:limits.tokens], "ids": ids[:limits.tokens],
        "lp": [None if p is None else round(p, 3) for p in (sample.get("log_probs") or [])[:limits.tokens]],
        "mask": _constant((sample.get("loss_mask") or [])[:limits.tokens]),
        "ver": _constant((sample.get("versions") or [])[:limits.tokens]),
        "reward": sample.get("reward"), "rewards": sample.get("rewards") or {}, "adv": sample.get("advantage"),
        "label": sample.get("label"), "status": sample.get("status"),
        "images": [str(image) for image in (sample.get("images") or [])[:limits.images]],
    }  # fmt: skip
    if not pieces:
        compact["text"] = short(sample.get("response") or "", limits.characters)
    if cut > 0:
        compact["cut"] = cut
    return compact


def _constant(values: list) -> object:
    return values[0] if values and all(value == values[0] for value in values) else values
