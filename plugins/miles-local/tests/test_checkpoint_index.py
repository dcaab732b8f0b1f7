"""A checkpoint's index from a stranger or a failing disk: an index of tensors, or one error; nothing of it is run."""

import dataclasses
import pickle
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_local import checkpoint_index
from torch.distributed.checkpoint import filesystem, metadata, planner

from miles_core.errors import CheckpointError


def tensor(*shape):
    chunk = metadata.ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return metadata.TensorStorageMetadata(metadata.TensorProperties(torch.bfloat16), torch.Size(shape), [chunk])


def whole(**entries):
    """An index as torch writes it."""
    stored = {metadata.MetadataIndex(name, torch.Size([0])): filesystem._StorageInfo("__0_0.distcp", 10 * i, 10)
              for i, name in enumerate(entries)}
    return metadata.Metadata(entries, {"plan": planner.SavePlan([])}, stored,
                             metadata.StorageMeta(Path("/somewhere"), "a"), "1")


GOOD = pickle.dumps(whole(a=tensor(3, 4), b=tensor(7)))
CLASS = {kind: f"c{kind.__module__}\n{kind.__qualname__}\n".encode() for kind in (
    metadata.Metadata, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, torch.Size, filesystem._StorageInfo)}
CLASS[torch.float32] = b"ctorch\nfloat32\n"
SLOTS = b"(N}X\x05\x00\x00\x00probeK\x01stb."
"""BUILD with a state of (None, {"probe": 1}), which sets attributes by setattr."""


def call(module, name, *arguments):
    """A pickle that calls module.name."""
    return b"c" + f"{module}\n{name}\n".encode() + pickle.dumps(arguments, 0)[:-1] + b"R."


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_torch_writes_is_read(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(GOOD)
    assert checkpoint_index.read(path) == {"a": (3, 4), "b": (7,)}
    assert checkpoint_index.places(path) == [(tmp_path / "__0_0.distcp", 0, 10), (tmp_path / "__0_0.distcp", 10, 10)]


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_what_another_python_wrote_is_read(tmp_path, module):
    """3.13 says where its paths are defined by another name than the ones before and after it."""
    path, pickled = tmp_path / ".metadata", pickle.dumps(whole(a=tensor(3, 4)), 2)
    path.write_bytes(re.sub(rb"cpathlib(\._local)?\n", b"c" + module + b"\n", pickled))
    assert module in path.read_bytes() and checkpoint_index.read(path) == {"a": (3, 4)}


@pytest.mark.parametrize("pickled", [
    *(text + SLOTS for text in CLASS.values()),
    CLASS[metadata._MEM_FORMAT_ENCODING] + b"K\x00\x85R" + SLOTS,
    CLASS[torch.Size] + b"(K\x01t\x85R}X\x05\x00\x00\x00probeK\x01sb.",
    call("torch.distributed.checkpoint.filesystem", "FileSystemWriter", "written"),
    call("torch.distributed.checkpoint.filesystem", "FileSystemReader", "read"),
    call("torch.distributed.checkpoint.metadata", "os.system", "true"),
    call("torch.distributed.checkpoint.planner", "WriteItem.tensor_storage_size"),
    call("megatron.core.dist_checkpointing.strategies.torch", "TorchDistSaveShardedStrategy", "torch_dist", 1),
    call("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), call("builtins", "eval", "1"),
    call("collections", "namedtuple", "a", "b"), call("torch", "load", "x"), call("torch.storage", "UntypedStorage", 9),
    b"\x80\x04\x82\x01.", b"Pid\n.", b"",
])  # fmt: skip
def test_a_crafted_pickle_is_refused_and_changes_nothing(tmp_path, pickled):
    path = tmp_path / ".metadata"
    path.write_bytes(pickled)
    for read in (checkpoint_index.read, checkpoint_index.places):
        with pytest.raises(CheckpointError):
            read(path)
    assert not any(hasattr(kind, "probe") for kind in CLASS)
    assert not any(hasattr(kind, "probe") for kind in checkpoint_index._MetadataReader.kinds.values())


def test_nothing_is_run_on_the_way(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / ".metadata"
    for bad in (Touch(marker), whole(a=Touch(marker)), dataclasses.replace(whole(), planner_data=[Touch(marker)])):
        path.write_bytes(pickle.dumps(bad))
        with pytest.raises(CheckpointError, match="touch"):
            checkpoint_index.read(path)
        assert not marker.exists()


def test_bytes_with_the_looks_of_a_tensor_are_refused(tmp_path):
    """torch would unpickle them with everything allowed."""
    entry = metadata.BytesStorageMetadata()
    vars(entry).update(chunks=[], size=torch.Size([1]))
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(whole(a=entry)))
    with pytest.raises(CheckpointError, match="something other than tensors"):
        checkpoint_index.read(path)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3),
       st.integers(0, len(GOOD)) | st.just(len(GOOD)))
def test_whatever_becomes_of_its_bytes_it_is_an_index_or_one_error(tmp_path_factory, changes, length):
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(data[:length])
    for read in (checkpoint_index.read, checkpoint_index.places):
        try:
            read(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_a_length_beyond_the_file_is_no_reservation_of_memory(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.")
    with pytest.raises(CheckpointError):
        checkpoint_index.read(path)
