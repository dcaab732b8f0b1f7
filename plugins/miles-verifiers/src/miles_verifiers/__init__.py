"""Plugin verifiers: environments of the library verifiers as prompts, rollouts and rewards.

verifiers finds the harness `miles-verifiers` here. It is imported when it is asked for, as a plan reads this package.
"""

from __future__ import annotations

__all__ = ["InProcess"]


def __getattr__(name: str) -> object:
    if name != "InProcess":
        raise AttributeError(name)
    from miles_verifiers.harness import InProcess

    return InProcess
