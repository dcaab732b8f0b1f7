"""Weights from trainer ranks in a process of their own to the local engine, by memory that both see."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from miles_local import shared_memory as shared
from miles_local.engine import LocalEngine
from miles_local.weights import read_tensors
from miles_testing import tiny_checkpoint

from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig
from miles_core.errors import DiedError, EngineError, MilesError, SyncError
from miles_core.hosts import ThreadHost, process_group
from miles_core.types import Rank


class Trainer:
    """A rank that has a checkpoint's tensors; every version adds its number to them."""

    def __init__(self, folder, fault, rank: Rank):
        self.folder, self.fault, self.rank, self.sender = folder, fault, rank, None

    def connect(self, sender):
        self.sender = sender
        sender.open(self.rank)

    def send(self, version):
        return self.sender.send(self._stream(version), version)

    def _stream(self, version):
        for i, (name, tensor) in enumerate(read_tensors(self.folder, {"lm_head.weight"})):
            if self.fault == "dies" and i == 5:
                os._exit(3)
            if self.fault == "raises" and i == 5:
                raise ZeroDivisionError("in the stream")
            yield name, (tensor + version)[..., 1:] if self.fault == "shape" and i == 5 else tensor + version


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random checkpoint, `qwen3/`."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder / "qwen3")
    return folder


def synced(tiny, ranks=0, fault=None, dtype="float32", limit=20_000, versions=(1, 2)):
    """Whether the engine holds what was sent last, the figures, and the error if there was one.

    Args:
        ranks: processes of the trainer; 0 for a thread, which takes the same way and starts at once.
    """
    folder = tiny / "qwen3"
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(folder)), rollout=Rollout(engine_dtype=dtype),
                       perf=Perf(bf16=False, update_weight_buffer_size=limit, weight_sync_timeout=20.0))

    async def main():
        engine = LocalEngine(folder, dtype=getattr(torch, dtype), random_init=True)
        trainer = (process_group("trainer", ranks, Trainer, folder, fault) if ranks else
                   ThreadHost("trainer", Trainer, folder, fault, Rank()))
        sync = shared.SharedMemory(config)
        await engine.start()
        try:
            figures = [await sync.sync(trainer, engine, version) for version in versions]
            stream = ((name, tensor + versions[-1]) for name, tensor in read_tensors(folder, {"lm_head.weight"}))
            sent, held = engine._decoder.stage(stream).slots(), engine._weights.slots()
            return sent.keys() == held.keys() and all(torch.equal(sent[n][0], held[n][0]) for n in sent), figures, None
        except (MilesError, ZeroDivisionError) as error:
            return engine.version, engine._paused, error
        finally:
            await trainer.close()
            await engine.stop()
            assert not Path(sync._folder).exists(), "nothing is left behind"

    return asyncio.run(main())


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_engine_has_every_bit_that_the_trainer_sent(tiny, ranks):
    equal, figures, error = synced(tiny, ranks)
    assert error is None and equal
    tensors = dict(read_tensors(tiny / "qwen3", {"lm_head.weight"}))
    assert figures[1]["tensors"] == len(tensors)
    assert figures[1]["bytes"] == 4 * sum(tensor.numel() for tensor in tensors.values())


def test_the_dtype_of_the_engine_travels(tiny):
    equal, figures, error = synced(tiny, dtype="bfloat16", versions=(1,))
    assert error is None and equal
    tensors = read_tensors(tiny / "qwen3", {"lm_head.weight"})
    assert figures[0]["bytes"] == 2 * sum(tensor.numel() for _, tensor in tensors)


@pytest.mark.parametrize(("fault", "kind", "words", "ranks"), [
    ("dies", DiedError, "died", 1), ("raises", ZeroDivisionError, "in the stream", 0),
    ("shape", EngineError, "wrong shape", 0),
])
def test_a_sync_that_fails_names_its_cause_and_leaves_the_engine_paused(tiny, fault, kind, words, ranks):
    version, paused, error = synced(tiny, ranks, fault)
    assert isinstance(error, kind) and words in str(error)
    assert version == 0 and paused


def test_no_room_for_a_bucket_is_said_before_it_is_written(tmp_path):
    sender = shared.SharedSender(None, str(tmp_path))
    with pytest.raises(SyncError, match="bytes free"):
        sender._memory(0, 2**60, torch.device("cpu"))


def test_a_folder_that_another_user_made_between_two_syncs_is_not_used(tmp_path, monkeypatch):
    """Its name can be seen in /dev/shm; who owns the folder would say which file is mapped, and removed."""
    folder = tmp_path / "miles-seen"
    with shared._listening(folder, 1.0):
        pass
    folder.mkdir(0o777)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(SyncError) as refused, shared._listening(folder, 1.0):
        pass
    assert refused.value.code == "weights-folder-taken" and folder.is_dir()
