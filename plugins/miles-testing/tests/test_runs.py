"""A toy run trains with plugins, and an error of one comes out of it."""

from __future__ import annotations

import pytest
from miles_testing import toy_run


def test_a_toy_run_trains_with_plugins_within_five_seconds(tmp_path):
    (tmp_path / "loud.py").write_text("from miles_core import hookimpl\n\nclass Loud:\n    @hookimpl\n"
                                      "    def filter_group(self, group):\n        return 1 / 0\n")
    toy_run(steps=1)  # the session's imports
    run = toy_run(["grpo"], options={"rollout.max_lag": 1})
    assert len(run.metrics) == 2 and run.metrics[-1]["rollout/reward/toy"] >= 0
    assert run.seconds < 5  # 1 s on two quiet cores
    with pytest.raises(AssertionError, match="plugin loud .*hook filter_group: ZeroDivisionError"):
        toy_run([tmp_path / "loud.py"], steps=1)
