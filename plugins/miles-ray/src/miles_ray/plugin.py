"""The plugin: the placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_ray.placement import RayPlacement


class Ray:
    """Puts trainer ranks and engine servers into actors of a Ray cluster."""

    default = True

    @hookimpl("placement", name="ray")
    def cluster(self, config: RunConfig) -> RayPlacement:
        """Actors of a Ray cluster, or of a Ray of our own on this machine."""
        from miles_ray.placement import RayPlacement

        return RayPlacement(config)
