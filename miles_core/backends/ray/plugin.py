"""Ray as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Ray:
    """Puts trainer ranks and engine servers into actors of a Ray cluster."""

    @hookimpl("placement", name="ray")
    def cluster(self, config):
        """Actors of a Ray cluster, or of a Ray of our own on this machine."""
        from miles_core.backends.ray.placement import RayPlacement

        return RayPlacement(config)
