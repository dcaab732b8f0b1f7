"""Checkpoints that a plain Megatron script wrote (plain_megatron.py): weights to the bit, nothing of it is run."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_megatron import save
from safetensors.torch import load_file

from miles_core.errors import CheckpointError
from miles_core.plugins.plan import prepare

SCRIPT = Path(__file__).with_name("plain_megatron.py")
WRITTEN = {
    "dense": ({}, {}),
    "dense-tied-fused-release": ({"tied": True}, {"fused": True, "tracker": "release", "folder": "release"}),
    "dense-apart": ({}, {"apart": True, "tracker": "release"}),
    "moe": ({"moe": True}, {}),
    "moe-fused-apart": ({"moe": True}, {"fused": True, "apart": True}),
    "moe-single": ({"moe": True}, {"fused": True, "singleton": True, "folder": "iter_0000400", "tracker": "400"}),
}
CUT = {"dense-tp2": ({}, {"tensor": 2, "fused": True}), "moe-tp2": ({"moe": True}, {"tensor": 2, "divisible": 1000})}


@pytest.fixture(scope="module")
def written(hf_model, tmp_path_factory):
    """(changes to the model, what the script writes) -> the Hugging Face folder, the checkpoint."""

    def write(changes, options):
        root = tmp_path_factory.mktemp("written")
        hf_model(**changes).save_pretrained(root / "hf")
        if options.get("tensor", 1) == 1:
            save(root / "hf", root / "dist", options)
        else:
            _on_ranks(options["tensor"], root, options)
        return root / "hf", root / "dist"

    return write


def _on_ranks(count, root, options):
    shared = os.environ | {"WORLD_SIZE": str(count), "MEET": f"file://{root}/meet"}
    ranks = [subprocess.Popen([sys.executable, SCRIPT, root / "hf", root / "dist", json.dumps(options)],
                              env=shared | {"RANK": str(rank)}) for rank in range(count)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()


def blank(folder, port, hf_model, changes):
    """The model with other weights, and those that it should get."""
    from transformers import AutoModelForCausalLM

    ours, _ = port(hf_model(**changes))
    want, _ = port(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    return ours, want


@pytest.mark.parametrize("name", [*WRITTEN, *(pytest.param(name, marks=pytest.mark.full) for name in CUT)])
def test_weights_are_equal_to_the_bit(written, hf_model, port, name):
    from miles_megatron import checkpoint

    changes, options = {**WRITTEN, **CUT}[name]
    hf, folder = written(changes, options)
    ours, want = blank(hf, port, hf_model, changes)
    assert checkpoint.of_another_program(folder)
    assert checkpoint.load(folder, {"actor": ([ours], None, None)}) == (400 if name == "moe-single" else 0, {})
    for (key, parameter), expected in zip(ours.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(parameter, expected), key


class Evil:
    """Touches a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_objects_in_it_are_left_alone(written, hf_model, port, tmp_path):
    """common.pt may hold what it likes; an object in the place of a weight is refused."""
    from miles_local import checkpoint_index
    from miles_megatron import checkpoint

    hf, folder = written({}, {})
    ours, want = blank(hf, port, hf_model, {})
    common, marker = folder / "iter_0000000" / "common.pt", tmp_path / "ran"
    torch.save({"checkpoint_version": 3.0, "args": Evil(marker)}, common)
    checkpoint.load(folder, {"actor": ([ours], None, None)})
    assert torch.equal(ours.output_weight, want.output_weight) and not marker.exists()
    read = folder / "iter_0000000" / ".metadata"
    metadata = pickle.loads(read.read_bytes())
    kept = next(entry for name, entry in metadata.state_dict_metadata.items() if "extra_state" in name)
    metadata.state_dict_metadata["output_layer.weight"] = kept
    read.write_bytes(pickle.dumps(metadata))
    assert "output_layer.weight" not in checkpoint_index.read(read, tensors_only=False)
    with pytest.raises(CheckpointError, match=r"no output_layer\.weight"):
        checkpoint.load(folder, {"actor": ([ours], None, None)})


def test_an_iteration_of_ours_that_lost_its_state_is_not_taken_for_one(written, hf_model, port):
    """A resume would begin anew without a word."""
    from miles_megatron import checkpoint

    hf, folder = written({}, {})
    ours, _ = blank(hf, port, hf_model, {})
    torch.save({"scheduler": {}}, folder / "iter_0000000" / "common.pt")
    with pytest.raises(CheckpointError, match=r"incomplete.*miles\.json"):
        checkpoint.of_another_program(folder)


def test_a_smaller_vocabulary_is_another_model(written, hf_model, port):
    from miles_megatron import checkpoint

    _, folder = written({"vocab_size": 50}, {"divisible": 1})
    ours, _ = port(hf_model())
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight \[50, 64\] where the model has \[97, 64\]"):
        checkpoint.load(folder, {"actor": ([ours], None, None)})


RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
       "--rollout-max-response-len", "41", "--no-bf16", "--trainer-host", "process")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
def test_a_run_starts_from_it_at_rollout_0(written, one, flag):
    hf, folder = written(*WRITTEN["moe-single"])
    plan = prepare(None, ["--hf-checkpoint", str(hf), *RUN, flag, str(folder)])
    text = plan.to_text()
    assert "starts fresh, from the weights" in text and ("another program" in text) == (flag == "--load")
    weights = one.train(plan, [])["weights"]
    stored = {name: tensor for file in hf.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert weights.keys() == stored.keys()
    assert all((weights[name] == tensor.numpy()).all() for name, tensor in stored.items())


@pytest.mark.full
def test_it_becomes_a_hugging_face_folder(written, convert, tmp_path):
    hf, folder = written(*WRITTEN["moe-fused-apart"])
    convert("dist-to-hf", folder, tmp_path / "back", "--hf-checkpoint", hf)
    before, after = (load_file(where / "model.safetensors") for where in (hf, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
