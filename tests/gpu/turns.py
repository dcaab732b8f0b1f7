"""Runs that share a GPU start side by side and take turns: each waits after its second rollout until told to go on."""

from __future__ import annotations

import time
from pathlib import Path

from miles_core.hookspecs import hookimpl

WARM = 2
"""Rollouts before the turn: they compile what there is to compile."""
LIMIT = 900


class Turns:
    """Leaves a file `waits` in the run's directory and waits there for a file `turn`."""

    name = "turns"

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float], run_dir: Path) -> None:
        """Wait for the turn.

        Raises:
            TimeoutError: nobody gave it.
        """
        if rollout_id != WARM - 1:
            return
        (run_dir / "waits").touch()
        end = time.monotonic() + LIMIT
        while not (run_dir / "turn").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no turn within {LIMIT} s")
            time.sleep(0.05)
