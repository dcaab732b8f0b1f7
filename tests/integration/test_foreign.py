"""Parts of somebody else's pass the kits and resume, in a Python to which Megatron-core and SGLang are unknown.

tests/packages/test_foreign.py does so with wheels in an environment of their own, and trains the demo.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path

import pytest

from tests.packages.clean import ROOT, editable, environment, shell

FOREIGN = ROOT / "tests" / "foreign"
UNKNOWN = re.compile(r"megatron.*|sglang.*")
PAGES = ("write-an-engine", "write-a-trainer", "weight-sync", "contracts", "write-a-plugin", "testing-plugins")

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Sees the dependencies of this environment but for these, the core, two plugins, the kits and tests/foreign."""
    found = environment(tmp_path_factory.mktemp("foreign") / "venv", below=Path(sysconfig.get_paths()["purelib"]),
                        but=UNKNOWN)
    editable(found, ROOT, *(ROOT / "plugins" / name for name in ("miles-grpo", "miles-math", "miles-testing")), FOREIGN)
    return found


def pytest_of(python: Path, *words: str) -> str:
    alone = ("-q", "-c", "pyproject.toml", "-p", "no:cacheprovider")
    return shell(python, "-m", "pytest", *alone, "tests/parts.py", *words, cwd=FOREIGN)


def test_a_run_of_foreign_parts_is_stopped_and_resumed(python):
    assert "1 passed" in pytest_of(python, "-k", "stopped")


@pytest.mark.slow
def test_foreign_parts_pass_the_kits(python):
    assert "14 passed" in pytest_of(python, "-k", "not stopped")


def test_a_plan_asks_for_what_it_names_and_for_nothing_else(python, tmp_path):
    """Without the parts that every run has by default, it names all that is missing and how to get it."""
    plan = ("-c", "from miles_core.cli import main; main()", "run", ROOT / "examples/demo.toml", "--run-dir", tmp_path,
            "--plan")
    parts = ("--plugin", "foreign", "--engine", "foreign", "--trainer", "foreign", "--weight-sync", "foreign")
    planned = shell(python, *plan, *parts, cwd=ROOT)
    assert planned.count("plugin foreign") >= 3 and "megatron" not in planned
    with pytest.raises(AssertionError, match="pip install miles-local miles-megatron"):
        shell(python, *plan, cwd=ROOT)


def test_what_it_imports_is_what_the_pages_name():
    """So that the pages are enough to write such parts."""
    text = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    missing = []
    for path in FOREIGN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("miles_core", "miles_testing")):
                missing += [f"{path.name}: {alias.name} of {node.module}" for alias in node.names
                            if not (node.module in text and re.search(rf"\b{alias.name}\b", text))]
    assert not missing, missing

