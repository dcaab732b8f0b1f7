"""Whole runs whose trainer has two ranks: resumed to the same bits, and ended by name when a rank dies."""

from __future__ import annotations

import pytest
from miles_testing import kill_resume
from miles_testing.forked import miles
from miles_testing.kill_resume import KillResume

pytestmark = pytest.mark.integration

RANKS = ["--actor-num-gpus-per-node", "2"]

DIES = '''
"""Ends rank 1 in the second rollout's step, as a lack of memory would."""
import os

from miles_core import hookimpl


class Dies:
    """Dies."""

    @hookimpl
    def train_step(self, proceed, access):
        import torch.distributed as dist

        if access.batch.rollout_id == 1 and dist.get_rank() == 1:
            os._exit(9)
        return proceed()
'''


@pytest.mark.full
@pytest.mark.parametrize("layout", [
    pytest.param([], id="dp"),
    pytest.param(["--tensor-model-parallel-size", "2", "--sequence-parallel"], id="tp", marks=pytest.mark.slow)])
def test_a_resumed_run_of_two_ranks_has_the_bits_of_one_that_went_on(run_file, tmp_path, layout):
    course = KillResume(tmp_path, [run_file(), *RANKS, *layout, "--rollout-shuffle", "--save-interval", "1"],
                        rollouts=3)
    reference = course.finish("reference")
    course.finish("stopped", "--debug-exit-after-rollout", "2")
    assert not kill_resume.problems(course.finish("stopped"), reference, rollouts=3, ends=2)


def test_a_rank_that_dies_is_named_and_ends_the_run(run_file, tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", *RANKS, "--plugin", "./dies.py"], tmp_path)
    assert outcome.code == 1
    assert "the process 'trainer rank 1' died in step() (got exit code 9)" in outcome.err
    assert outcome.seconds < 120


@pytest.mark.full
def test_every_rank_writes_its_traces(run_file, tmp_path):
    traced = ["--use-pytorch-profiler", "--profile-step-start", "0", "--profile-step-end", "1",
              "--num-steps-per-rollout", "2"]  # one step alone needs no pass for log-probs
    assert miles(["run", run_file(), "--no-live", "--run-dir", "run", *RANKS, *traced], tmp_path).code == 0
    phases = {path.name.partition("-rollout-0-")[::2] for path in (tmp_path / "run" / "profile").iterdir()}
    written = ("log_probs", "advantage", "step-0", "step-1")
    assert phases == {(f"rank-{i}", f"{phase}.json.gz") for i in (0, 1) for phase in written}
