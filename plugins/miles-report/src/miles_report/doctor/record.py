"""Record: what the files of a run directory say, as the rules need it. Nothing is written, nothing heavy imported."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from statistics import fmean

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_core.record.events import Kind, parsed, read

WINDOW = 5
"""Rollouts that a trend is averaged over at each end."""

MAX_SAMPLES, MAX_TOKENS = 256, 400_000
"""Of one samples file that are looked at: enough for a share, and read within a fraction of a second."""

EACH, ALL = 16 << 20, 96 << 20
"""Bytes that are searched of one log, a quarter of them at its begin and the rest at its end; and of all logs."""


class Cause(Enum):
    """Why a run ended, by codes of its error or words of it; the first cause of which one is there."""

    FILTERS = ("filters dropped",)  # so many groups that no batch came together
    # It failed, or there was none.
    SCORER = ("scorer ", "sample-not-scored", "reward-not-finite", "nobody scored", "has no finite reward")
    NON_FINITE = ("not finite",)  # a loss or a gradient
    MEMORY = ("out of memory", "too little memory")  # of a GPU or the machine
    DISK = ("disk is full", "No space left on device")
    TIMEOUT = ("did not finish", "did not answer", "did not get on", "made no progress")  # a wait reached its bound
    DEATH = ("died", "RaySystemError", "WorkerCrashed", "it ended while it started")  # of a process


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log. `count` lines of that log had the words."""

    where: str
    text: str
    count: int = 1


