"""Miles: reinforcement-learning post-training for large language models, a small core with plugins around it."""

import importlib

from miles_core.config.options import option
from miles_core.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["events", "hookimpl", "option", "plan", "train"]
_LAZY = {"plan": ("plugins.plan", "prepare"), "train": ("execute", "execute"), "events": ("record.events", "read")}


def __getattr__(name: str) -> object:
    """What plans, carries out and reads runs (docs/python-api.md), imported when asked for: plugins want none of it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
