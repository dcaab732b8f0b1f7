"""Finding the answer in a response: boxes with balanced braces, found in one pass over the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_END_TOKEN = re.compile(r"(?:<[|｜][^<>|｜]{1,64}[|｜]>|</s>|<eos>|<end_of_turn>|<turn\|>|\[\|endofturn\|]|\[e~\[)\Z")
"""Of Qwen, DeepSeek and most others; Llama 2 and Mistral; Gemma; Gemma 4; EXAONE; MiniMax M2."""
_LONGEST = 68
_CLOSING = re.compile(r"(?:\\[\])]|[.$*\s])*")


@dataclass(frozen=True, slots=True)
class Box:
    """A well-formed box: text[start:end] is all of it, text[inside:end - 1] what stands in the braces."""

    start: int
    inside: int
    end: int


def boxes(text: str) -> list[Box]:
    """Every well-formed box, in the order in which they close; a box in a box closes before it.

    Escaped braces do not count. A box that is never closed does not count: the response ended before its answer did.
    """
    return _scan(text)[0]


def opens_box(text: str) -> bool:
    """Whether a box begins, closed or not."""
    return _scan(text)[1] >= 0


def _scan(text: str) -> tuple[list[Box], int]:
    """The well-formed boxes, and where the last one begins that is opened at all; -1 without any."""
    if "\\boxed" not in text:  # as in most texts of a model that has not learned it
        return [], -1
    boxed: list[Box] = []
    opened = -1
    open_braces: list[tuple[int, int] | None] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            open_braces.append(match.span())
            opened = match.start()
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                boxed.append(Box(*opening, match.end()))
    return boxed, opened


def boxed_answer(text: str) -> str | None:
    """What the last box holds; None without one, or where it is never closed. \\boxed{\\boxed{5}} holds 5."""
    boxed, opened = _scan(text)
    if not any(box.start == opened for box in boxed):
        return None
    start, stop = _stripped(text, boxed[-1])
    for box in reversed(boxed[:-1]):
        if (box.start, box.end) != (start, stop):
            break
        start, stop = _stripped(text, box)
    return text[start:stop]


def without_end_tokens(text: str) -> str:
    """The response without surrounding space and without the special tokens that end a turn, such as <|im_end|>."""
    text = text.strip()
    while match := _END_TOKEN.search(text, max(0, len(text) - _LONGEST)):
        text = text[: match.start()].rstrip()
    return text


def ends_in_its_only_box(text: str) -> bool:
    """Exactly one \\boxed, well-formed and not empty, with nothing after it but what closes a formula or sentence."""
    text = without_end_tokens(text)
    boxed = boxes(text)
    if len(boxed) != 1 or text.count("\\boxed") != 1 or not boxed_answer(text):
        return False
    return _CLOSING.fullmatch(text, boxed[0].end) is not None


def _stripped(text: str, box: Box) -> tuple[int, int]:
    """Where a box's content begins and ends, without the space around it."""
    start, stop = box.inside, box.end - 1
    while start < stop and text[start].isspace():
        start += 1
    while start < stop and text[stop - 1].isspace():
        stop -= 1
    return start, stop
