"""Configuration: run file, flags and plugin options become one frozen RunConfig that knows who set what."""

from typing import TYPE_CHECKING

from miles_core.config.options import Origin, option

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig

__all__ = ["Origin", "RunConfig", "option"]


def __getattr__(name: str) -> object:
    """RunConfig, whose tables cost a tenth of what --help takes."""
    if name != "RunConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_core.config.tables import RunConfig

    return RunConfig
