"""The plugin: the placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles_core.config import RunConfig
    from miles_ray.placement import RayPlacement


class Ray:
    """Puts trainer ranks and engine servers into actors of a Ray cluster."""

    default = True

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
        from miles_ray.placement import RayPlacement

        return RayPlacement(config)
