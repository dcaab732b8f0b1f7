"""One run of examples/demo.toml, for the scripts here that look at its events."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_core.record.events import read

ROOT = Path(__file__).parents[2]


def demo(name: str, folder: Path, flags: Sequence[str], seconds: float) -> tuple[list[dict], str] | None:
    """Its events and what it printed; None where it failed, which is printed with its logs.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    words = ["run", "examples/demo.toml", "--no-live", "--run-dir", folder, *flags]
    command = [sys.executable, "-c", "from miles_core.cli import main; main()", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        logs = "".join(log.read_text(errors="replace")[-2000:] for log in (folder / "logs").glob("*.log"))
        print(f"{name}: failed\n{done.stdout[-1500:]}{done.stderr[-3000:]}{logs}")
        return None
    return list(read(folder / "events.jsonl")), done.stdout + done.stderr
