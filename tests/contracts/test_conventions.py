"""The table of conventions is what the code says, and no algorithm is left out of it."""

import importlib.util

import pytest
from source import ROOT

from miles_core.plugins.scan import KNOWN

spec = importlib.util.spec_from_file_location("conventions", ROOT / "docs" / "conventions.py")
conventions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conventions)

ALGORITHMS = sorted({offer.partition(":")[2] for offers in KNOWN.values() for offer in offers
                     if offer.startswith(("advantage:", "policy_loss:"))} - {"sft", "custom", "custom_loss"})


def test_the_page_has_the_table_of_today():
    page = conventions.PAGE.read_text(encoding="utf-8")
    assert page == conventions.written(page), "write it anew: python docs/conventions.py"


def test_every_row_has_a_cell_for_everybody():
    assert {len(row) for row in conventions.ROWS} == {2 + len(conventions.OTHERS)}
    assert all(cell for row in conventions.ROWS for cell in row)


@pytest.mark.parametrize("name", ["clip", *ALGORITHMS])
def test_every_algorithm_has_a_row(name):
    assert any(f"`{name}`" in row[0] for row in conventions.ROWS), f"say in docs/conventions.py what {name} does"
