"""Checkpoints that are not what was written, folders that name none, and what an export has beside the module."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from miles_fsdp.ranks import Ranks
from miles_local.stored import digest
from miles_testing.tiny import run_file, tiny_checkpoint
from safetensors.torch import load_file, save_file

from miles_core.build import trainer_part
from miles_core.errors import CheckpointError
from miles_core.plugins.plan import prepare
from miles_core.types import Rank

LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture
def trainer(tmp_path):
    """(*flags) -> a trainer of this process, and what `load` answers; one at a time, as the process group is one."""
    started = []

    def make(*flags, folder=None):
        path = run_file(tmp_path / "run.toml", [], {}, {}, checkpoint=folder)
        plan = prepare(path, ["--trainer", "fsdp", "--trainer-host", "thread", *map(str, flags)])
        for one in started:
            one.close()
        started[:] = [trainer_part(plan.selected, plan.config, Rank())]
        return started[0], started[0].load()

    yield make
    for one in started:
        one.close()


@pytest.fixture
def saved(trainer, tmp_path):
    """The folder of a checkpoint of 2 rollouts."""
    trainer()[0].save(tmp_path / "ck", 2, {"prompts": {"next": 24}})
    return tmp_path / "ck"


def flip(path, share):
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 16
    path.write_bytes(data)


def test_a_full_disk_is_an_error_of_ours_and_leaves_the_older_checkpoint(trainer, saved, monkeypatch):
    """torch raises what no run catches, and says of it where, not what."""
    ours, _ = trainer("--load", saved)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(torch, "save", full)
        ours.save(saved, 4, {})
    assert caught.value.code == "checkpoint-not-written" and "iter_0000004" in str(caught.value)
    assert trainer("--load", saved)[1].rollout_id == 2


def refused(trainer, *flags):
    with pytest.raises(CheckpointError) as caught:
        trainer(*flags)
    return caught.value


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_bit_that_flipped_on_the_disk_is_not_loaded(trainer, saved, share):
    """torch reads such a file without a word."""
    file = saved / "iter_0000002" / "tensors" / "__0_0.distcp"
    flip(file, share)
    error = refused(trainer, "--load", saved)
    assert error.code == "checkpoint-bytes-changed" and str(file) in str(error)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_bit_that_flipped_in_the_index_is_not_loaded(trainer, saved, share):
    flip(saved / "iter_0000002" / "tensors" / ".metadata", share)
    error = refused(trainer, "--load", saved)
    assert error.code == "fsdp-checkpoint-unreadable" and ".metadata" in str(error)


class Touch:
    """Runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def crafted(saved, change):
    """Change the index as one would who can also work out digests."""
    folder = saved / "iter_0000002"
    index, state = folder / "tensors" / ".metadata", folder / "fsdp.json"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))
    written = json.loads(state.read_text())
    written["index"] = hashlib.sha256(index.read_bytes()).hexdigest()[:16]
    own = {name: one for name, one in written.items() if name not in ("base", "digest")}
    state.write_text(json.dumps({**written, "digest": digest(own)}))


def test_an_index_of_a_stranger_runs_nothing(trainer, saved, tmp_path):
    marker = tmp_path / "ran"
    crafted(saved, lambda metadata: setattr(metadata, "planner_data", [Touch(marker)]))
    assert refused(trainer, "--load", saved).code == "checkpoint-index-unreadable" and not marker.exists()


@pytest.mark.parametrize("which", ["actor.model.model.model.norm.weight",
                                   "actor.optimizer.state.model.model.norm.weight.exp_avg"])
def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(trainer, saved, tmp_path, which):
    """torch would read it with everything allowed."""
    marker = tmp_path / "ran"

    def change(metadata):
        entries = metadata.state_dict_metadata
        groups = next(name for name in entries if "param_groups" in name)
        place = next(one for index, one in metadata.storage_data.items() if index.fqn == groups)
        entries[which] = entries[groups]
        metadata.storage_data = {(dataclasses.replace(index, offset=None, index=None) if index.fqn == which else index):
                                 (place if index.fqn == which else one) for index, one in metadata.storage_data.items()}
        file = saved / "iter_0000002" / "tensors" / place.relative_path
        data, evil = bytearray(file.read_bytes()), io.BytesIO()
        torch.save(Touch(marker), evil)
        place.offset, place.length = len(data), len(evil.getvalue())
        file.write_bytes(data + evil.getvalue())

    crafted(saved, change)
    assert which in str(refused(trainer, "--load", saved)) and not marker.exists()


