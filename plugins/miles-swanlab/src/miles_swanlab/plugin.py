"""The plugin: options, hooks, and the run at SwanLab. The library is imported when the run begins."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miles_report.tracker import COLUMNS, Outbox, Row, Start, without_password

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample

STATE = (("completed", "success"), ("failed", "crashed"))
"""Ends of a run -> SwanLab's; all others are aborted."""


@dataclass(frozen=True, kw_only=True)
class SwanlabOptions:
    """Where a run is to be seen, and what of its answers."""

    project: str = option("miles", "Project.")
    workspace: str | None = option(None, "User or organization; default: the key's own.")
    group: str | None = option(None, "Group of runs.")
    name: str | None = option(None, "Name of the run; default: the run file's.")
    tags: list[str] = option([], "Tags of the run.")
    mode: Literal["online", "local", "offline", "disabled"] | None = option(
        None, "Default: online with a key, offline without one."
    )
    host: str | None = option(None, "Address of a server of one's own.")
    folder: str | None = option(None, "Where the library keeps its files; default: swanlog in the run's folder.")
    sample_rows: int = option(8, "Rows of a table of sampled answers; 0 for none.", within=(0,))
    sample_interval: int = option(10, "Rollouts between two tables; an evaluation always has one.", within=(1,))
    system: bool = option(True, "Figures of CPUs, GPUs, memory, disk and network.")


class Swanlab:
    """Sends metrics, evaluations and sampled answers to SwanLab."""

    def __init__(self, options: SwanlabOptions):
        self.options = options
        self._outbox = Outbox(self, rows=options.sample_rows, every=options.sample_interval)
        self._run: Any = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Says where the run will be found without a key."""
        without_password(self.options.host, "swanlab.host", "give the key as SWANLAB_API_KEY")
        if self.options.mode in (None, "online") and not has_key():
            note("there is no key for SwanLab (SWANLAB_API_KEY, or `swanlab login`): "
                 "the run is recorded offline, and `swanlab sync` uploads it later")
        return config

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Opens the run, or goes on with it."""
        self._outbox.begin(plan, run_id, resumed_from, run_dir)

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float]) -> None:
        """A point each."""
        self._outbox.metrics(rollout_id, values)

    @hookimpl
    def samples(self, rollout_id: int, dataset: str | None, samples: Sequence[Sample]) -> None:
        """A table, when one is due."""
        self._outbox.samples(rollout_id, dataset, samples)

    @hookimpl
    def finish(self, status: str) -> None:
        """Waits until all is sent, within bounds."""
        self._outbox.finish(status)

    def open(self, start: Start) -> str | None:
        """See Service."""
        import swanlab

        options = self.options
        mode = options.mode or "online"
        mode = "offline" if mode == "online" and not has_key() else mode
        if mode == "online":
            swanlab.login(host=options.host, save=False)
        folder = Path(options.folder or start.run_dir / "swanlog")
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"},
                                    probe={"monitor": options.system, "runtime": False})
        self._run = swanlab.init(
            project=options.project, workspace=options.workspace, group=options.group, name=options.name or start.name,
            tags=options.tags, id=start.run_id, resume="allow", mode=mode, log_dir=str(folder), reinit=True,
            config={**start.options, "plan_digest": start.plan.get("digest")}, settings=settings)
        return str(self._run.url if mode == "online" else folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Service."""
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """See Service."""
        import swanlab

        cells = [[str(row[key]) for key in COLUMNS] for row in rows]
        self._run.log({name: swanlab.echarts.Table().add([*COLUMNS], cells)}, step=step)

    def close(self, status: str) -> None:
        """See Service."""
        self._run.finish(dict(STATE).get(status, "aborted"))


def has_key() -> bool:
    """Whether the library will find a key by itself: in the environment, or where `swanlab login` puts it."""
    if os.environ.get("SWANLAB_API_KEY"):
        return True
    homes = Path(".swanlab"), Path(os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab")
    for home in homes:
        try:
            if netrc.netrc(home / ".netrc").hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
