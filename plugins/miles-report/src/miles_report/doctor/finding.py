"""What a rule is and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from miles_report.doctor.record import Record

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first. A note is worth knowing and may well be intended."""

Side = Literal["rollout", "training", "both", "neither"]
"""Where to look; "neither" is the process or the machine under both."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Args:
        seen: what the record says, with its numbers.
        why: why that matters.
        fix: what to do, with the flag to write.
        where: file and line in the run directory, "events.jsonl:12".
        side: where to look, if that is another side than the rule's.
        rule: name of the rule; `examine` puts it in.
    """

    severity: Severity
    seen: str
    why: str
    fix: str
    where: str | None = None
    rollout_id: int | None = None
    side: Side | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One symptom.

    Args:
        symptom: in a few words, for the table in docs/debugging.md.
        check: looks at a run; says nothing about one that lacks its data.
        causes: rules whose findings follow from an error of this one, and are no worse than a warning then.
    """

    name: str
    side: Side
    symptom: str
    check: Callable[[Record], Iterable[Finding]]
    causes: tuple[str, ...] = ()
