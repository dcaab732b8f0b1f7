import json
import os
from dataclasses import replace

import pytest
import torch
from grouped_layers import grouped

from miles_core.errors import CheckpointError


@pytest.fixture(scope="module")
def weights(megatron):
    from miles_megatron import weights

    return weights


def on_disk(folder):
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_round_trip_is_bit_exact(hf_model, port, weights, tmp_path, kind):
    hf = hf_model(**kind)
    ours, weight_map = port(hf)
    hf.save_pretrained(tmp_path)
    expected = on_disk(tmp_path)
    streamed = dict(weights.hf_stream(ours, weight_map))
    assert streamed.keys() == expected.keys()
    for name, tensor in streamed.items():
        assert torch.equal(tensor, expected[name]) and not tensor.requires_grad, name


def test_grouped_experts_have_the_names_of_single_ones(hf_model, port, weights):
    """Stream and loading know them."""
    ours, weight_map = port(hf_model(moe=True))
    expected = dict(weights.hf_stream(ours, weight_map))
    grouped(ours)
    assert "decoder.layers.0.mlp.experts.linear_fc2.weight7" in dict(ours.named_parameters())
    streamed = dict(weights.hf_stream(ours, weight_map))
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in expected.items())


def test_the_stream_is_views_where_it_can_be(hf_model, port, weights):
    ours, weight_map = port(hf_model())
    storages = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    views = {n for n, t in weights.hf_stream(ours, weight_map) if t.untyped_storage().data_ptr() in storages}
    assert "model.layers.0.mlp.up_proj.weight" in views and "model.embed_tokens.weight" in views


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000], ids=["one-file", "shards"])
def test_export_is_what_transformers_loads(hf_model, port, weights, tmp_path, shard_bytes):
    from transformers import AutoModelForCausalLM

    hf = hf_model(moe=True)
    ours, weight_map = port(hf)
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    hf.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    for _ in range(2):  # the second replaces the first
        weights.export_hf(target, source, weights.hf_stream(ours, weight_map), torch.float32, shard_bytes=shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(target)
    for (name, a), (_, b) in zip(hf.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert (target / "tokenizer.json").exists() and not list(target.parent.glob(".tmp*"))
    shards = list(target.glob("*.safetensors"))
    assert (len(shards) > 1) == (target / "model.safetensors.index.json").exists() == (shard_bytes < 10**6)
    fresh, _ = port(again)
    weights.load_hf(target, fresh, weight_map)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), ours.parameters(), strict=True))


