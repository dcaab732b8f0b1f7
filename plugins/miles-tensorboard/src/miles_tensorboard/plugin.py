"""The plugin: options and hooks. Files are written by event_files.py, imported when the run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_report.tracker import without_secrets

from miles_core.config import option
from miles_core.hookspecs import hookimpl
from miles_core.record.events import Kind, read

if TYPE_CHECKING:
    from miles_core.types import Sample
    from miles_tensorboard.event_files import EventFiles


@dataclass(frozen=True, kw_only=True)
class TensorboardOptions:
    """Where event files go."""

    use_tensorboard: bool = option(
        True, "Write event files; --no-use-tensorboard leaves the plugin idle.", flags=("--use-tensorboard",),
        off=("--no-use-tensorboard",),
    )
    tb_project_name: str | None = option(
        None, "Folder of event files; default: tensorboard in the run's folder.", flags=("--tb-project-name",)
    )
    tb_experiment_name: str | None = option(
        None, "Folder below it for this run; default: the run folder's name under --tb-project-name, none otherwise.",
        flags=("--tb-experiment-name",),
    )


class Tensorboard:
    """Writes every metric of a run to TensorBoard event files, one step per rollout."""

    def __init__(self, options: TensorboardOptions):
        self.options = options
        self._files: EventFiles | None = None
        self._evaluated: tuple[int, dict[str, float]] | None = None

    @hookimpl
    def begin(self, plan: dict[str, Any], resumed_from: int | None, run_dir: Path) -> None:
        """Opens the file, whose first entry is the plan."""
        if (files := self._open(run_dir, resumed_from or 0)) is not None:
            rows = [f"| {key} | {value} |" for key, value in without_secrets(plan)["options"].items()]
            files.text("plan", resumed_from or 0, "\n".join(["| option | value |", "|---|---|", *rows]))
            if resumed_from is not None:
                self._evaluated = resumed_from, evaluated(Path(run_dir, "events.jsonl"), resumed_from)

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float], run_dir: Path) -> None:
        """One point per metric."""
        if (files := self._open(run_dir, rollout_id)) is not None:
            self._restore(files, values)
            files.write(rollout_id, values)

    @hookimpl
    def samples(self, rollout_id: int, dataset: str | None, samples: Sequence[Sample], run_dir: Path) -> None:
        """Histograms of rewards and lengths, and the first answer."""
        if not samples or (files := self._open(run_dir, rollout_id)) is None:
            return
        where, first = "rollout" if dataset is None else f"eval/{dataset}", samples[0]
        files.histogram(f"{where}/rewards", rollout_id, [float(one.reward or 0.0) for one in samples])
        files.histogram(f"{where}/response_lengths", rollout_id, [float(one.response_length) for one in samples])
        files.text(f"{where}/sample", rollout_id, f"{first.prompt.text}\n\n{first.text}\n\nreward {first.reward}")

    @hookimpl
    def finish(self, status: str) -> None:
        """Flush and close."""
        if self._files is not None:
            self._restore(self._files, {})
            self._files.close()
            self._files = None

    def _restore(self, files: EventFiles, values: Mapping[str, float]) -> None:
        """Write again what the new file has voided, unless this start has evaluated its first weights anew."""
        if self._evaluated is not None and not self._evaluated[1].keys() & values.keys():
            files.write(*self._evaluated)
        self._evaluated = None

    def _open(self, run_dir: Path, first_step: int) -> EventFiles | None:
        if self._files is None and self.options.use_tensorboard:
            from miles_tensorboard.event_files import EventFiles, folder_of

            folder = folder_of(Path(run_dir), self.options.tb_project_name, self.options.tb_experiment_name)
            self._files = EventFiles(folder, first_step)
        return self._files


def evaluated(events: Path, rollout_id: int) -> dict[str, float]:
    """What an earlier start has measured of the weights that this rollout samples from, which stay as they are."""
    if not events.is_file():
        return {}
    evals = (event for event in read(events, only=(b'"eval"',)) if event["event"] == Kind.EVAL)
    return {name: value for event in evals if event["rollout_id"] == rollout_id
            for name, value in event["metrics"].items() if value is not None}
