"""Event files: where they lie, and how a resumed run goes on without points that stand twice.

A run that resumes at rollout k repeats whatever had been written from k on before it was killed. Each start therefore
opens a new file whose first event is a session start at its first step: TensorBoard then forgets the points of earlier
files from that step on (`purge_step`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter


def folder_of(run_dir: Path, project: str | None, experiment: str | None) -> Path:
    """RUN/tensorboard[/EXPERIMENT], or PROJECT/(EXPERIMENT or the run folder's name)."""
    if project is not None:
        return Path(project) / (experiment or run_dir.name)
    return run_dir / "tensorboard" / experiment if experiment else run_dir / "tensorboard"


class EventFiles:
    """The event file of one start of a run.

    Args:
        first_step: the step of the first point to come; later points of earlier starts are void.
    """

    def __init__(self, folder: Path, first_step: int):
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One point per value, on disk when this returns: a killed run loses none."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, name: str, step: int, text: str) -> None:
        """Markdown."""
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def histogram(self, name: str, step: int, values: Sequence[float]) -> None:
        """How some numbers are distributed."""
        self._writer.add_histogram(name, np.asarray(values), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._writer.close()
