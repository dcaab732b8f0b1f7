"""Names of environments and tasksets, read without importing verifiers: a plan does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from miles_core.reading import sliced


def environment_of(path: str) -> str:
    """The name of the environment whose tasks a path means: words, of words.verifiers@[0:64]."""
    return sliced(path)[0].removesuffix(".verifiers")


def is_installed(taskset: str) -> bool:
    """Whether verifiers would find a module for the id of a taskset, OWNER/NAME@VERSION or NAME."""
    module = taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    library = find_spec("verifiers")
    own = library is not None and Path(str(library.origin)).parent.joinpath("v1", "tasksets", module).is_dir()
    return own or module.isidentifier() and find_spec(module) is not None
