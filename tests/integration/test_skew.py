"""A process of the trainer whose files are not those of the plan ends the run at once, by host, rank and package."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from miles_testing.forked import miles
from miles_testing.tiny import run_file

from tests.integration.conftest import hushed
from tests.unit.plugins.installed import install

pytestmark = pytest.mark.integration

LATER = '''import os
from pathlib import Path

if "LATER" in os.environ:  # a process that was started after the plan
    Path(__file__).with_name("miles_moved").joinpath("more.py").write_text("")
'''


def seen(site: str) -> None:
    """The site folder on the path of this process and of those that it starts."""
    sys.path.insert(0, site)
    os.environ |= {"PYTHONPATH": site, "LATER": "1"}


def test_a_rank_that_would_run_other_code_is_refused(tmp_path):
    site = tmp_path / "site"
    install(site, "moved")
    (site / "sitecustomize.py").write_text(LATER)
    path = run_file(tmp_path / "run.toml", ["moved"], {"rollout": {"rm_type": ["moved-reward"]}}, {})
    outcome = miles(["run", path, "--no-live", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"],
                    tmp_path, before=partial(seen, str(site)))
    assert Path(site, "miles_moved", "more.py").exists(), "or nothing was tried"
    assert outcome.code == 2, outcome
    said = (rf"Error: trainer rank [01] on {os.uname().nodename}: this process would run other code than the plan's "
            r"\(got plugin moved: miles-moved 1\.0 \w+ here, miles-moved 1\.0 \w+ at the driver\)\. Fix: ")
    assert re.match(said, outcome.err.lstrip()), outcome.err
    hushed(outcome)
