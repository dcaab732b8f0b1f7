"""--async-save: what is written beside training, when it is published, and what an error, a limit or an end does."""

import builtins
import hashlib
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import Full, load, save

from miles_core.errors import CheckpointError, WaitError

SECONDS = 30


@pytest.fixture(scope="module")
def checkpoint(megatron):
    from miles_megatron import checkpoint

    return checkpoint


@pytest.fixture
def beside(megatron):
    from miles_megatron.async_save import AsyncSave

    made = AsyncSave(SECONDS)
    yield made
    made.close()


@pytest.fixture
def disk(checkpoint, monkeypatch):
    """An event without which no tensor is written."""
    from miles_megatron.checkpoint_write import Part

    ready, write = threading.Event(), Part.write

    def waits(part):
        assert ready.wait(SECONDS)
        return write(part)

    monkeypatch.setattr(Part, "write", waits)
    yield ready
    ready.set()


def parts(session):
    return {"actor": (session.chunks, session.optimizer, session.scheduler)}


def digests(folder):
    """Of all files but the index, which holds the name of its folder and of nothing else that differs."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
            if path.name != ".metadata"}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_training_goes_on_and_the_bytes_are_those_of_a_synchronous_save(
        train, checkpoint, beside, disk, tmp_path, bf16, distributed):
    session = train(bf16=bf16, use_distributed_optimizer=distributed)
    session(1)
    disk.set()
    expected = digests(save(checkpoint, tmp_path / "sync", 1, session, rollout=1))
    disk.clear()
    target = checkpoint.save(tmp_path / "async", 1, parts(session), {"rollout": 1}, async_save=beside)
    beside.settle()
    after = session(2, seed=9)
    assert not target.exists() and not checkpoint.exists(tmp_path / "async")
    disk.set()
    beside.wait()
    assert digests(target) == expected
    assert os.listdir(tmp_path / "async").count("latest_checkpointed_iteration.txt") == 1
    assert load(checkpoint, tmp_path / "async", session) == (1, {"rollout": 1})
    assert session(2, seed=9) == after


@pytest.fixture(scope="module")
def session(train):
    made = train()
    made(1)
    return made


@pytest.fixture
def copies(monkeypatch):
    """An event without which no tensor is copied."""
    from miles_megatron import async_save

    ready, host_copy = threading.Event(), async_save.host_copy

    def waits(source, into):
        assert ready.wait(SECONDS)
        return host_copy(source, into)

    monkeypatch.setattr(async_save, "host_copy", waits)
    yield ready
    ready.set()


@pytest.mark.parametrize("begins", ["take_batch", "offload"])
def test_a_trainer_changes_nothing_before_all_is_copied(checkpoint, session, beside, copies, tmp_path, begins):
    """Sampling, which a save returns to, goes on meanwhile."""
    from miles_megatron.step import MegatronTrainer

    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer.models = SimpleNamespace(async_save=beside, offload=lambda _tags: None)
    checkpoint.save(tmp_path, 1, parts(session), async_save=beside)
    goes_on = threading.Thread(target=getattr(MegatronTrainer, begins), args=(trainer, SimpleNamespace(samples=())))
    goes_on.start()
    goes_on.join(0.2)
    assert goes_on.is_alive()
    copies.set()
    goes_on.join(SECONDS)
    assert not goes_on.is_alive()
    beside.wait()
    assert checkpoint.latest(tmp_path) == 1


def test_a_copy_that_fails_is_an_error_before_anything_changes(checkpoint, session, beside, tmp_path, monkeypatch):
    def fails(source, into):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("miles_megatron.async_save.host_copy", fails)
    checkpoint.save(tmp_path, 1, parts(session), async_save=beside)
    beside._thread.join(SECONDS)
    with pytest.raises(RuntimeError, match="out of memory"):
        beside.settle()
    assert not list(tmp_path.glob("*"))


def test_the_next_save_waits_and_writes_over_the_same_memory(train, checkpoint, beside, disk, tmp_path, monkeypatch):
    session, staged, stage = train(), [], beside.staged
    monkeypatch.setattr(beside, "staged", lambda *given: staged.append(stage(*given)) or staged[-1])
    checkpoint.save(tmp_path, 1, parts(session), async_save=beside)
    memory = [copy.data_ptr() for copy in staged[0]]
    threading.Timer(0.3, disk.set).start()
    beside.settle()
    session(1)
    begin = time.monotonic()
    checkpoint.save(tmp_path, 2, parts(session), async_save=beside)
    assert time.monotonic() - begin < SECONDS and (tmp_path / "iter_0000001").is_dir()
    beside.wait()
    assert checkpoint.latest(tmp_path) == 2 and not list(tmp_path.glob(".tmp*"))
    assert memory and [copy.data_ptr() for copy in staged[1]] == memory


@pytest.mark.parametrize("where", ["tensors", "fsync", "tracker"])
def test_a_full_disk_is_an_error_of_the_next_call(checkpoint, session, beside, tmp_path, monkeypatch, where):
    save(checkpoint, tmp_path, 1, session)

    def full(*_):
        raise OSError(28, "No space left on device")

    def untold(target, _):
        from miles_core.record.publish import write_error

        raise write_error(target, OSError(28, "No space left on device"))

    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(builtins, "open", Full(50_000))
        elif where == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr("miles_megatron.checkpoint_write.write_text", untold)
        checkpoint.save(tmp_path, 2, parts(session), async_save=beside)
        with pytest.raises(CheckpointError) as wrong:
            beside.wait()
    assert wrong.value.code in ("checkpoint-not-written", "checkpoint-disk-failing")
    with pytest.raises(CheckpointError):
        beside.check()
    assert checkpoint.latest(tmp_path) == 1 and not list(tmp_path.glob(".tmp*"))
    assert load(checkpoint, tmp_path, session)[0] == 1


def test_a_write_that_takes_too_long_is_named(checkpoint, session, disk, tmp_path):
    from miles_megatron.async_save import AsyncSave

    short = AsyncSave(0.2)
    target = checkpoint.save(tmp_path, 1, parts(session), async_save=short)
    short.check()
    with pytest.raises(WaitError) as late:
        checkpoint.save(tmp_path, 2, parts(session), async_save=short)
    assert late.value.code == "checkpoint-write-timeout" and late.value.who == str(target)
    with pytest.raises(WaitError):
        short.check()


def test_nothing_is_published_after_the_end(checkpoint, session, disk, tmp_path):
    """Another run may save there by then."""
    from miles_megatron.async_save import AsyncSave

    ends = AsyncSave(SECONDS)
    ends.GRACE = 0.1
    save_before = threading.active_count()
    checkpoint.save(tmp_path, 1, parts(session), async_save=ends)
    ends.close()
    disk.set()
    with pytest.raises(CheckpointError) as abandoned:
        ends.wait()
    assert abandoned.value.code == "checkpoint-abandoned"
    assert threading.active_count() <= save_before and not list(tmp_path.glob("*"))


def test_an_end_leaves_it_time(checkpoint, session, beside, disk, tmp_path):
    checkpoint.save(tmp_path, 1, parts(session), async_save=beside)
    threading.Timer(0.2, disk.set).start()
    beside.close()
    assert checkpoint.latest(tmp_path) == 1


def test_what_one_rank_holds_whole_is_saved_as_it_is(train):
    """Megatron's gathering gives the same, in copies."""
    session = train(bf16=True)
    session(1)
    [part] = getattr(session.optimizer, "chained_optimizers", [session.optimizer])
    ours = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    theirs = type(part).get_parameter_state_dp_zero(part, use_gloo_comm=False, return_on_all_ranks=True)
    for number, buffer in enumerate(part.buffers):
        [(dtype, gathered)] = theirs[number].items()
        for name, state in ours[number][dtype].items():
            for begin, end, _ in buffer.param_index_map.values():
                assert torch.equal(state[begin:end], gathered[name][begin:end])
