"""The plugin: options and hooks. What is kept is in policy.py, what is removed and how in folder.py."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.plugins.select import Selected
    from miles_retention.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RetentionOptions:
    """Which checkpoints are kept; one that any of these keeps is kept, and the newest always is."""

    keep_last: int | None = option(None, "How many of the newest; default: 1 where anything else is said.", within=(1,))
    keep_best: int | None = option(None, "How many of the best by keep_metric.", within=(1,))
    keep_metric: str | None = option(None, "Metric of keep_best: eval/NAME, or one of a rollout.")
    keep_mode: Literal["max", "min"] = option("max", "Whether the best is the largest or the smallest.")
    save_retain_interval: int | None = option(
        None, "One in so many rollouts is kept for good.", flags=("--save-retain-interval",), within=(1,)
    )


class Retention:
    """Removes checkpoints but for the last, the best and one in so many."""

    def __init__(self, options: RetentionOptions, config: RunConfig):
        from miles_retention.policy import Rules

        self._rules, self._save = Rules(**dataclasses.asdict(options)), config.checkpoint.save
        self._sentinel = config.checkpoint.save_trigger_sentinel
        if (options.keep_best is None) != (options.keep_metric is None):
            raise ConfigError("keep_best and keep_metric belong together", who="retention.keep_metric",
                              got=f"keep_best {options.keep_best}, keep_metric {options.keep_metric}",
                              fix="write both, such as keep_best = 3 and keep_metric = \"eval/sums\"",
                              code="keep-metric-missing")
        self._policy: Policy | None = None
        self._seen: int | None = None
        self._handler: Any = None
        self._removing: threading.Thread | None = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """See policy.check."""
        from miles_retention.policy import check

        check(self._rules, config, note)
        return config

    @hookimpl
    def plan_lines(self, config: RunConfig, plugins: Sequence[Selected]) -> Iterable[tuple[str, str]]:
        """How much disk checkpoints take at most."""
        from miles_retention.policy import bound

        return [("checkpoints", bound(self._rules, config, plugins))] if config.checkpoint.save else []

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Reads what earlier starts measured. From now on SIGUSR1 makes the file of --save-trigger-sentinel."""
        from miles_retention.policy import Policy

        if self._save is None or self._policy is not None:
            return
        self._policy = Policy(self._rules, Path(run_dir))
        if (sentinel := self._sentinel) and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGUSR1, lambda *_: Path(sentinel).touch())

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float]) -> None:
        """Notes the metric, and looks whether a checkpoint has come."""
        if self._policy is not None:
            self._policy.measured(rollout_id, values)
            self._look()

    @hookimpl
    def finish(self, status: str) -> None:
        """Looks once more, and waits for what is being removed."""
        for _ in range(2):  # what is under way, then what the last checkpoint leaves
            if self._removing is not None:
                self._removing.join(60)
            if self._policy is not None:
                self._look()
        self._policy = None
        if self._handler is not None:
            signal.signal(signal.SIGUSR1, self._handler)
            self._handler = None

    def _look(self) -> None:
        """Remove in a thread what is not kept, when there is a checkpoint that was not there before."""
        from miles_retention.folder import newest, remove, saved

        folder = Path(self._save or "")
        latest = newest(folder)
        if latest is None or latest == self._seen or self._policy is None:
            return
        if self._removing is not None and self._removing.is_alive():  # the next call looks again
            return
        self._seen = latest
        present = [one for one in saved(folder) if one <= latest]
        if gone := sorted(set(present) - self._policy.kept(present)):
            self._removing = threading.Thread(target=remove, args=(folder, gone), name="retention", daemon=True)
            self._removing.start()
