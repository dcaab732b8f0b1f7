"""docs/new-architecture.md, followed to the letter in an empty folder by a Python that has no such plugin."""

import os
import re
import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

from miles_core.record.events import read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new-architecture.md"
BLOCK = re.compile(r"(?:^<!-- (?P<mark>file|quoted): (?P<what>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)
COMMANDS = {"pip": ["-m", "pip"], "miles": ["-c", "from miles_core.cli import main; main()"], "python": []}
PATIENCE = 240
"""Seconds for one command on a busy machine; all of them take about forty on a quiet one."""


def environment(folder):
    """A Python that sees what this one has installed, after what is installed into it."""
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "parent.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return folder / "bin" / "python"


def test_the_guide_makes_a_family(tmp_path):
    python, place = environment(tmp_path / "python"), tmp_path / "empty"
    (place / "plugins").mkdir(parents=True)
    (place / "examples").symlink_to(ROOT / "examples")

    def run(*words):
        done = subprocess.run([python, *words], cwd=place, capture_output=True, text=True, timeout=PATIENCE,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    printed, made = {}, []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["mark"] == "quoted":
            assert block["text"] in (ROOT / block["what"]).read_text(encoding="utf-8"), block["what"]
        elif block["mark"] == "file":
            made.append(block["what"])
            (place / block["what"]).parent.mkdir(parents=True, exist_ok=True)
            (place / block["what"]).write_text(block["text"])
        elif block["language"] == "python":
            run("-c", block["text"])
        else:
            for line in re.sub(r"\\\n\s*", "", block["text"]).splitlines():
                command, *words = shlex.split(line)
                printed[line] = run(*COMMANDS[command], *words)
    assert len(made) == 6 and all(name.startswith("plugins/") for name in made)
    where = run("-c", "import miles_specs_moe; print(miles_specs_moe.__file__)").strip()
    assert Path(where).is_relative_to(place), "the family is the one of the guide"
    [tests] = [text for line, text in printed.items() if "pytest" in line]
    assert "1 passed" in tests
    [table] = [text for line, text in printed.items() if "testing.parity" in line]
    assert re.search(r"^\| GLM-4.5 \| `glm4_moe` \| miles-specs-moe \|(?: \d\.\de[-+]\d\d \|){6} exact \|", table,
                     re.MULTILINE)
    metrics = [event["metrics"] for event in read(place / "runs" / "new" / "events.jsonl")
               if event["event"] == "metrics"]
    found = [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics
             if "train/train_rollout_logprob_abs_diff_max" in one]
    assert len(found) == 2 and max(found) <= 1e-5
