"""The program of a process that asks IFBench: "followed" or "not"; "row:" or "failed:" and what was wrong."""

from __future__ import annotations

import random
from typing import Any

from miles_math.serving import serve


def word(question: dict[str, Any]) -> str:
    """The answer to a question. What a row leaves open a checker draws, here always alike."""
    from ifbench.instructions_registry import INSTRUCTION_DICT

    random.seed(0)
    response, checkers = question["response"], []
    for name, arguments in question["instructions"]:
        try:
            checker = INSTRUCTION_DICT[name](name)
            checker.build_description(**arguments)
            if "prompt" in (checker.get_instruction_args() or ()):
                checker.build_description(prompt=question["prompt"])
        except Exception as error:  # noqa: BLE001 - a checker raises anything
            return _line(f"row:instruction {name!r} with {arguments!r}: {error!r}")
        checkers.append((name, checker))
    for name, checker in checkers if response.strip() else ():
        try:
            if not checker.check_following(response):
                return "not"
        except Exception as error:  # noqa: BLE001
            return _line(f"failed:instruction {name!r}: {error!r}")
    return "followed" if response.strip() else "not"


def _line(text: str) -> str:
    return " ".join(text.encode("ascii", "replace").decode().split())[:500]


def warm_up() -> None:
    """Import the checkers, which fetch what they need of NLTK's data if it is not here, and use one."""
    instructions = [["count:numbers", {"N": 1}]]
    word({"response": "There is 1 number. No other.", "prompt": "", "instructions": instructions})


if __name__ == "__main__":
    serve(word, warm_up)
