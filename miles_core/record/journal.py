"""Journal: everything that a run tells anybody, in one place: events, samples, trackers and the live view."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.columns import read_only
from miles_core.errors import MilesError
from miles_core.plugins.bind import Hooks
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog, Kind
from miles_core.record.samples import write_samples
from miles_core.types import Batch, Sample

if TYPE_CHECKING:
    from miles_core.record.console import Console  # and rich, which no rank of a trainer draws with


class Views:
    """Several views of a run as one: every call goes to each. The terminal's, and logs/run.log."""

    def __init__(self, *views: Console):
        self._views = views

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            for view in self._views:
                getattr(view, name)(*args, **kwargs)

        return call


class Journal:
    """Where the run's figures go.

    Args:
        hooks: the driver's, of which trackers are told.
        strict: whether a tracker that fails ends the run.
        decode_piece: text of one token id, for the sample files.
        print_every: print a sample of every N-th rollout.
        samples: response tokens of a rollout or an evaluation that its sample file holds.
    """

    def __init__(self, directory: RunDirectory, console: Console | Views, *, hooks: Hooks | None = None,
                 strict: bool = False, decode_piece: Callable[[int], str] = str, print_every: int | None = None,
                 samples: int = 2**18):
        self.directory, self.console, self.events = directory, console, EventLog(directory.events)
        self._hashes: EventLog | None = None
        self._hooks, self._strict, self._print_every = hooks, strict, print_every
        self._record = functools.partial(write_samples, directory, max_tokens=samples,
                                         decode_piece=functools.cache(decode_piece))  # ids repeat a lot

    def stage(self, name: str) -> None:
        """What is going on now."""
        self.console.stage(name)

    def event(self, kind: str, /, rollout_id: int | None = None, **fields: object) -> None:
        """One line of events.jsonl. What it says in words, its `text`, the terminal and the log tell as well."""
        self.events.append(kind, rollout_id, **fields)
        if kind == "checkpoint":
            done = "Staged" if fields["staged"] else "Saved"
            self.console.message("info", f"{done} checkpoint to {fields['path']} ({fields['seconds']:.2f}s)")
        elif kind == "weight_sync":
            self.console.message("detail", f"weight_sync to version {fields['version']}: "
                                           f"{fields.get('bytes', 0) / 1e6:,.1f} MB ({fields['seconds']:.2f}s)")
        elif "text" in fields:
            self.console.message(fields.get("level", "warning"), fields["text"])

    def message(self, level: str, text: str) -> None:
        """A sentence for the person and for the record."""
        self.event(Kind.MESSAGE, level=level, text=text)

    def rollout(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """A rollout has been trained on."""
        self.events.append(Kind.METRICS, rollout_id := batch.rollout_id, metrics=metrics)
        self._record("rollout", rollout_id, batch.samples)
        self._track(rollout_id, metrics, None, batch.samples)
        self.console.rollout(rollout_id, metrics)
        if self._print_every and rollout_id % self._print_every == 0 and batch.samples:
            sample = batch.samples[0]
            self.message("info", f"rollout {rollout_id}: {sample.prompt.text!r} -> {sample.text!r}  "
                                 f"reward {sample.reward}  label {sample.prompt.label!r}")

    def hashes(self, rollout_id: int, weights: Mapping[str, str], batch: Mapping[str, str],
               grad_norm: float | None) -> None:
        """Hash of every tensor after the rollout's steps and of every column of its batch, and one total of each.

        The totals are an event. The many go to a file of their own, and first: a rollout with totals has them there.
        """
        if self._hashes is None:
            self._hashes = EventLog(self.directory.hashes)
        self._hashes.append("hashes", rollout_id, weights=weights, batch=batch)
        self.events.append("hashes", rollout_id, weights=_total(weights), batch=_total(batch), grad_norm=grad_norm)

    def evaluation(self, name: str, rollout_id: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """A dataset has been evaluated with the weights that rollout `rollout_id` samples from."""
        self.events.append(Kind.EVAL, rollout_id, metrics=metrics)
        self._record(f"eval_{name}", rollout_id, samples)
        self._track(rollout_id, metrics, name, samples)
        self.console.evaluation(name, rollout_id, metrics)

    def saving(self) -> None:
        """A checkpoint is about to be published: what it skips is in a record that outlasts a power cut."""
        self.stage("save")
        for log in (self.events, self._hashes):
            if log is not None:
                log.sync()

    def _track(self, rollout_id: int, metrics: Mapping[str, float], dataset: str | None,
               samples: Sequence[Sample]) -> None:
        if self._hooks is not None:
            text = {name.encode(errors="backslashreplace").decode(): value for name, value in metrics.items()}
            self.tell(self._hooks.metrics, rollout_id, text, self.directory.path)
            with read_only(samples if self._hooks.samples else (), "samples"):
                self.tell(self._hooks.samples, rollout_id, dataset, samples, self.directory.path)

    def tell(self, hook: Callable | None, *arguments: object) -> None:
        """Call the trackers. One that fails is a warning, and the run goes on, unless --strict-trackers says otherwise
        or it raises an error of Miles's, which it does on purpose."""
        try:
            if hook is not None:
                hook(*arguments)
        except Exception as error:
            if self._strict or isinstance(error, MilesError):
                raise
            whose = "; ".join(note for note in getattr(error, "__notes__", ()) if "\n" not in note)
            self.message("warning", f"{type(error).__name__}: {error} {whose}. The run goes on; with --strict-trackers "
                                    "it would not")


def _total(hashes: Mapping[str, str]) -> str:
    """One hash of many named ones."""
    return hashlib.sha256("".join(f"{name} {value}\n" for name, value in hashes.items()).encode()).hexdigest()[:16]
