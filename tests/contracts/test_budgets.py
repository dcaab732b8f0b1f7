"""Sizes: files, functions, the loop, hookspecs, the core, checks, the README. The numbers are in .ci/budgets.toml."""

from checks import lines_by_file
from source import BUDGETS, CORE, ROOT, core_files, functions, plugin_files, where

LINES = BUDGETS["lines"]


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_too_long():
    found = [f"{where(path)} has {lines(path)} lines" for path in (*core_files(), *plugin_files())
             if lines(path) > LINES["file"]]
    assert not found, found


def test_no_function_is_too_long():
    found = []
    for path in (*core_files(), *plugin_files()):
        for name, node in functions(path):
            if (size := node.end_lineno - node.lineno + 1) > LINES["function"]:
                found.append(f"{where(path, node.lineno)} {name} has {size} lines")
    assert not found, found


def test_the_loop_and_the_hookspecs_fit_on_their_page():
    assert lines(CORE / "loop.py") <= LINES["loop"]
    assert lines(CORE / "hookspecs.py") <= LINES["hookspecs"]


def test_the_core_is_small():
    sizes = {where(path): lines(path) for path in (*core_files(), *CORE.rglob("*.toml"))}
    assert sum(sizes.values()) <= LINES["core"], sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_checks_are_few():
    sizes = lines_by_file()
    assert any("miles_megatron/checks.py" in path for path in sizes), "the count finds what hooks of others reach"
    assert sum(sizes.values()) <= LINES["checks"], sizes


def test_the_readme_is_short():
    assert lines(ROOT / "README.md") <= LINES["readme"]
