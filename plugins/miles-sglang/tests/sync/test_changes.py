"""What changed since the last version, written into a copy of the checkpoint, gives the new one bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_sglang.server_extension.miles_weights import overwrite, patch
from miles_sglang.sync.disk import Tally, change
from safetensors.torch import load_file, save_file

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


@st.composite
def versions(draw):
    """(old, new) tensors by name."""
    found = {}
    for i in range(draw(st.integers(1, 4))):
        numel, dtype = draw(st.integers(1, 40)), draw(st.sampled_from(DTYPES))
        old = torch.randint(0, 100, (numel,)).to(dtype)
        new = old.clone()
        for at in draw(st.lists(st.integers(0, numel - 1), max_size=numel)):
            new[at] = draw(st.integers(0, 100))
        found[f"model.layers.{i}.weight"] = (old, new)
    return found


@settings(max_examples=40, deadline=None)
@given(tensors=versions())
def test_changes_turn_the_old_version_into_the_new_one(tensors, tmp_path_factory):
    copy, changes = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("changes")
    save_file({name: old.clone() for name, (old, _) in tensors.items()}, copy / "model.safetensors")
    tally, held = Tally(), {}
    for name, (old, new) in tensors.items():
        before = (old != new).sum().item()
        at = tally.changed
        held |= change(name, old, new, tally)
        assert tally.changed - at == before and torch.equal(old, new), "it is the base of the next"
    if held:
        save_file(held, changes / "changes-00000.safetensors")
        overwrite([changes / "changes-00000.safetensors"], copy)
    assert tally.bytes <= sum(new.numel() * new.element_size() for _, new in tensors.values())
    found = load_file(copy / "model.safetensors")
    assert all(torch.equal(found[name], new) for name, (_, new) in tensors.items())


def test_nan_and_negative_zero_are_bits_like_others():
    old, new = torch.tensor([0.0, float("nan"), 1.0, 2.0, 3.0]), torch.tensor([-0.0, float("nan"), 1.0, 2.0, 3.0])
    found = change("a", old, new, Tally())
    assert found["a#positions"].tolist() == [0] and str(found["a#values"].item()) == "-0.0"


def test_a_copy_of_another_version_is_refused_and_a_complete_one_is_made_once(tmp_path):
    folder, copy = tmp_path / "version-3", tmp_path / "copy"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="has version None"):
        patch(str(folder), str(copy), 4, 3)
    patch(str(folder), str(copy), 3, None)
    (folder / "model.safetensors").unlink()
    patch(str(folder), str(copy), 3, None)  # the second rank of a host finds it done
    assert load_file(copy / "model.safetensors")["a"].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="has version 3, and the change starts from 7"):
        patch(str(folder), str(copy), 8, 7)


def test_a_copy_that_was_left_half_written_has_no_version(tmp_path):
    folder, copy, changes = tmp_path / "version-1", tmp_path / "copy", tmp_path / "version-2"
    for each in (folder, changes):
        each.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    save_file({"b": torch.ones(3)}, changes / "changes-00000.safetensors")  # a tensor that is not there
    patch(str(folder), str(copy), 1, None)
    with pytest.raises(KeyError):
        patch(str(changes), str(copy), 2, 1)
    with pytest.raises(ValueError, match="has version None"):
        patch(str(changes), str(copy), 2, 1)