@dataclass
class Record:
    """A run, running or ended.

    Args:
        now: unix seconds at which it is looked at.
        plan: content of plan.json; empty if the file is missing.
        events: those of the surviving lineage, each with its "line" in events.jsonl.
        damage: why events.jsonl could not be read in order; the whole lines of it are there all the same.
        holder: who writes here right now; None when nobody does.
    """

    directory: RunDirectory
    now: float
    plan: dict = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)
    damage: str | None = None
    holder: dict | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], now: float | None = None) -> Record:
        """
        Raises:
            RunDirectoryError: this is no run.
        """
        directory = RunDirectory.existing(path)
        holder = directory.holder()  # before the events: a run that ends meanwhile was not killed
        events, damage = _events(directory.events)
        try:
            plan = json.loads(directory.plan_json.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            plan = {}
        return cls(directory, time.time() if now is None else now, plan if isinstance(plan, dict) else {}, events,
                   damage, holder)

    def of(self, *kinds: str) -> list[dict]:
        """Events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(rollout, value) of a metric, where it is finite."""
        return [(rollout_id, value) for rollout_id, event in self.metrics.items()
                if isinstance(value := event["metrics"].get(name), (int, float))]

    def ends(self, name: str) -> tuple[float, float] | None:
        """Means of a metric over its first and its last rollouts, WINDOW each; None before there are two windows."""
        values = [value for _, value in self.series(name)]
        return (fmean(values[:WINDOW]), fmean(values[-WINDOW:])) if len(values) >= 2 * WINDOW else None

    def latest(self, name: str) -> float | None:
        """Mean of a metric over the last rollouts, at most WINDOW."""
        values = [value for _, value in self.series(name)][-WINDOW:]
        return fmean(values) if values else None

    def option(self, name: str, default: object = None) -> object:
        """What the plan says of an option, by its name without the table."""
        return self._options.get(name, default)

    def owner(self, hook: str) -> str | None:
        """The part that the plan picks for a hook."""
        return next((one[1] for one in self.plan.get("owners", ()) if one[0] == hook), None)

    def where(self, event: dict) -> str:
        """File and line of an event."""
        return f"events.jsonl:{event['line']}"

    @cached_property
    def metrics(self) -> dict[int, dict]:
        """Rollout -> its event."""
        return {event["rollout_id"]: event for event in self.of(Kind.METRICS) if event["rollout_id"] is not None}

    @cached_property
    def first(self) -> dict | None:
        """The event with the metrics of the very first rollout, before anything was learnt."""
        return self.metrics.get(0)

    @cached_property
    def end(self) -> dict | None:
        """The last start's run_end; None while it runs, and after a kill."""
        last = next(reversed(self.of(Kind.RUN_START, Kind.RUN_END)), None)
        return last if last is not None and last["event"] == Kind.RUN_END else None

    @cached_property
    def error(self) -> str:
        """What the last start ended with, without its code; "" for nothing."""
        return str((self.end or {}).get("error") or "").removesuffix(f" [{self.code}]")

    @property
    def code(self) -> str:
        """The code of that error; "" where it has none, as in records of older versions."""
        return str((self.end or {}).get("code") or "")

    @property
    def said(self) -> str:
        """The error without its remedy."""
        return self.error.partition(" Fix: ")[0].rstrip(".")

    def remedy(self, *more: str) -> str:
        """What to do by the error's own words, and then this."""
        own = self.error.partition(" Fix: ")[2].partition(". The end of ")[0].rstrip(".")
        return "; ".join(filter(None, [own, *more]))

    @cached_property
    def cause(self) -> Cause | None:
        """Of the last start's end; None for one that its error does not tell."""
        described = f"{self.code} {self.error}"
        return next((cause for cause in Cause if any(word in described for word in cause.value)), None)

    @cached_property
    def plugins(self) -> set[str]:
        """Names of the plugins in use."""
        return {str(one.get("name")) for one in self.plan.get("plugins", ())}

    @cached_property
    def supervised(self) -> bool:
        """Whether answers are given and not sampled: there is no engine to agree with, and no reward to compare."""
        return self.option("loss_type") == "sft_loss"

    @cached_property
    def on_cpu(self) -> bool:
        """Whether PyTorch was built without CUDA."""
        starts = self.of(Kind.RUN_START)
        return bool(starts) and "+cpu" in str(starts[-1].get("versions", {}).get("torch"))

    @cached_property
    def architecture(self) -> dict:
        """config.json of the checkpoint, that of its text model; empty where it cannot be read from here."""
        try:
            hf_config = json.loads(Path(str(self.option("hf_checkpoint")), "config.json").read_text("utf-8"))
            return {**hf_config, **hf_config.get("text_config", {})}
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    @cached_property
    def experts(self) -> int:
        """Routed experts of the model; 0 for a dense one, or when the configuration does not say."""
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return next((int(self.architecture[name]) for name in names if self.architecture.get(name)), 0)

    def samples(self, rollout_id: int) -> list[dict]:
        """The first answers of a rollout; none where the file is gone or damaged."""
        from miles_core.record.samples import read_samples, sample_file

        samples, tokens = [], 0
        try:
            for sample in read_samples(sample_file(self.directory, "rollout", rollout_id)):
                samples.append(sample)
                tokens += len(sample.get("token_ids") or ())
                if len(samples) >= MAX_SAMPLES or tokens >= MAX_TOKENS:
                    break
        except (OSError, RunDirectoryError):
            return []
        return samples

    def logs(self, begin: str = "") -> list[Path]:
        """Files under logs/ whose name begins so."""
        folder = self.directory.logs
        return sorted(path for path in folder.glob(f"{begin}*") if path.is_file()) if folder.is_dir() else []

    def find(self, *words: str, within: str = "") -> Iterator[Line]:
        """The first line of each log that has one of these words; `within` is how the log's name begins."""
        for path in self.logs(within):
            pieces = self._pieces(path)
            hits = [(offset + at, text, at) for offset, text in pieces for word in words
                    if (at := text.find(word.encode())) >= 0]
            if hits:
                offset, text, at = min(hits, key=lambda hit: hit[0])
                line = text[text.rfind(b"\n", 0, at) + 1: at + 400].partition(b"\n")[0]
                count = sum(text.count(word.encode()) for _, text in pieces for word in words)
                yield Line(f"logs/{path.name}:{_line_number(path, offset)}", line.decode("utf-8", "replace").strip(),
                           count)

    def _pieces(self, path: Path) -> list[tuple[int, bytes]]:
        """(offset, bytes) of what is searched of a log; read once."""
        if path not in self._read:
            try:
                most = min(EACH, ALL // len(self.logs()))
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    pieces = [(0, file.read(most if size <= most else most // 4))]
                    if size > most:
                        tail = most - most // 4
                        file.seek(size - tail)
                        pieces.append((size - tail, file.read(tail)))
            except OSError:
                pieces = []
            self._read[path] = pieces
        return self._read[path]

    @cached_property
    def _read(self) -> dict[Path, list[tuple[int, bytes]]]:
        return {}

    @cached_property
    def _options(self) -> dict[str, object]:
        options = self.plan.get("options", {})
        return {key.rpartition(".")[2]: options[key] for key in reversed(options)}  # the core's own come first and win


def newest(folder: str | os.PathLike[str] = "runs") -> Path:
    """The run that was written to last, of those in a folder.

    Raises:
        RunDirectoryError: no run in the folder.
    """
    runs = [(events.stat().st_mtime, events.parent) for events in Path(folder).glob("*/events.jsonl")]
    if not runs:
        raise RunDirectoryError("no run in this folder", code="no-run-in-folder", who=f"{folder}/",
                                fix="name the run's folder (--run-dir): miles doctor RUN")
    return max(runs)[1]


def shown(values: Sequence[float]) -> str:
    """Numbers for a sentence: "0.42, 0.1, 0"."""
    return ", ".join(f"{value:.3g}" for value in values)


def _line_number(path: Path, offset: int) -> int:
    with open(path, "rb") as file:
        count, left = 1, offset
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count


def _events(path: Path) -> tuple[list[dict], str | None]:
    """Events with their line numbers, and what was wrong with the file."""
    if not path.is_file():
        return [], None
    events, damage = [], None
    try:
        surviving = read(path)
        wanted = next(surviving, None)
        for number, event in enumerate(read(path, everything=True), 1):
            if event == wanted:  # events of superseded rollouts are passed over
                events.append({**event, "line": number})
                wanted = next(surviving, None)
    except RunDirectoryError as error:
        events, damage = list(_whole(path)), str(error)
    return events, damage


def _whole(path: Path) -> Iterator[dict]:
    """The events of a damaged file, whatever lineage they are of."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            with contextlib.suppress(RunDirectoryError):
                yield {**parsed(line, number, path), "line": number}
