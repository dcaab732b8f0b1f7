"""What every tracker of a service needs beside its library: a bounded queue, and a thread that sends.

    class Board:
        def __init__(self, options: BoardOptions):
            self.options, self.outbox = options, Outbox(self, rows=8, every=10)

        @hookimpl
        def begin(self, plan, run_id, resumed_from, run_dir):
            self.outbox.begin(plan, run_id, resumed_from, run_dir)

        ...  # metrics, samples and finish hand on their arguments in the same way

        def open(self, start): ...           # these four are called by the outbox's thread, in order
        def log(self, step, values): ...
        def table(self, step, name, rows): ...
        def close(self, status): ...

The run hands over and goes on, whatever the service does. What could not be sent is told when the next hook is called:
as a warning, or as the run's end with --strict-trackers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from miles_core.errors import ConfigError
from miles_core.types import Sample
from miles_report.doctor.redact import Redactor

logger = logging.getLogger(__name__)

ROOM = 1000
"""Entries that wait at most; a rollout is two."""

RETRY = 30.0
"""Seconds between two attempts to open a run."""

COLUMNS = ("step", "prompt", "answer", "reward", "label", "status", "tokens")
"""What a row of a table of samples holds."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a run.

    Args:
        name: the run file's name.
        run_id: the same in every start in one run directory: a service's run that has it goes on.
        first: the first step to come; what the service has from there on is made again.
        options: dotted key -> value, secrets taken out.
        plan: the plan whole, likewise.
        run_dir: where a service without a server of its own may write.
    """

    name: str
    run_id: str
    first: int
    options: dict[str, Any]
    plan: dict[str, Any]
    run_dir: Path


class Service(Protocol):
    """What an author writes around a library. Every call comes from the outbox's thread, and may raise or hang."""

    def open(self, start: Start) -> str | None:
        """Begin or resume the service's run; returns where to look at it, for the log. Called again after an error."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of a rollout or an evaluation."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Answers of a rollout ("rollout/samples") or an evaluation ("eval/DATASET/samples"); keys are COLUMNS."""

    def close(self, status: str) -> None:
        """The run ends "completed", "failed", "interrupted" or "restarting"; what is under way is sent."""


class SendError(Exception):
    """Something did not reach a service."""


class Outbox:
    """Between the hooks of a tracker, which return at once, and its service.

    Args:
        rows: samples of a table, spread over the rollout; 0 for no tables.
        every: rollouts between two tables; evaluations always have one.
        room: entries that wait at most; of more, the newest are dropped.
        patience: seconds that the end of a run waits for what is not sent yet.
    """

    def __init__(self, service: Service, *, rows: int = 8, every: int = 10, room: int = ROOM, patience: float = 30.0):
        self._service, self._rows, self._every, self._patience = service, rows, every, patience
        self._queue: queue.Queue[tuple[Callable[[], object], int] | None] = queue.Queue(room)
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._mutex = threading.Lock()
        self._lost, self._in_hand, self._reason = 0, 0, ""
        self._unsaid: str | None = None
        self._said: set[str] = set()

    def begin(self, plan: Mapping[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Start the thread, which opens the service's run; a second time does nothing."""
        if self._thread is not None:
            return
        whole = without_secrets(plan)
        start = Start(plan["name"], run_id, resumed_from or 0, whole["options"], whole, Path(run_dir))
        self._thread = threading.Thread(target=self._work, args=(start,), daemon=True, name="tracker")
        self._thread.start()

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Hand metrics over.

        Raises:
            SendError: something that was handed over before was not sent.
        """
        if taken := dict(values):
            self._hand_over(lambda: self._service.log(rollout_id, taken))

    def samples(self, rollout_id: int, dataset: str | None, samples: Sequence[Sample]) -> None:
        """Hand a table over, if one is due.

        Raises:
            SendError: as `metrics`.
        """
        if not (self._thread and self._rows and samples) or dataset is None and rollout_id % self._every:
            return
        name = "rollout/samples" if dataset is None else f"eval/{dataset}/samples"
        rows = rows_of(rollout_id, samples, self._rows)
        self._hand_over(lambda: self._service.table(rollout_id, name, rows))

    def finish(self, status: str) -> None:
        """Send what is left, within the patience that there is; an instance that never began has nothing to do.

        Raises:
            SendError: something was not sent, and is not by now.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._ending.set()
        until = time.monotonic() + self._patience
        with contextlib.suppress(queue.Full):
            for last in ((lambda: self._service.close(status), 0), None):
                self._queue.put(last, timeout=max(0.001, until - time.monotonic()))
        thread.join(max(0.0, until - time.monotonic()))
        with self._mutex:
            late = thread.is_alive()
            if late:
                self._lost += self._in_hand + sum(one[1] for one in list(self._queue.queue) if one is not None)
                self._reason = f"no answer within {self._patience:g} s"
            if self._lost or late:
                raise SendError(f"not sent: the end of the run and {self._lost} entries before it, which the run "
                                f"directory has ({self._reason})" if late else
                                f"not sent: {self._lost} entries, which the run directory has ({self._reason})")

    def _hand_over(self, call: Callable[[], object]) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait((call, 1))
        except queue.Full:
            self._failed("Full", f"{self._queue.maxsize} entries wait to be sent, and further ones are dropped", 1)
        with self._mutex:
            unsaid, self._unsaid = self._unsaid, None
        if unsaid is not None:
            raise SendError(unsaid)

    def _work(self, start: Start) -> None:
        """What the thread does: attempts to open, the last one when the run ends; then what is in the queue."""
        last = False
        while not (opened := self._try(lambda: self._open(start), 0)) and not last:
            last = self._ending.wait(RETRY)
        while (entry := self._queue.get()) is not None:
            call, weight = entry
            if opened:
                self._try(call, weight)
            elif weight:
                self._failed("", self._reason, weight)

    def _open(self, start: Start) -> None:
        if where := self._service.open(start):
            logger.info("%s: %s", type(self._service).__name__, where)

    def _try(self, call: Callable[[], object], weight: int) -> bool:
        self._in_hand = weight
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told of by the next hook
            self._failed(type(error).__name__, f"{type(error).__name__}: {error}", weight)
            return False
        finally:
            self._in_hand = 0
        return True

    def _failed(self, kind: str, reason: str, weight: int) -> None:
        """Each kind of failure is told once; how much was lost, at the end."""
        with self._mutex:
            self._lost, self._reason = self._lost + weight, reason
            if kind and kind not in self._said:
                self._said.add(kind)
                self._unsaid = reason


def rows_of(step: int, samples: Sequence[Sample], most: int) -> list[Row]:
    """At most so many samples, spread evenly, as rows of COLUMNS."""
    count = min(most, len(samples))
    chosen = [samples[index * len(samples) // count] for index in range(count)]
    return [dict(zip(COLUMNS, (step, one.prompt.text, one.text, one.reward, one.prompt.label, str(one.status),
                               one.response_length), strict=True)) for one in chosen]


def without_secrets(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as it may be seen by whoever sees the metrics."""
    redactor = Redactor()
    redactor.learn(plan["options"])
    return dict(redactor.value(plan))


def without_password(url: str | None, option: str, instead: str) -> None:
    """See that an address, which the plan shows and the run directory keeps, has no password in it.

    Raises:
        ConfigError: it has.
    """
    if url and urlsplit(url).password:
        raise ConfigError("an address with a password would be kept in the run directory", got="scheme://user:***@host",
                          who=option, fix=instead, code="address-holds-password")
