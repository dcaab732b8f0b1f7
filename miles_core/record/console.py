"""The live view of a run: a panel on a terminal, one plain line per event anywhere else.

Plain lines are stable, so that scripts may grep them:

    rollout 12/60  reward 0.431  len 6.8  loss 0.0123  grad 0.61  rollout 0.35s train 0.60s sync 0.01s  eta 0:00:41
    eval arith  rollout 12  arith 0.500  arith-truncated_ratio 0.000
    Saved checkpoint to runs/demo/checkpoints (0.42s)

"rollout 12/60" counts from 1: so many are done. Whatever goes wrong in here, a closed pipe or a terminal that goes
away, ends the view and never the run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

import rich.console
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles_core.errors import clean
from miles_core.record.events import STAGES, stage_seconds

HEADLINE = {
    "reward": ("rollout/raw_reward",),
    "len": ("rollout/response_len/mean",),
    "loss": ("train/loss",),
    "grad": ("train/grad_norm",),
    "kl": ("train/kl_loss", "train/ppo_kl"),
    "clipfrac": ("train/pg_clipfrac",),
}
"""What a line and the panel show -> the metrics that it may be, the first one there wins."""

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"rollout": "cyan", "score": "blue", "train": "magenta", "sync": "yellow", "eval": "green", "save": "white"}
_LEVELS = {"warning": "yellow", "error": "bold red"}


def _guarded(method: Callable) -> Callable:
    """A view may fail; it then falls silent, and the run goes on."""

    @functools.wraps(method)
    def call(self: Console, *args: object, **kwargs: object) -> None:
        if self._broken:
            return
        try:
            with self._mutex:
                method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001  whatever it is, it is not the run's business
            self._give_up()

    return call


class Console:
    """What a person sees of a run.

    Args:
        live: True for the panel, False for plain lines; None decides: a panel on a terminal that can, outside of CI.
        stream: where plain lines go; standard output when None.
        details: also what only a log should have, such as each weight sync.
    """

    def __init__(self, live: bool | None = None, stream: TextIO | None = None, *, details: bool = False):
        self._details = details
        self._stream = sys.stdout if stream is None else stream
        capable = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
        self._wanted = capable if live is None else live
        self._live: Live | None = None
        # Re-entrant, since rich draws the panel while a method that prints above it holds the lock.
        self._mutex, self._broken = threading.RLock(), False
        self._title, self._stage = "run", "starting"
        self._done, self._total = 0, 0
        self._over = False
        self._began = self._stage_began = time.monotonic()
        self._ends: deque[float] = deque(maxlen=21)
        self._history: deque[float] = deque(maxlen=400)
        self._latest: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._evals: dict[str, tuple[int, float, float]] = {}

    @_guarded
    def start(self, summary: Mapping[str, object], total: int, first: int = 0) -> None:
        """The run begins.

        Args:
            summary: what to say about it, in order; the entry "run" is its title.
            total: rollouts in all.
            first: the rollout it begins with; above 0 after a resume.
        """
        fields = {key: clean(str(value)) for key, value in summary.items() if key != "run"}
        self._title = clean(str(summary["run"]))
        self._total, self._done = total, first
        self._began = self._stage_began = time.monotonic()
        self._ends.append(self._began)
        if self._wanted:
            self._open_panel(fields)
        else:
            self._print(f"run {self._title}" + "".join(f"  {key} {value}" for key, value in fields.items()))

    @_guarded
    def stage(self, name: str) -> None:
        """What is being done now: rollout, train, sync, eval or save. No line of its own."""
        self._stage, self._stage_began = name, time.monotonic()
        self._refresh()

    @_guarded
    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """A rollout is done; `metrics` by Miles's names."""
        self._done = rollout_id + 1
        self._ends.append(time.monotonic())
        self._latest = {label: metrics[name] for label, names in HEADLINE.items()
                        if (name := next((n for n in names if metrics.get(n) is not None), None))}
        self._seconds = stage_seconds(metrics)
        if math.isfinite(self._latest.get("reward", math.nan)):
            self._history.append(self._latest["reward"])
        if self._live is None:
            self._print(self._plain_rollout())
        self._refresh()

    @_guarded
    def evaluation(self, name: str, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of dataset `name` is done."""
        short = {key.removeprefix("eval/"): value for key, value in metrics.items() if value is not None}
        score = short.get(name, next(iter(short.values()), math.nan))
        first = self._evals[name][2] if name in self._evals else score
        self._evals[name] = (rollout_id, score, first)
        if self._live is None:
            scores = "".join(f"  {key} {value:.3f}" for key, value in short.items())
            self._print(clean(f"eval {name}  rollout {rollout_id}{scores}"))
        self._refresh()

    @_guarded
    def message(self, level: str, text: str) -> None:
        """Say something: level "detail", "info", "warning" or "error"."""
        if level == "detail" and not self._details:
            return
        text = clean(text) if level in ("detail", "info") else f"{level}: {clean(text)}"
        if self._live is None:
            self._print(text)
        else:
            self._live.console.print(Text(text, style=_LEVELS.get(level, "")))

    @_guarded
    def stop(self, status: str) -> None:
        """The run is over: "completed", "failed" or "interrupted". The last panel stays on the screen."""
        if self._over:
            return
        self._stage, self._over = status, True
        if not self._ends:  # never started: the error that follows says all
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            elapsed = _clock(time.monotonic() - self._began)
            self._print(f"run {self._title} {status}  {self._done}/{self._total} rollouts  {elapsed}")

    def _plain_rollout(self) -> str:
        parts = [f"rollout {self._done}/{self._total}"]
        parts += [f"{label} {_number(label, value)}" for label, value in self._latest.items()]
        if self._seconds:
            parts.append(" ".join(f"{stage} {seconds:.2f}s" for stage, seconds in self._seconds.items()))
        if (eta := self._eta()) is not None:
            parts.append(f"eta {_clock(eta)}")
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        print(line.encode(self._stream.encoding or "utf-8", "replace").decode(self._stream.encoding or "utf-8"),
              file=self._stream, flush=True)

    def _eta(self) -> float | None:
        """Seconds left, from the pace of the last rollouts."""
        if len(self._ends) < 2:
            return None
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * max(0, self._total - self._done)

    def _open_panel(self, summary: Mapping[str, str]) -> None:
        terminal = rich.console.Console(file=self._stream, force_terminal=True)
        fields = [Text.assemble((f"{key} ", "dim"), value) for key, value in summary.items()]
        terminal.print(Columns(fields, padding=(0, 3)))  # the title is the panel's
        self._live = Live(get_renderable=self._drawn, console=terminal, refresh_per_second=4,
                          vertical_overflow="visible")
        self._live.start()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _drawn(self) -> RenderableType:
        """The panel of now; rich's own thread asks for it, where an error would print a traceback."""
        try:
            return Group(self._panel(), "")  # the cursor is below it, where a terminal's ^C breaks no border
        except Exception as error:  # noqa: BLE001  see above
            return f"(the view failed: {type(error).__name__})"

    def _panel(self) -> RenderableType:
        rows = [self._progress(), self._numbers(), self._stages()]
        if self._evals:
            rows.append(self._evaluations())
        colour = {"completed": "green", "failed": "red"}.get(self._stage, "bright_black")
        return Panel(Group(*rows), title=Text(f" {self._title} ", "bold"), title_align="left", border_style=colour)

    def _progress(self) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        now = time.monotonic()
        doing = Text.assemble((f"{self._stage} ", _COLOURS.get(self._stage, "bold")),
                              ("" if self._over else f"{now - self._stage_began:.0f}s", "dim"))
        bar = ProgressBar(total=self._total, completed=self._done)
        eta = self._eta()
        right = f"{self._done}/{self._total}  {_clock(now - self._began)}"
        right += f"  eta {_clock(eta)}" if eta and not self._over else ""
        table.add_row(doing, bar, right)
        return table

    def _numbers(self) -> RenderableType:
        if not self._latest:
            return Text("no rollout is done yet", "dim")
        items = {label: Text.assemble((f"{label} ", "dim"), (_number(label, value), "bold"))
                 for label, value in self._latest.items()}
        if "reward" in items:
            items["reward"].stylize("green", len("reward "))
            items["reward"].append(f" {sparkline(self._history, 16)}" if self._unicode() else "", "green")
        return Columns(items.values(), padding=(0, 3))

    def _stages(self) -> RenderableType:
        """One bar whose parts are the last rollout's stages, and the seconds below it."""
        total = sum(self._seconds.values())
        if not total:
            return Text("")
        bar, legend = Text(no_wrap=True, overflow="crop"), Text(no_wrap=True, overflow="ellipsis")
        width = min(60, self._live.console.width - 6) if self._live is not None else 60
        block = "━" if self._unicode() else "="
        for stage in STAGES:
            if seconds := self._seconds.get(stage):
                bar.append(block * max(1, round(width * seconds / total)), _COLOURS[stage])
                legend.append(f"{stage} ", _COLOURS[stage]).append(f"{seconds:.2f}s   ", "dim")
        return Group(bar, legend)

    def _evaluations(self) -> RenderableType:
        return Columns([Text.assemble((f"eval {clean(name)} ", "dim"), (f"{score:.3f}", "bold green"),
                                      (f" (first {first:.3f}, now at rollout {rollout_id})", "dim"))
                        for name, (rollout_id, score, first) in self._evals.items()], padding=(0, 3))

    def _unicode(self) -> bool:
        return self._live is None or self._live.console.encoding.startswith("utf")

    def _give_up(self) -> None:
        """Take the panel down if that still works, and show nothing from here on."""
        self._broken = True
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()


def sparkline(values: object, width: int) -> str:
    """The last values as bars, averaged into `width` buckets when there are more."""
    values = list(values)
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(values, default=0), max(values, default=0)
    span = (high - low) or 1
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1) + 0.5)] for value in values)


def _number(label: str, value: float) -> str:
    form = {"reward": "{:.3f}", "len": "{:.1f}", "grad": "{:.2f}"}.get(label, "{:.4f}")
    return form.format(value) if value == 0 or abs(value) >= 1e-4 or label in ("reward", "len") else f"{value:.1e}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
