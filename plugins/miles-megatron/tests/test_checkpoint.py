import builtins
import contextlib
import gc
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from miles_core.errors import CheckpointError


@pytest.fixture(scope="module")
def checkpoint(megatron):
    from miles_megatron import checkpoint

    return checkpoint


def save(checkpoint, folder, iteration, session, **state):
    return checkpoint.save(folder, iteration, {"actor": (session.chunks, session.optimizer, session.scheduler)}, state)


def load(checkpoint, folder, session, iteration=None):
    return checkpoint.load(folder, {"actor": (session.chunks, session.optimizer, session.scheduler)}, iteration)


@pytest.fixture(scope="module")
def session(train):
    made = train()
    made(1)
    return made


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("steps", [0, 3])
def test_resume_is_bit_exact(train, checkpoint, tmp_path, bf16, distributed, steps):
    options = {"bf16": bf16, "use_distributed_optimizer": distributed, "lr_decay_style": "cosine", "lr_warmup_iters": 2}
    first, second = train(**options), train(**options)
    first(steps)
    save(checkpoint, tmp_path, 3, first, rollout=3)
    expected = first(3, seed=9)
    second(2, seed=5)  # a life of its own, to be forgotten
    assert load(checkpoint, tmp_path, second) == (3, {"rollout": 3})
    assert second(3, seed=9) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_the_runs_own_learning_rate_holds_after_a_resume(train, checkpoint, session, tmp_path):
    save(checkpoint, tmp_path, 1, session)
    other = train(lr=1e-5)
    load(checkpoint, tmp_path, other)
    other.scheduler.step(1)
    assert {group["lr"] for group in other.optimizer.param_groups} == {1e-5}


