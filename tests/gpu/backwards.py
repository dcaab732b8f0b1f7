"""A reward that moves a policy far from where it started: digits of the answer, counted from the other end."""

from __future__ import annotations

import re

from miles_core.hookspecs import hookimpl


class Backwards:
    """The share of digits that are those of the label read backwards."""

    name = "backwards"

    @hookimpl
    def reward(self, sample) -> float:
        """From 0 to 1."""
        digits, wanted = "".join(re.findall(r"\d", sample.text)), sample.prompt.label[::-1]
        return sum(a == b for a, b in zip(digits, wanted, strict=False)) / max(len(digits), len(wanted), 1)
