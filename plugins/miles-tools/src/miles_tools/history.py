"""Does a chat template only append to a conversation, or does it rewrite earlier turns once there are later ones?

The ids of a conversation of several turns are appended to and stay as they are. A template that drops the reasoning of
earlier turns shows the model another history when it is used than when it was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.errors import DataError

DRAWN = "miles-stands-for-the-drawn-turn"
ANSWER = "miles-stands-for-the-answer-of-a-tool"
CALL = '<tool_call>\n{"name": "find", "arguments": {"number": 1}}\n</tool_call>'
THOUGHT = "<think>\nI had better look.\n</think>\n\n"

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def check_history(render: Render, role: str, who: str, *, allowed: bool, allow: str) -> None:
    """
    Args:
        render: messages -> what the template makes of them, with the opening of an answer.
        role: of the messages that hold a tool's answer.
        who: the template, for messages.
        allowed: a template that rewrites may be used; `allow` is the flag that says so.

    Raises:
        DataError: it leaves such messages out, or rewrites; names what.
    """
    answer = {"role": role, "name": "find", "content": ANSWER, "tool_call_id": "0"}
    if ANSWER not in after_a_turn(render, [answer], DRAWN):
        raise DataError(f"it leaves out messages of the role {role!r}", code="template-drops-role", who=who,
                        fix="pass a template that writes them with --chat-template-path, or give them another role")
    for name, turn in () if allowed else (("the reasoning", THOUGHT + CALL), ("the opening", CALL)):
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": "Find 1."}]
        shown = render(messages)
        for _ in range(2):
            expected = shown + _after_opening(shown, turn)
            messages += [{"role": "assistant", "content": turn}, answer]
            shown = render(messages)
            if not shown.startswith(expected):
                at = next((i for i, (a, b) in enumerate(zip(shown, expected)) if a != b), len(shown))
                raise DataError(
                    f"it rewrites {name} of earlier turns", code="template-rewrites-history", who=who,
                    got=f"{shown[max(at - 20, 0):at + 30]!r} in place of {expected[max(at - 20, 0):at + 30]!r}",
                    fix="pass a template that only appends with --chat-template-path (`miles check-template` shows "
                    f"where it does not), or train on the history as it was with {allow}")


def after_a_turn(render: Render, messages: Sequence[Mapping[str, Any]], turn: str) -> str:
    """What the template writes after an assistant's turn, up to the opening of the next one."""
    return render([{"role": "user", "content": "."}, {"role": "assistant", "content": turn}, *messages]
                  ).rpartition(turn)[2]


def _after_opening(shown: str, turn: str) -> str:
    """What is left to draw of a turn whose opening the template has written already."""
    opened = next((start for start in ("<think>\n", "<think>") if shown.endswith(start) and turn.startswith(start)), "")
    return turn.removeprefix(opened)
