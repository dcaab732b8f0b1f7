"""The plugin: the placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from miles_ray.placement import RayPlacement


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Nodes to leave out, and the Ray that a run starts of its own; a cluster that is there has its own dashboard."""

    exclude: list[str] = option([], "Addresses of nodes that are left out; `miles check-nodes` says which.")
    check_nodes: bool = option(
        False, "Before training every node is measured as by `miles check-nodes`, and bad ones are left out."
    )
    dashboard: bool = option(False, "Ray's dashboard runs beside the run: pip install 'ray[default]'.")
    dashboard_host: str = option(
        "127.0.0.1", "Address that the dashboard listens on; it asks for Ray's token or for nothing."
    )
    dashboard_port: int = option(8265, "Port of the dashboard; the next free one if it is taken.")


class Ray:
    """Puts trainer ranks and engine servers into actors of a Ray cluster."""

    default = True

    def __init__(self, options: RayOptions, config: RunConfig):
        self.options = options
        if not 0 < options.dashboard_port < 65536:
            raise ConfigError("a port is a number from 1 to 65535", got=options.dashboard_port,
                              who="--ray.dashboard-port", fix="leave it out for 8265", code="port-out-of-range")

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Ranks on several nodes are actors of Ray, unless the run says who places them."""
        from miles_core.config.load import with_values

        if config.perf.actor_num_nodes < 2 or "perf.placement" in config.origin:
            return config
        note(f"--actor-num-nodes {config.perf.actor_num_nodes}: ranks on several nodes are Ray actors, so --placement "
             "ray is implied")
        return with_values(config, "number of nodes", perf__placement="ray")

    @hookimpl("placement", name="ray")
    def cluster(self, config: RunConfig) -> RayPlacement:
        """Actors of a Ray cluster, or of a Ray of our own on this machine."""
        from miles_ray.cluster import Dashboard
        from miles_ray.placement import RayPlacement

        options = self.options
        wanted = Dashboard(options.dashboard_host, options.dashboard_port) if options.dashboard else None
        return RayPlacement(config, wanted, exclude=options.exclude, check_nodes=options.check_nodes)

    @hookimpl("commands", name="check-nodes")
    def check(self) -> click.Command:
        """Measure the GPUs of a cluster and the ways between them; say which nodes to leave out."""
        from miles_ray.commands.check_nodes import command

        return command
