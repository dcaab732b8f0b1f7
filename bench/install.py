"""What an installation costs: seconds of wall and processor, packages, megabytes; of the core, and of `miles`.

    python bench/install.py                    # a Markdown table
    python bench/install.py --only core

The wheels are built from this tree; everything else comes from the configured index at the versions of
constraints/cpu.txt, torch first, as in make. Bytes are those of site-packages without pip and setuptools.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("miles-flags", "miles-grpo", "miles-local", "miles-math", "miles-megatron", "miles-preflight", "miles-report")
CASES = {"torch": (), "core": ("miles-core",), "miles": ("miles",)}
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-warn-script-location")


def run(*words: object) -> tuple[float, float]:
    """(seconds of the wall, CPU seconds) of a command that has to succeed."""
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(word) for word in words], check=True, cwd=tempfile.gettempdir())
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def wheels(folder: Path) -> Path:
    """Of the core, the metapackage and what it needs; gives a file of constraints that names them."""
    copy = folder / "tree"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in (".", "miles", *(f"plugins/{part}" for part in PARTS)):
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
            folder, copy / name)
    ours = [f"{path.name.partition('-')[0].replace('_', '-')} @ {path.as_uri()}" for path in folder.glob("*.whl")]
    pins = folder / "pins.txt"
    pins.write_text("\n".join([(ROOT / "constraints/cpu.txt").read_text(), *ours, ""]))
    return pins


def installed(site: Path) -> tuple[int, float]:
    """(distributions, megabytes)."""
    not_counted = ("pip", "setuptools", "_distutils", "pkg_resources", "distutils-precedence")
    kept = [path for path in site.iterdir() if not path.name.startswith(not_counted)]
    size = sum(each.stat().st_size for path in kept for each in (path.rglob("*") if path.is_dir() else [path])
               if each.is_file())
    return sum(path.suffix == ".dist-info" for path in kept), size / 10**6


def measured(folder: Path, name: str, pins: Path) -> dict[str, object]:
    """One fresh environment: torch, then the case; the seconds are of what comes after torch."""
    venv.create(folder / name, with_pip=True, symlinks=True)
    python = folder / name / "bin/python"
    seconds = run(python, *PIP, "--upgrade", "pip")
    seconds = run(python, *PIP, "--constraint", pins, "torch")
    for what in CASES[name]:
        (wheel,) = pins.parent.glob(f"{what.replace('-', '_')}-*.whl")
        seconds = run(python, *PIP, "--constraint", pins, wheel)
    (site,) = (folder / name).glob("lib/python*/site-packages")
    count, size = installed(site)
    return {"what": name, "wall_s": round(seconds[0], 1), "cpu_s": round(seconds[1], 1), "packages": count,
            "MB": round(size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    chosen = parser.parse_args().only
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pins = wheels(folder)
        rows = [measured(folder, name, pins) for name in chosen]
    print("| installed | wall s | CPU s | packages | MB |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row.values())} |")
    print(json.dumps(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
