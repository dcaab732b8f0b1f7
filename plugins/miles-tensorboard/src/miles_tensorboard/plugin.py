"""The plugin: options and hooks. Files are written by event_files.py, imported with the first metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.config import option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_tensorboard.event_files import EventFiles


@dataclass(frozen=True, kw_only=True)
class TensorboardOptions:
    """Where event files go."""

    use_tensorboard: bool = option(True, "Write event files; --no-use-tensorboard keeps the plugin named but idle.")
    tb_project_name: str | None = option(None, "Folder of event files; default: tensorboard in the run's folder.")
    tb_experiment_name: str | None = option(
        None, "Folder below it for this run; default: the run folder's name under --tb-project-name, none otherwise."
    )


class Tensorboard:
    """Writes every metric of a run to TensorBoard event files, one step per rollout."""

    def __init__(self, options: TensorboardOptions):
        self.options = options
        self._files: EventFiles | None = None

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float], run_dir: Path) -> None:
        """One point per metric; the first call opens the file."""
        if not self.options.use_tensorboard:
            return
        if self._files is None:
            from miles_tensorboard.event_files import EventFiles, folder_of

            folder = folder_of(Path(run_dir), self.options.tb_project_name, self.options.tb_experiment_name)
            self._files = EventFiles(folder, first_step=rollout_id)
        self._files.write(rollout_id, values)

    @hookimpl
    def finish(self) -> None:
        """Flush and close."""
        if self._files is not None:
            self._files.close()
            self._files = None