def test_weights_alone(train, checkpoint, session, tmp_path):
    checkpoint.save(tmp_path, 0, {"actor": (session.chunks, None, None)})
    other = train()
    checkpoint.load(tmp_path, {"actor": (other.chunks, None, None)})
    assert all(torch.equal(a, b) for a, b in zip(session.model.parameters(), other.model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="weights without optimizer state.*--ref-load"):
        load(checkpoint, tmp_path, other)


def test_layout_on_disk_and_replacement(checkpoint, session, tmp_path):
    assert not checkpoint.exists(tmp_path / "run")
    for iteration in (7, 8, 8):
        target = save(checkpoint, tmp_path / "run", iteration, session)
    assert target.name == "iter_0000008" and checkpoint.latest(tmp_path / "run") == 8
    assert sorted(os.listdir(tmp_path / "run")) == ["iter_0000007", "iter_0000008", "latest_checkpointed_iteration.txt"]
    assert load(checkpoint, tmp_path / "run", session, iteration=7)[0] == 7


def test_an_unpublished_folder_is_ignored_and_cleared(checkpoint, session, tmp_path):
    save(checkpoint, tmp_path, 1, session)
    (tmp_path / ".tmp-iter_0000002").mkdir()
    assert checkpoint.latest(tmp_path) == 1
    save(checkpoint, tmp_path, 3, session)
    assert not list(tmp_path.glob(".tmp*"))


class Full:
    """A disk that takes `room` bytes more."""

    def __init__(self, room):
        self.room, self.open = room, builtins.open

    def __call__(self, path, mode="r", *rest, **named):
        file = self.open(path, mode, *rest, **named)
        if "w" in mode and str(path).endswith(".distcp"):
            write = file.write

            class Limited:
                def __getattr__(_, name):
                    return getattr(file, name)

                def __enter__(_):
                    return _

                def __exit__(_, *exc):
                    file.close()

                def write(_, data):
                    self.room -= len(data)
                    if self.room < 0:
                        raise OSError(28, "No space left on device")
                    return write(data)

            return Limited()
        return file


@pytest.mark.parametrize("where", ["tensors", "fsync", "tracker"])
def test_a_full_disk_leaves_the_older_checkpoint(checkpoint, session, tmp_path, monkeypatch, where):
    save(checkpoint, tmp_path, 1, session)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(builtins, "open", Full(50_000))
        elif where == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr("miles_megatron.checkpoint_write.write_text", lambda target, _: _raise(target))
        with pytest.raises(CheckpointError, match="disk is full"):
            save(checkpoint, tmp_path, 2, session)
    assert checkpoint.latest(tmp_path) == 1
    assert load(checkpoint, tmp_path, session)[0] == 1
    save(checkpoint, tmp_path, 2, session)
    assert checkpoint.latest(tmp_path) == 2


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_bit_that_flipped_on_the_disk_is_not_loaded(checkpoint, session, tmp_path, share):
    """torch reads such a file without a word."""
    file = save(checkpoint, tmp_path, 1, session) / "__0_0.distcp"
    before = [parameter.detach().clone() for parameter in session.model.parameters()]
    _flip(file, int(file.stat().st_size * share))
    with pytest.raises(CheckpointError, match="__0_0.distcp: .*not those that were written.*earlier iteration"):
        load(checkpoint, tmp_path, session)
    assert all(torch.equal(a, b) for a, b in zip(before, session.model.parameters(), strict=True)), "nothing was loaded"


def test_damage_to_what_is_no_tensor(checkpoint, session, tmp_path):
    folder = save(checkpoint, tmp_path, 1, session, prompts={"next": 24})
    state = folder / "miles.json"
    good, numbers = state.read_text(), (folder / "common.pt").read_bytes()
    state.write_text(good.replace("24", "34"))
    with pytest.raises(CheckpointError, match="miles.json: the run's own state.*not what was written"):
        load(checkpoint, tmp_path, session)
    state.write_text(good)
    _flip(folder / "common.pt", len(numbers) // 3)
    with pytest.raises(CheckpointError, match="common.pt"):
        load(checkpoint, tmp_path, session)
    (folder / "common.pt").write_bytes(numbers)
    assert load(checkpoint, tmp_path, session) == (1, {"prompts": {"next": 24}})


def test_each_rank_looks_at_its_share_and_together_they_look_at_all(checkpoint, session, tmp_path):
    from miles_local.stored import check_archives
    from miles_megatron import index

    file = save(checkpoint, tmp_path, 1, session) / "__0_0.distcp"
    _flip(file, file.stat().st_size // 2)
    found = 0
    for rank in range(3):
        try:
            check_archives(index.archives(file.parent, rank, 3))
        except CheckpointError:
            found += 1
    assert found == 1


def _raise(target):
    from miles_core.record.publish import write_error

    raise write_error(target, OSError(28, "No space left on device"))


@pytest.fixture
def saved(checkpoint, session, tmp_path):
    save(checkpoint, tmp_path / "run", 7, session)
    return tmp_path / "run"


def test_folders_that_are_no_checkpoint(checkpoint, saved, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for folder, text in {
        tmp_path / "absent": "folder does not exist",
        saved / "iter_0000007": f"one iteration of a checkpoint.*{saved.name}",
        tmp_path / "hf": "Hugging Face directory.*--hf-checkpoint",
        tmp_path / "empty": "not a checkpoint.*--save",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            checkpoint.latest(folder)


def test_trackers_that_lead_nowhere(checkpoint, saved):
    tracker = saved / checkpoint.TRACKER
    for text, message in {
        "9": "iteration 9.*iter_0000007",
        "release": "iteration 0, which does not exist",
        "": "does not name an iteration",
    }.items():
        tracker.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.latest(saved)


def test_an_iteration_under_another_number_is_not_loaded(checkpoint, saved, session):
    """Rollouts would have been counted by the folder's name, and prompts, schedule and weights been those of before."""
    os.rename(saved / "iter_0000007", saved / "iter_0000009")
    (saved / checkpoint.TRACKER).write_text("9\n")
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, saved, session)
    assert caught.value.code == "iteration-misnamed" and "iteration 7" in caught.value.got


def test_every_rank_loads_the_iteration_that_the_first_one_sees(checkpoint, saved, session, monkeypatch):
    """A tracker may change between two looks at it, and half of a model would be of another iteration."""
    save(checkpoint, saved, 9, session)
    monkeypatch.setattr(checkpoint, "of_first_rank", lambda mine: {9: 7}[mine])
    assert load(checkpoint, saved, session)[0] == 7


def test_an_iteration_of_another_trainer_is_not_called_incomplete(checkpoint, tmp_path):
    iteration = tmp_path / "iter_0000007"
    iteration.mkdir()
    (tmp_path / checkpoint.TRACKER).write_text("7\n")
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.latest(tmp_path)
    (iteration / "fsdp.json").write_text("{}")
    with pytest.raises(CheckpointError, match="another trainer's") as caught:
        checkpoint.latest(tmp_path)
    assert caught.value.code == "iteration-incomplete" and str(iteration) in str(caught.value)


@pytest.mark.parametrize("part", ["metadata.json", ".metadata", "common.pt", "miles.json"])
def test_a_half_written_iteration(checkpoint, saved, session, part):
    (saved / "iter_0000007" / part).unlink()
    with pytest.raises(CheckpointError, match=f"incomplete.*{part}"):
        load(checkpoint, saved, session)
    with pytest.raises(CheckpointError, match=f"incomplete.*{part}"):
        load(checkpoint, saved, session, iteration=7)


@pytest.mark.parametrize("part", ["metadata.json", "miles.json", ".metadata", "common.pt"])
def test_a_flipped_bit_is_harmless_or_an_error_of_ours(checkpoint, saved, session, part):
    path = saved / "iter_0000007" / part
    whole, draw = path.read_bytes(), random.Random(part)
    for _ in range(10):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            load(checkpoint, saved, session)
    for text in (b"[]", b"{}", b"null", b"[" * 5000, b'{"sharded_backend": 7}', b""):
        path.write_bytes(text)
        with pytest.raises(CheckpointError):
            load(checkpoint, saved, session)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"9" * 5000, "\u0667".encode(), b"", b"7 8"])
def test_a_tracker_that_names_no_number(checkpoint, saved, text):
    (saved / "latest_checkpointed_iteration.txt").write_bytes(text)
    with pytest.raises(CheckpointError, match="tracker"):
        checkpoint.latest(saved)


@pytest.mark.parametrize("part", [".metadata", "common.pt", "__0_0.distcp", "miles.json"])
def test_a_damaged_file(checkpoint, saved, session, part):
    path = saved / "iter_0000007" / part
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError):
        load(checkpoint, saved, session)


@pytest.mark.parametrize("part", [".metadata", "common.pt"])
def test_a_pickle_that_would_run_code_is_refused(checkpoint, saved, session, tmp_path, part):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (marker,)

    path = saved / "iter_0000007" / part
    if part == ".metadata":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"iteration": Evil()}, path)
    with pytest.raises(CheckpointError):
        load(checkpoint, saved, session)
    assert not marker.exists()


