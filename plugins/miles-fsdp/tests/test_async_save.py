"""--async-save under this trainer: when it is copied, what an error or an end does. test_contract.py has the rest."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from miles_fsdp.memory import GIB, lines, parameters
from miles_fsdp.plugin import FsdpOptions
from miles_testing import tiny_checkpoint
from miles_testing.forked import apart
from miles_testing.tiny import run_file

from miles_core.errors import CheckpointError
from miles_core.plugins.plan import prepare
from miles_core.types import Batch, Rank

SECONDS = 30


def trainer(folder: Path):
    """Loaded, on one rank."""
    from miles_core.build import trainer_part, with_context

    tables = {"perf": {"trainer": "fsdp"}, "checkpoint": {"async_save": True}}
    plan = prepare(run_file(folder / "run.toml", ["fsdp"], tables, {}, checkpoint=tiny_checkpoint()))
    made = trainer_part(plan.selected, with_context(plan.config), Rank())
    made.load()
    return made


def begins_before_it_is_copied(folder: Path, begin: str) -> None:
    """The next batch, or an offload, waits; the save did not."""
    from torch.distributed.checkpoint.staging import DefaultStager

    ready, stage = threading.Event(), DefaultStager._stage

    def waits(stager, *state):
        assert ready.wait(SECONDS)
        return stage(stager, *state)

    DefaultStager._stage = waits
    made = trainer(folder)
    made.save(folder / "saved", 1, {})
    starts = {"take_batch": lambda: made.take_batch(Batch(0, [], 0)), "offload": lambda: made.offload([])}
    goes_on = threading.Thread(target=starts[begin])
    goes_on.start()
    goes_on.join(0.3)
    assert goes_on.is_alive() and not (folder / "saved" / "latest_checkpointed_iteration.txt").exists()
    ready.set()
    goes_on.join(SECONDS)
    assert not goes_on.is_alive()
    made.saved()
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    made.close()


def stagers_forget(folder: Path) -> None:
    """What torch 2.11 does when a stager has copied."""
    from miles_fsdp import async_save, checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager

    stage = DefaultStager._stage

    def once(stager, *state):
        copies = stage(stager, *state)
        stager._state_dict_stager.close()
        return copies

    DefaultStager._stage, async_save.ONCE = once, True
    made = trainer(folder)
    for iteration in (1, 2, 3):
        made.save(folder / "saved", iteration, {})
        made.saved()
    assert checkpoint.latest(str(folder / "saved")) == 3
    made.close()


def fails(folder: Path, where: str) -> None:
    """The trainer's next call says so, and what was saved before stays."""
    from miles_fsdp import checkpoint

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    made = trainer(folder)
    made.save(folder / "saved", 1, {})
    made.saved()
    setattr(checkpoint, where, full)
    made.save(folder / "saved", 2, {})
    for call in (made.saved, lambda: made.take_batch(Batch(0, [], 0)), lambda: made.save(folder / "saved", 3, {})):
        with pytest.raises((CheckpointError, OSError)):
            call()
    assert checkpoint.latest(str(folder / "saved")) == 1 and not list((folder / "saved").glob(".tmp*"))


def ends(folder: Path) -> None:
    """Another run may save there by then."""
    from miles_fsdp import checkpoint

    ready, save = threading.Event(), checkpoint.save_tensors

    def waits(*tensors, **more):
        assert ready.wait(SECONDS)
        return save(*tensors, **more)

    checkpoint.save_tensors = waits
    made = trainer(folder)
    made._beside.GRACE = 0.1
    made.save(folder / "saved", 1, {})
    made._beside.close()
    ready.set()
    with pytest.raises(CheckpointError) as abandoned:
        made.saved()
    assert abandoned.value.code == "checkpoint-abandoned" and not list((folder / "saved").glob("*"))


@pytest.mark.parametrize("begin", ["take_batch", "offload"])
def test_nothing_changes_before_all_is_copied(tmp_path, begin):
    apart(begins_before_it_is_copied, tmp_path, begin, timeout=120)


def test_a_stager_of_older_versions_is_used_once(tmp_path):
    apart(stagers_forget, tmp_path, timeout=120)


@pytest.mark.parametrize("where", ["save_tensors", "write_text"])
def test_a_full_disk_is_an_error_of_the_next_call(tmp_path, where):
    apart(fails, tmp_path, where, timeout=120)


def test_nothing_is_published_after_the_end(tmp_path):
    apart(ends, tmp_path, timeout=120)


@pytest.mark.parametrize(("flags", "numbers"), [([], 3), (["--no-save-optim"], 1)])
def test_a_plan_says_what_the_copies_take(tmp_path, flags, numbers):
    """Masters and AdamW's two moments, in float32."""
    folder = tiny_checkpoint()
    tables = {"perf": {"trainer": "fsdp"}, "checkpoint": {"async_save": True}}
    plan = prepare(run_file(tmp_path / "run.toml", ["fsdp"], tables, {}, checkpoint=folder), flags)
    text = dict(lines(plan.config, FsdpOptions()))["memory"]
    assert text.endswith(f": {4 * numbers * parameters(folder) / GIB:.2g}")
