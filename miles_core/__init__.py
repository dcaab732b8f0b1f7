"""Miles: reinforcement-learning post-training for large language models, a small core with plugins around it."""

from miles_core.config.options import option
from miles_core.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["hookimpl", "option"]