def test_another_architecture(checkpoint, session, saved, hf_model, port):
    other, _ = port(hf_model(moe=True))
    with pytest.raises(CheckpointError, match="another architecture.*--hf-checkpoint"):
        checkpoint.load(saved, {"actor": ([other], None, None)})


def test_another_model_of_the_architecture(checkpoint, saved, hf_model, port):
    other, _ = port(hf_model(intermediate_size=128))
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight \[3, 192, 64\] where the model has \[3, 256, 64\]"):
        checkpoint.load(saved, {"actor": ([other], None, None)})


def test_weights_that_the_model_does_not_have(checkpoint, hf_model, port, tmp_path):
    """They would be lost at the next save."""
    model, _ = port(hf_model())
    model.probe = torch.nn.Linear(4, 2, bias=False)
    checkpoint.save(tmp_path, 1, {"actor": ([model], None, None)})
    del model.probe
    with pytest.raises(CheckpointError, match=r"does not have \(got probe.weight\).*enable the plugin"):
        checkpoint.load(tmp_path, {"actor": ([model], None, None)})


def test_optimizer_state_of_another_model(checkpoint, session, saved):
    """An index that lacks a tensor of the optimizer, and one in which it has another shape."""
    from miles_local import checkpoint_index
    from miles_megatron import index

    held = checkpoint_index.read(saved / "iter_0000007" / ".metadata")
    sharded = checkpoint.sharded_entries(session.chunks, session.optimizer, loading=True)
    index.check(held, sharded, saved)
    name = next(name for name in held if name.startswith("optimizer.") and "exp_avg" in name)
    for changed, words in (({k: v for k, v in held.items() if k != name}, "no optimizer"),
                           ({**held, name: (7,)}, r"optimizer\S* \[7\] where the model has")):
        with pytest.raises(CheckpointError, match=f"optimizer state belongs to another model.*{words}"):
            index.check(changed, sharded, saved)


def test_saving_a_tiny_model_is_fast(checkpoint, session, tmp_path):
    import time

    save(checkpoint, tmp_path, 1, session)
    gc.freeze()  # as a run does: Megatron-core collects garbage to save, and would go through all that is imported
    begin = time.process_time()
    save(checkpoint, tmp_path, 2, session)
    assert time.process_time() - begin < 0.5
    shutil.rmtree(tmp_path)
