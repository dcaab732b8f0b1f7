"""docs/promises.md: its rows name tests that exist, and its counts are those of its rows."""

import re
from collections import Counter

import pytest
from source import ROOT

PAGE = ROOT / "docs" / "promises.md"
STATES = ("works", "partial", "missing", "refused")
HELD = 212
"""Features that held when all 279 were first gone through."""
ROW = re.compile(rf"^\| (?P<promise>.+?) \| (?P<times>\d+) \| (?P<state>{'|'.join(STATES)}) \| (?P<shown>.*?) ?\|$",
                 re.MULTILINE)


@pytest.fixture(scope="module")
def rows():
    return [match.groupdict() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_every_test_that_is_named_exists(rows):
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]
    there = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row["shown"])
        assert set(named) <= there, row["promise"]
        assert named or row["state"] != "works", f"nothing shows that it works: {row['promise']}"


def test_the_counts_are_those_of_the_rows(rows):
    counts = Counter()
    for row in rows:
        counts[row["state"]] += int(row["times"])
    assert counts.total() == 279 - HELD
    lines = [f"| {what} | {HELD * whole + counts['works']} | {' | '.join(str(counts[one]) for one in STATES[1:])} |"
             for what, whole in (("all 279", 1), ("these 67", 0))]
    text = PAGE.read_text(encoding="utf-8")
    block = text.partition("<!-- counts -->\n")[2].partition("<!-- end of counts -->")[0].splitlines()
    assert block[2:] == lines, "\n".join(lines)
    assert len(text.splitlines()) <= 130
