"""Configuration: run file, flags and plugin options become one frozen RunConfig that knows who set what."""

from miles_core.config.options import Origin, option
from miles_core.config.tables import RunConfig

__all__ = ["Origin", "RunConfig", "option"]
