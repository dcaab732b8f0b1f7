"""The tree of errors. Each says what is wrong, what was got, who is concerned and what to do, and has a code.

Exit codes are those of errors before the first rollout; once it has begun, every error is exit code 1.

    MilesError                     exit code 1
    ├── ConfigError                exit code 2: a key, a value or a relation between values
    │   ├── UnknownKeyError            an unknown key or flag
    │   └── BatchError                 batch sizes or a layout that do not divide
    ├── PluginError                exit code 2
    │   ├── UnknownPluginError         not installed, not found, or misspelt
    │   ├── ManifestError              a manifest that cannot be read or disagrees with the code
    │   ├── HookError                  a hook implementation that breaks its specification
    │   ├── OwnerError                 two owners of one name, or a name without one
    │   ├── LockError                  the run is made of something else than its lock says
    │   ├── StateError                 a plugin's saved state that this run cannot go on with
    │   └── SharedStateError           state that two roles of one plugin can both reach
    ├── DataError                  exit code 2: dataset, tokenizer, template
    │   └── ColumnError                data that does not fit the column it was declared as
    ├── CheckpointError            exit code 2: missing, half-written or unsuitable
    ├── RunDirectoryError          exit code 2: in use, unwritable, or from another run
    ├── SyncError                  exit code 1: weights did not reach an engine whole; it does not serve them
    ├── RolloutError               exit code 1
    │   ├── EngineError                the engine failed, or answered with what cannot be trained on
    │   │   └── EngineDiedError            a server that ended more often than it may be started anew
    │   ├── RewardError                a scorer raised, hung, or gave no finite number
    │   └── StarvedError               filters leave too few groups to fill a batch
    ├── TrainError                 exit code 1
    │   ├── NonFiniteError             a loss or gradient that must not reach the optimizer
    │   ├── OutOfMemoryError           the trainer's device has too little memory; says in which phase
    │   └── DiedError                  a process of the trainer ended on its own
    └── WaitError                  exit code 1: a bounded wait expired; names the culprit
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """A fix for a word that nobody knows: the known one that it resembles most; None where none is close."""
    near = difflib.get_close_matches(word, known, 1, cutoff)
    return f"did you mean {near[0]!r}?" if near else None


def clean(text: str) -> str:
    """Without control characters: what a model or somebody's file says must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


class MilesError(Exception):
    """Base of every error that Miles raises on purpose.

    Args:
        what: one sentence without a full stop that says what is wrong.
        code: its stable name in kebab-case, such as "lr-out-of-range"; docs/errors.md lists those of Miles.
        got: the offending value, shown after "got".
        who: the file, plugin, flag or process concerned.
        fix: what to write or do instead.
    """

    exit_code = 1

    def __init__(self, what: str, *, code: str | None = None, got: object = None, who: str | None = None,
                 fix: str | None = None):
        self.what, self.code, self.got, self.who, self.fix = what, code, got, who, fix
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what if self.who is None else f"{self.who}: {self.what}"]
        if self.got is not None:
            parts[0] += f" (got {self.got})"
        if self.fix is not None:
            parts.append(f"Fix: {self.fix}")
        text = " ".join(part if part.endswith(("?", "!")) else part.rstrip(".") + "." for part in parts)
        return text if self.code is None else f"{text} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what,), self.__dict__  # across processes, with what is keyword-only and the notes


class ConfigError(MilesError, ValueError):
    exit_code = 2


class UnknownKeyError(ConfigError):
    pass


class BatchError(ConfigError):
    pass


class PluginError(MilesError):
    exit_code = 2


class UnknownPluginError(PluginError):
    pass


class ManifestError(PluginError):
    pass


class HookError(PluginError):
    pass


class OwnerError(PluginError):
    pass


class LockError(PluginError):
    pass


class StateError(PluginError):
    pass


class SharedStateError(PluginError):
    pass


class DataError(MilesError, ValueError):
    exit_code = 2


class ColumnError(DataError):
    pass


class CheckpointError(MilesError):
    exit_code = 2


class RunDirectoryError(MilesError):
    exit_code = 2


class SyncError(MilesError):
    """See the tree above."""


class RolloutError(MilesError):
    pass


class EngineError(RolloutError):
    pass


class EngineDiedError(EngineError):
    pass


class RewardError(RolloutError):
    pass


class StarvedError(RolloutError):
    pass


class TrainError(MilesError):
    pass


class OutOfMemoryError(TrainError):
    pass


class NonFiniteError(TrainError):
    pass


class DiedError(TrainError):
    pass


class WaitError(MilesError, TimeoutError):
    pass
