"""The folder of --save: which checkpoints are there, and how one goes.

A checkpoint is renamed before it is removed, to a name that the next save clears: a kill in between leaves nothing that
could be taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from miles_core.record.publish import TEMPORARY
from miles_core.types import TRACKER

_ITERATION = re.compile(r"iter_(\d{7,})")


def newest(folder: Path) -> int | None:
    """The checkpoint that a run would resume from; None where there is none yet, or the file names none."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def saved(folder: Path) -> list[int]:
    """Rollouts done in each checkpoint of the folder, ascending."""
    names = (_ITERATION.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name is not None)


def remove(folder: Path, iterations: Sequence[int]) -> None:
    """Remove checkpoints, the oldest first. One that cannot be renamed stays; nobody waits for this."""
    for iteration in iterations:
        old = folder / f"iter_{iteration:07d}"
        aside = folder / f"{TEMPORARY}removed-{old.name}"
        try:
            os.rename(old, aside)
        except OSError:
            continue
        shutil.rmtree(aside, ignore_errors=True)
