"""docs/reliability.md tells of every fault in every mode, and of none that failed."""

import re

import pytest
from source import ROOT

from tests.integration.faults import FAULTS, MODES, PAGE, SECONDS, SERVER_SECONDS, SERVERS

ROW = re.compile(r"^\| ([^|]+) \| ([\w-]+) \| ([\d.]+) \| (.+) \| ([\w ,]+) \| (\d+) of (\d+) \|$", re.MULTILINE)


def rows(mark):
    """The rows of one of the page's tables: (fault, mode) -> seconds, said, end, tainted, trained."""
    text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- end of {mark} -->")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    found = ROW.findall(text)
    assert len(found) == len(lines), "every row can be read"
    return {(name, mode): (float(seconds), said, end, int(tainted), int(trained))
            for name, mode, seconds, said, end, tainted, trained in found}


@pytest.mark.parametrize(("mark", "wanted", "most"), [
    ("table", {(name, mode): fault for name, fault in FAULTS.items() for mode in MODES}, SECONDS),
    ("servers", {(name, mode): fault for name, (mode, fault) in SERVERS.items()}, SERVER_SECONDS),
], ids=["local", "servers"])  # fmt: skip
def test_every_fault_was_met_in_time_named_and_trained_nothing(mark, wanted, most):
    found = rows(mark)
    assert list(found) == list(wanted)
    for cell, (seconds, said, end, tainted, trained) in found.items():
        fault = wanted[cell]
        assert seconds <= most + fault.timeout, cell
        assert end.partition(",")[0] == fault.end and said and trained, cell
        assert tainted == 0, cell
        culprit = fault.words.split(" ... ")[0].strip()
        assert culprit[:100] in said.replace("\\|", "|").replace("&lt;", "<"), cell


def test_there_are_as_many_faults_as_were_promised():
    assert len(FAULTS) >= 16 and list(MODES) == ["sync", "one-off", "async"]


def test_each_fault_inside_of_a_run_is_one_that_the_plugin_knows():
    source = (ROOT / "tests" / "integration" / "faulty.py").read_text() + (
        ROOT / "tests" / "integration" / "test_faults.py").read_text()
    assert not [name for name in FAULTS if f'"{name}"' not in source]
