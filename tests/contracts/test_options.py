"""Accepted but unread fails: every option that is declared is read from its own table by code that acts on it."""

import ast

import pytest
from source import core_files, plugin_files

from miles_core.config.options import options_of
from miles_core.config.tables import TABLES

DECLARED = {(table, name): option for table, kind in TABLES.items() for name, option in options_of(table, kind).items()}

BY_NAME = {"eval_top_k"}
"""Read by getattr in build.sampling; tests/integration/test_evaluation.py shows that they act."""


@pytest.fixture(scope="module")
def read() -> set[tuple[str, str]]:
    """(table, option) of every attribute that is read from a thing called like a table; checks do not count."""
    found = set()
    for path in (*core_files(), *plugin_files()):
        if path.parent.name in ("config", "sglang") and path.name in ("tables.py", "check.py", "serving.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.parent.name == "config" and path.name == "algorithm.py":
            tree.body = [node for node in tree.body if getattr(node, "name", "") == "needs_reference"]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = ast.unparse(node.value).rpartition(".")[2].rstrip("_")
                tables = TABLES if base in ("given", "a") else [base]
                found |= {(table, node.attr) for table in tables}
    return found


@pytest.mark.parametrize(("table", "name"), DECLARED)
def test_every_option_is_read(read, table, name):
    if len(DECLARED[table, name].choices) == 1 or name in BY_NAME:
        return
    assert (table, name) in read, f"[{table}] {name} is accepted, and nobody reads it"


def test_the_exceptions_are_still_needed(read):
    names = {name for _, name in DECLARED}
    assert names >= BY_NAME and not BY_NAME & {name for _, name in read}
