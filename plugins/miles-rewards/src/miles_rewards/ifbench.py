"""Whether a response follows the instructions of its row, by the checkers of IFBench (arXiv:2507.02833).

The checkers are those of the installed package ifbench, IFEval's (arXiv:2311.07911) among them, and run in processes of
their own: some search a response with patterns whose time is not bounded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_math.processes import Processes, Ungradable

INSTALL = "pip install ifbench"


def installed() -> bool:
    """Whether the checkers are."""
    return importlib.util.find_spec("ifbench") is not None


def question(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a process is asked: the response, and (name, arguments) of each instruction.

    Args:
        row: `instruction_id_list`, names such as "count:numbers"; `kwargs`, the arguments of each, or of all of them;
            `prompt_text`, for instructions that are about the prompt.

    Raises:
        ValueError: the row names no instruction.
    """
    names = [str(name).strip() for name in row.get("instruction_id_list") or () if name is not None]
    names = [name for name in names if name]
    if not names:
        raise ValueError("the row names no instructions in instruction_id_list")
    kwargs = row.get("kwargs")
    listed = kwargs if isinstance(kwargs, list) else [kwargs]
    arguments = [one if isinstance(one, Mapping) else {} for one in listed] or [{}]
    arguments += arguments[-1:] * (len(names) - len(arguments))
    return {"response": response, "prompt": str(row.get("prompt_text") or ""), "instructions": [
        (name, {key: value for key, value in one.items() if value is not None})
        for name, one in zip(names, arguments)]}  # fmt: skip


class Checkers:
    """Asks IFBench's checkers; safe to call from several threads at once.

    Args:
        timeout: CPU seconds for the instructions of one response.
        processes: most responses that are checked side by side.
    """

    def __init__(self, timeout: float, processes: int):
        self._processes = Processes(Path(__file__).with_name("ifbench_process.py"), timeout, processes, who="rewards",
                                    fix=f"{INSTALL}; without a network its data of NLTK have to lie in $NLTK_DATA")

    def followed(self, response: str, row: Mapping[str, Any]) -> bool:
        """Whether a response follows every instruction of its row.

        Raises:
            Ungradable: a checker took too long or too much memory, or failed on the response.
            ValueError: the row names no instruction, an unknown one, or arguments that do not suit it.
        """
        word = self._processes.ask(question(response, row))
        if word.startswith("row:"):
            raise ValueError(word.removeprefix("row:"))
        if word.startswith("failed:"):
            raise Ungradable(word.removeprefix("failed:"))
        return word == "followed"

    def close(self) -> None:
        """End the processes."""
        self._processes.close()
