"""The verifier of DAPO (arXiv:2503.14476): the last "Answer:" line, normalised as Minerva does, is the label's integer.

The rules of the normalisation are those of Minerva (arXiv:2206.14858, appendix D.1) and of DAPO's verifier; their order
counts.
"""

from __future__ import annotations

import re

from miles_math.answer import without_end_tokens

TAIL = 300
"""Characters at the end of a response in which its answer is looked for."""

NO_ANSWER = "[INVALID]"
"""What stands for the prediction of a response without an "Answer:" line."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
             (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"))  # fmt: skip
_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots", "<|im_end|>",
    "<|endoftext|>",
)  # fmt: skip
_FORMULA = re.compile(r".*?\$(.*?)\$.*")
_UNWRAPPED = tuple(re.compile(rf"\\{command}\{{({inside})\}}") for command, inside in
                   (("text", ".*?"), ("textbf", ".*?"), ("overline", ".*?"), ("boxed", ".*")))  # fmt: skip


def normalised(answer: str) -> str:
    """The answer without words, units, markup and what stands before its last equals sign."""
    answer = answer.rpartition("=")[2]
    for old, new in (*_REPLACED, *((text, "") for text in _DROPPED)):
        answer = answer.replace(old, new)
    answer = _FORMULA.sub(r"$\1$", answer)
    for command in _UNWRAPPED:
        answer = command.sub(r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def dapo(response: str, label: str) -> dict[str, float | str]:
    """`score`, 1 or -1; `acc`, 1 or 0; and `pred`, the normalised prediction.

    Raises:
        ValueError: the label is no number.
        OverflowError: it is infinite.
    """
    wanted = str(int(float(normalised(label))))  # DAPO's labels are integers: 7.9 asks for 7
    answers = _ANSWER.findall(response[-TAIL:])
    predicted = normalised(without_end_tokens(answers[-1]) if answers else NO_ANSWER)
    right = predicted == wanted
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": predicted}