def test_export_casts(hf_model, port, weights, tmp_path):
    hf = hf_model()
    ours, weight_map = port(hf)
    hf.save_pretrained(tmp_path / "s")
    weights.export_hf(tmp_path / "t", tmp_path / "s", weights.hf_stream(ours, weight_map), torch.bfloat16)
    assert {t.dtype for t in on_disk(tmp_path / "t").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "t" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_full_disk_leaves_the_older_export(hf_model, port, weights, tmp_path, monkeypatch):
    hf = hf_model()
    ours, weight_map = port(hf)
    hf.save_pretrained(tmp_path / "s")
    export = lambda: weights.export_hf(tmp_path / "t", tmp_path / "s", weights.hf_stream(ours, weight_map), torch.float32)  # noqa: E731, E501
    export()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        export()
    assert len(on_disk(tmp_path / "t")) == len(hf.state_dict()) and not (tmp_path / ".tmp-t").exists()


def broken(hf, folder, change):
    from safetensors.torch import save_file

    hf.save_pretrained(folder)
    tensors = on_disk(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_all_that_is_wrong_is_in_one_message_and_nothing_changes(hf_model, port, weights, tmp_path):
    hf = hf_model()
    ours, weight_map = port(hf)

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.surprise"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(96, 64)

    broken(hf, tmp_path, change)
    before = [p.clone() for p in ours.parameters()]
    with pytest.raises(CheckpointError) as error:
        weights.load_hf(tmp_path, ours, weight_map)
    for text in ("1 missing: model.norm.weight", "1 unexpected: model.layers.0.surprise",
                 "1 misshapen: lm_head.weight [96, 64] where the config says [97, 64]"):  # fmt: skip
        assert text in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


def test_optional_tensors_are_there_together_or_start_as_drawn(hf_model, port, weights, tmp_path, caplog):
    """None of them: announced and untouched. Some of them: the others are missing."""
    from safetensors.torch import save_file

    ours, weight_map = port(hf_model())
    optional = tuple(replace(rule, optional=rule.megatron.endswith("layernorm.weight")) for rule in weight_map.rules)
    weight_map = replace(weight_map, rules=optional)
    names = [n for _, rule, hf in weights.instances(weight_map) if rule.optional for n in hf]
    whole = {name: tensor.clone() for name, tensor in weights.hf_stream(ours, weight_map)}
    save_file({name: tensor + 1 for name, tensor in whole.items() if name not in names},
              tmp_path / "model.safetensors")
    weights.load_hf(tmp_path, ours, weight_map)
    assert "holds no tensors for decoder.final_layernorm.weight" in caplog.text
    for name, tensor in weights.hf_stream(ours, weight_map):
        assert torch.equal(tensor, whole[name] + (name not in names)), name
    save_file({name: tensor for name, tensor in whole.items() if name not in names[1:]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{len(names) - 1} missing"):
        weights.load_hf(tmp_path, ours, weight_map)


def test_a_tied_head_that_differs_is_refused(hf_model, port, weights, tmp_path):
    hf = hf_model(tied=True)
    ours, weight_map = port(hf)
    broken(hf, tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight") as caught:
        weights.load_hf(tmp_path, ours, weight_map)
    assert str(tmp_path) in str(caught.value)


def test_a_critic_leaves_a_head_of_its_own_alone(hf_model, port, weights, tmp_path):
    from miles_megatron import shards, value

    hf = hf_model()
    _, weight_map = port(hf)
    broken(hf, tmp_path, lambda tensors: None)
    files = shards.tensor_files(tmp_path)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= files.keys()
    weights.check_tied(tmp_path, files, value.weight_map(weight_map))


def test_one_file_beside_the_same_weights_under_other_names(tmp_path):
    from miles_megatron import shards
    from safetensors.torch import save_file

    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert shards.tensor_files(tmp_path) == {"model.norm.weight": tmp_path / "model.safetensors"}


def test_what_another_file_has_of_the_same_name_does_not_count(tmp_path):
    """For trainer and engine alike; transformers reads model.safetensors alone."""
    from miles_local.weights import read_tensors
    from miles_megatron import shards
    from safetensors.torch import save_file

    for name in ("a.safetensors", "model.safetensors", "model_old.safetensors"):
        save_file({"norm.weight": torch.full((4,), float(name == "model.safetensors")), name: torch.ones(1)},
                  tmp_path / name)
    assert shards.tensor_files(tmp_path)["norm.weight"] == tmp_path / "model.safetensors"
    assert len(shards.tensor_files(tmp_path)) == 4 and dict(read_tensors(tmp_path))["norm.weight"].all()


def test_a_tied_head_written_out_is_ignored(hf_model, port, weights, tmp_path):
    hf = hf_model(tied=True)
    ours, weight_map = port(hf)
    broken(hf, tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights.load_hf(tmp_path, ours, weight_map)


def test_folders_without_weights(hf_model, port, weights, tmp_path):
    ours, weight_map = port(hf_model())
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="no .safetensors files"):
            weights.load_hf(folder, ours, weight_map)
    (tmp_path / "model.safetensors").write_bytes(b"junk" * 10)
    with pytest.raises(CheckpointError, match="cannot be read"):
        weights.load_hf(tmp_path, ours, weight_map)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    with pytest.raises(CheckpointError, match="absent.safetensors"):
        weights.load_hf(tmp_path, ours, weight_map)


def test_layers_that_stay_behind_are_counted_where_config_json_counts_them(weights, tmp_path):
    """Of a text model inside another, inside; engines look for the layers there."""
    from miles_megatron.specs import WeightMap

    weight_map = WeightMap((), heads=1, groups=1, head_dim=1, left=("mtp.",), left_counts=("mtp_num_hidden_layers",))
    text = {"mtp_num_hidden_layers": 1, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    keys = weights.export_keys(tmp_path, weight_map)
    assert keys["text_config"] == {**text, "mtp_num_hidden_layers": 0} and "mtp_num_hidden_layers" not in keys
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert weights.export_keys(tmp_path, weight_map)["mtp_num_hidden_layers"] == 0
