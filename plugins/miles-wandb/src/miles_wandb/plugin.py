"""The plugin: options, hooks, and the run at Weights & Biases. The library is imported when the run begins."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from miles_report.tracker import COLUMNS, Outbox, Row, Start, without_password

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample

ADDRESS = "https://api.wandb.ai"


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """Where a run is to be seen, and what of its answers."""

    use_wandb: bool = option(
        True, "Send to Weights & Biases; --no-use-wandb keeps the plugin named but idle.", flags=("--use-wandb",),
        off=("--no-use-wandb",),
    )
    project: str = option("miles", "Project.", flags=("--wandb-project",))
    entity: str | None = option(None, "User or team; default: the key's own.", flags=("--wandb-team", "--wandb-entity"))
    group: str | None = option(None, "Group of runs.", flags=("--wandb-group",))
    name: str | None = option(None, "Name of the run; default: the run file's.", flags=("--wandb-exp-name",))
    tags: list[str] = option([], "Tags of the run.", flags=("--wandb-tags",))
    run_id: str | None = option(
        None, "Id of the run; default: the run directory's, so that a resumed run goes on.", flags=("--wandb-run-id",)
    )
    mode: Literal["online", "offline", "disabled"] | None = option(
        None, "Default: online with a key, offline without one.", flags=("--wandb-mode",)
    )
    host: str | None = option(None, "Address of a server of one's own.", flags=("--wandb-host",))
    folder: str | None = option(
        None, "Where the library keeps its files; default: wandb in the run's folder.",
        flags=("--wandb-dir", "--wandb-save-dir"),
    )
    sample_rows: int = option(8, "Rows of a table of sampled answers; 0 for none.", within=(0,))
    sample_interval: int = option(10, "Rollouts between two tables; an evaluation always has one.", within=(1,))
    system: bool = option(True, "Figures of CPUs, GPUs, memory, disk and network.")


class Wandb:
    """Sends metrics, evaluations and sampled answers to Weights & Biases."""

    def __init__(self, options: WandbOptions):
        self.options = options
        self._outbox = Outbox(self, rows=options.sample_rows, every=options.sample_interval)
        self._run: Any = None
        self._families: set[str] = set()

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Says where the run will be found without a key."""
        without_password(self.options.host, "wandb.host", "give the key as WANDB_API_KEY")
        if self.options.use_wandb and self.options.mode in (None, "online") and not has_key(self.options.host):
            note("there is no key for Weights & Biases (WANDB_API_KEY, or `wandb login`): "
                 "the run is recorded offline, and `wandb sync` uploads it later")
        return config

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Opens the run, or goes on with it."""
        if self.options.use_wandb:
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
        """See Service. Steps of a killed start that come again are drawn again: the axes are the metrics' own."""
        import wandb

        options = self.options
        mode = options.mode or "online"
        mode = "offline" if mode == "online" and not has_key(options.host) else mode
        folder = Path(options.folder or start.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        address: dict[str, Any] = {"base_url": options.host} if options.host else {}
        settings = wandb.Settings(silent=True, console="off", disable_code=True, x_disable_stats=not options.system,
                                  init_timeout=30, finish_timeout=25, **address)
        self._run = wandb.init(
            project=options.project, entity=options.entity, group=options.group, name=options.name or start.name,
            tags=options.tags, id=options.run_id or start.run_id, mode=mode, dir=str(folder),
            resume="allow" if mode == "online" else None,
            config={**start.options, "plan_digest": start.plan.get("digest")}, allow_val_change=True,
            reinit="create_new", settings=settings)
        self._families.clear()
        return str(self._run.url if mode == "online" else folder / "wandb")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Service. FAMILY/NAME is drawn over FAMILY/step, the number of the rollout, a plugin's own as well."""
        self._run.log({**values, **self._axes(values, step)})

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """See Service."""
        import wandb

        def logged() -> None:
            table = wandb.Table(columns=[*COLUMNS], data=[[row[key] for key in COLUMNS] for row in rows],
                                allow_mixed_types=True)
            self._run.log({name: table, **self._axes([name], step)})

        try:
            logged()
        except FileNotFoundError as error:
            # The library writes tables through one folder in $TMPDIR. A process that was forked from this one removes
            # it when it ends, and so does what clears /tmp in a run of weeks.
            Path(error.filename).parent.mkdir(parents=True, exist_ok=True)
            logged()

    def _axes(self, names: Iterable[str], step: int) -> dict[str, int]:
        families = {name.partition("/")[0] for name in names}
        for family in sorted(families - self._families):
            self._run.define_metric(f"{family}/step", hidden=True)
            self._run.define_metric(f"{family}/*", step_metric=f"{family}/step")
        self._families |= families
        return {f"{family}/step": step for family in families}

    def close(self, status: str) -> None:
        """See Service."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)


def has_key(host: str | None) -> bool:
    """Whether the library will find a key by itself: in the environment, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    address = urlsplit(host or os.environ.get("WANDB_BASE_URL") or ADDRESS).hostname or ""
    try:
        return netrc.netrc(path).authenticators(address) is not None
    except (OSError, netrc.NetrcParseError):
        return False