def test_a_state_that_is_not_what_was_written_is_not_loaded(trainer, saved):
    state = saved / "iter_0000002" / "fsdp.json"
    text = state.read_text()
    state.write_text(text.replace('"next": 24', '"next": 34'))
    error = refused(trainer, "--load", saved)
    assert error.code == "checkpoint-state-changed" and str(state) in str(error)
    state.write_text(text)
    assert trainer("--load", saved)[1].state == {"prompts": {"next": 24}}


def test_iterations_that_nothing_names_are_no_empty_folder(trainer, saved):
    """A run that began anew there would write over them. A sole one is what a kill leaves before the tracker is."""
    (saved / LATEST).unlink()
    assert trainer("--load", saved)[1].rollout_id == 2
    shutil.copytree(saved / "iter_0000002", saved / "iter_0000004")
    error = refused(trainer, "--load", saved)
    assert error.code == "fsdp-checkpoint-missing" and LATEST in str(error) and "iter_0000004" in str(error)


def test_an_iteration_under_another_number_is_not_loaded(trainer, saved):
    """Rollouts would have been counted by the folder's name, and prompts, schedule and weights been those of before."""
    os.rename(saved / "iter_0000002", saved / "iter_0000004")
    (saved / LATEST).write_text("4\n")
    error = refused(trainer, "--load", saved)
    assert error.code == "fsdp-checkpoint-unreadable" and "of iteration 2" in error.got


def test_every_rank_loads_the_iteration_that_the_first_one_sees(trainer, saved, monkeypatch):
    """A tracker may change between two looks at it, and half of a model would be of another iteration."""
    shutil.copytree(saved / "iter_0000002", saved / "iter_0000004")
    (saved / LATEST).write_text("4\n")
    monkeypatch.setattr(Ranks, "gathered", lambda self, value: [2, value])
    assert trainer("--load", saved)[1].rollout_id == 2


def test_a_resumed_run_exports_what_lies_beside_the_weights_that_it_began_with(trainer, tmp_path):
    """Tokenizer and generation config were those of --hf-checkpoint from then on."""
    warm = shutil.copytree(tiny_checkpoint(), tmp_path / "warm")
    (warm / "generation_config.json").write_text('{"eos_token_id": 257}')
    first, _ = trainer("--ref-load", warm)
    first.save(tmp_path / "ck", 1, {})
    resumed, _ = trainer("--ref-load", warm, "--load", tmp_path / "ck")
    resumed.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 257}
    shutil.rmtree(warm)  # only needed to start
    trainer("--load", tmp_path / "ck")[0].export(tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_an_export_keeps_what_is_no_part_of_the_model(trainer, tmp_path, caplog):
    """A tied output layer that is written out is part of it, and has to move with the embedding."""
    folder = tiny_checkpoint(tmp_path / "model")
    own = load_file(folder / "model.safetensors")
    more = {"mtp.fc.weight": torch.randn(3, 3), "visual.proj.weight": torch.randn(3, 2, dtype=torch.bfloat16)}
    tied = {"lm_head.weight": own["model.embed_tokens.weight"].clone()}
    save_file(own | more | tied, folder / "model.safetensors", {"format": "pt"})
    ours, _ = trainer(folder=folder)
    with torch.no_grad():
        ours.models.actor.model.get_input_embeddings().weight.mul_(2)
    ours.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == own.keys() | more.keys()
    assert all(written[name].dtype == one.dtype and torch.equal(written[name], one) for name, one in more.items())
    assert torch.equal(written["model.embed_tokens.weight"], 2 * own["model.embed_tokens.weight"])
    assert not {record.name for record in caplog.records if "leaves out" in record.getMessage()}


def test_the_text_of_a_larger_model_has_the_names_of_its_files(trainer, tmp_path):
    """transformers reads Llama 4's without what the names begin with, and writes them so; the model itself, and
    engines, find nothing under such names."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"intermediate_size_mlp": 48, "head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 2,
                    "vocab_size": 264, "pad_token_id": 256, "eos_token_id": 258, "tie_word_embeddings": False}
    tower = sizes | {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
                     "projector_output_dim": 32}
    folder = tiny_checkpoint(tmp_path / "model")
    Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=tower)).save_pretrained(folder)
    own = load_file(folder / "model.safetensors")
    ours, _ = trainer(folder=folder)
    sent = {name for name, _ in ours.weights()}
    assert sent == {name for name in own if name.startswith("language_model.")} != set(own)
    ours.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == own.keys() and all(torch.equal(written[name], one) for name, one in own.items())
