"""Experts that share the outer half of their adapters, A of gate and up and B of down: several ranks, and files."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from miles_lora import peft
from miles_lora.merging import Base
from miles_lora.targets import names_of
from miles_megatron import cpu
from miles_megatron.testing.ranks import batches, distance
from safetensors.torch import load_file, save_file

from miles_core.build import trainer_part
from miles_core.errors import CheckpointError, ConfigError, SyncError
from miles_core.types import Rank

pytestmark = pytest.mark.xdist_group("lora")  # one worker: the processes are started once

LORA = ("--lora-rank", 4, "--lora-alpha", 12)  # as conftest.py makes PEFT directories
SHARED = (*LORA, "--experts-shared-outer-loras")
STILL = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)
TENSOR = (*TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel")
LAYOUTS = {
    "dp2": TWO, "ep2": (*TWO, "--expert-model-parallel-size", 2), "etp2": (*TWO, "--expert-tensor-parallel-size", 2),
    "cp2-ep2": (*TWO, "--context-parallel-size", 2, "--expert-model-parallel-size", 2), "tp2-sp-etp2": TENSOR,
    "tp2-sp-ep2": (*TENSOR, "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1),
    "tp2-sp-edp2": (*TENSOR, "--expert-tensor-parallel-size", 1),
    "pp2-recompute": (*TWO, "--pipeline-model-parallel-size", 2, "--recompute-granularity", "full"),
}  # fmt: skip
OUTER = re.compile(r"\.experts\.(?:down_proj\.lora_B|(?:gate|up)_proj\.lora_A)\.")


def rollouts(count=1):
    return batches(count, vocab=264)


def column(found, name):
    return np.concatenate([sample.columns[name] for sample in found["batch"].samples])


def each_by_itself(tensors):
    """Adapters as SGLang has them -> of each expert."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            found[name] = tensor
        for expert in range(4) if tensor.ndim == 3 else ():
            found[name.replace(".experts.", f".experts.{expert}.")] = tensor[expert % len(tensor)].clone()
    return found


def weights(folder):
    return load_file(folder / "model.safetensors")


def adapters_of(folder):
    return load_file(folder / "adapter_model.safetensors")


def by_hand(base, tensors):
    """W + alpha / rank B A of each weight of a folder."""
    adapters, whole = each_by_itself(tensors), {}
    for name, weight in weights(base).items():
        first, second = (adapters.get(one) for one in names_of(name))
        whole[name] = weight if first is None else weight + 12 / 4 * second @ first
    return whole


def test_the_forward_is_that_of_weights_merged_by_hand(checkpoint, adapter, plan, one, convert, tmp_path):
    """And merge-lora makes these of the directory."""
    path = adapter("moe", shared=True)
    convert("merge-lora", checkpoint("moe"), tmp_path / "whole", "--lora-adapter-path", path)
    expected = by_hand(checkpoint("moe"), adapters_of(path))
    found = weights(tmp_path / "whole")
    assert all((found[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())
    save_file(expected, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    apart = one.train(plan(checkpoint("moe"), *SHARED, "--lora-adapter-path", path, *STILL), rollouts())
    whole = one.train(plan(tmp_path / "whole", *STILL), rollouts())
    assert np.abs(column(apart, "log_probs") - column(whole, "log_probs")).max() < 1e-5


def test_a_shared_gradient_is_the_sum_over_experts(checkpoint, adapter, plan, one, tmp_path):
    """Of adapters of each expert that begin alike; those of the inner halves are each expert's own."""
    path = adapter("moe", shared=True)
    peft.write(tmp_path / "own", peft.Shape(4, 12), each_by_itself(adapters_of(path)), "base")
    both = [one.gradients(plan(checkpoint("moe"), *flags, *STILL, "--lora-adapter-path", folder), rollouts()[0])[1]
            for flags, folder in ((SHARED, path), (LORA, tmp_path / "own"))]
    shared, own = ({name: grad for name, grad in each.items() if ".lora_" in name} for each in both)
    expected = {}
    for name, grad in own.items():
        stored = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        expected.setdefault(stored, []).append(grad if stored == name else grad[None])
    expected = {name: sum(each) if OUTER.search(name) else np.concatenate(each) for name, each in expected.items()}
    assert shared.keys() == expected.keys() == adapters_of(path).keys()
    assert any(map(OUTER.search, shared)) and distance(shared, expected) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("layout", [name if name == "tp2-sp-ep2" else pytest.param(name, marks=pytest.mark.slow)
                                    for name in LAYOUTS])
def test_a_layout_changes_no_gradient(checkpoint, adapter, plan, one, two, layout):
    """Nor its norm."""
    plain = (*SHARED, "--lora-adapter-path", adapter("moe", shared=True), "--max-tokens-per-gpu", 256)
    (loss, wanted), (other, found) = (ranks.gradients(plan(checkpoint("moe"), *plain, *STILL, *more), rollouts()[0])
                                      for ranks, more in ((one, ()), (two, LAYOUTS[layout])))
    assert other == pytest.approx(loss, abs=1e-6)
    for part in (OUTER.search, lambda name: ".experts." in name and not OUTER.search(name), lambda name: True):
        pair = [{name: grad for name, grad in each.items() if ".lora_" in name and part(name)}
                for each in (found, wanted)]
        assert pair[0] and distance(*pair) < 4e-6
    norms = [ranks.train(plan(checkpoint("moe"), *plain, "--clip-grad", 0.1, *more), rollouts())["steps"][0][
        "train/grad_norm"] for ranks, more in ((one, ()), (two, LAYOUTS[layout]))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_run_goes_on_and_leaves_what_sglang_reads(checkpoint, plan, one, export, tmp_path, convert):
    """From fresh adapters: a step, a checkpoint, its export, and the next step from either, as in one go."""
    [first, second], flags = rollouts(2), (*SHARED, "--lr", "3e-2")
    straight = one.train(plan(checkpoint("moe"), *flags), [first, second])["weights"]
    kept = one.train(plan(checkpoint("moe"), *flags), [copy.deepcopy(first)], save=tmp_path / "kept")["weights"]
    resumed = one.train(plan(checkpoint("moe"), *flags, "--load", tmp_path / "kept"), [second])["weights"]
    assert straight.keys() == resumed.keys()
    assert all(np.array_equal(resumed[name], weight) for name, weight in straight.items())
    export(plan(checkpoint("moe"), *flags, "--load", tmp_path / "kept"), tmp_path / "hf")
    adapters = adapters_of(tmp_path / "hf-adapter")
    stem = "base_model.model.model.layers.3.mlp.experts."
    assert {name[len(stem):]: list(one.shape) for name, one in adapters.items() if name.startswith(stem)} == {
        "gate_proj.lora_A.weight": [1, 4, 32], "gate_proj.lora_B.weight": [4, 24, 4],
        "up_proj.lora_A.weight": [1, 4, 32], "up_proj.lora_B.weight": [4, 24, 4],
        "down_proj.lora_A.weight": [4, 4, 24], "down_proj.lora_B.weight": [1, 32, 4]}
    assert all(tensor.any() and np.array_equal(kept[name], tensor) for name, tensor in adapters.items())
    expected = by_hand(checkpoint("moe"), adapters)
    whole = weights(tmp_path / "hf")
    assert whole.keys() == expected.keys()
    assert all((whole[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())
    warm = (*SHARED, "--lora-adapter-path", tmp_path / "hf-adapter", "--lr", 0)
    again = one.train(plan(checkpoint("moe"), *warm), rollouts())["weights"]
    assert all(np.array_equal(again[name], tensor) for name, tensor in adapters.items())
    convert("dist-to-hf", tmp_path / "kept", tmp_path / "both", "--hf-checkpoint", checkpoint("moe"), "--plugin",
            "lora", "--option", "lora.lora_rank=4", "--option", "lora.experts_shared_outer_loras=true")
    convert("merge-lora", tmp_path / "both", tmp_path / "merged", "--lora-alpha", 12)
    merged = weights(tmp_path / "merged")
    assert merged.keys() == whole.keys() and all(torch.equal(merged[name], whole[name]) for name in whole)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ep2", pytest.param("tp2-sp-ep2", marks=pytest.mark.slow)])
def test_steps_and_checkpoints_of_a_layout_are_those_of_one_rank(checkpoint, plan, one, two, tmp_path, layout):
    """From fresh adapters, which are drawn alike; the checkpoint goes on with one rank, and back again."""
    flags, [first, second], more = (*SHARED, "--lr", "1e-2"), rollouts(2), LAYOUTS[layout]
    straight = one.train(plan(checkpoint("moe"), *flags), [first, second])["weights"]
    started = two.train(plan(checkpoint("moe"), *flags, *more), [copy.deepcopy(first)], save=tmp_path / "kept")
    one.train(plan(checkpoint("moe"), *flags), [copy.deepcopy(first)], save=tmp_path / "of-one")
    assert any(map(OUTER.search, started["weights"]))
    found = [ranks.train(plan(checkpoint("moe"), *flags, *layout, "--load", tmp_path / kept), [second])["weights"]
             for ranks, layout, kept in ((one, (), "kept"), (two, more, "of-one"))]
    for there in found:
        assert there.keys() == straight.keys()
        for name, weight in straight.items():
            np.testing.assert_allclose(there[name], weight, atol=2e-3, err_msg=name)


def test_adapters_of_the_other_kind_are_refused(checkpoint, adapter, plan, one):
    for flags, shared in ((SHARED, False), (LORA, True)):
        with pytest.raises(CheckpointError) as caught:
            one.train(plan(checkpoint("moe"), *flags, "--lora-adapter-path", adapter("moe", shared=shared)), rollouts())
        assert caught.value.code == "tensors-do-not-fit-config"
    with pytest.raises(ConfigError) as caught:
        plan(checkpoint("dense"), *SHARED, "--trainer", "fsdp")
    assert "--experts-shared-outer-loras" in caught.value.who


def test_the_local_engine_takes_adapters_alone(checkpoint, adapter):
    """Those that it is given, which lie in files as SGLang has them."""
    from miles_local.weights import read_tensors
    from miles_lora.plugin import Lora, LoraOptions

    from miles_core.config.tables import Checkpoint, Debug, RunConfig

    path = adapter("moe", shared=True)
    options = LoraOptions(lora_alpha=12.0, lora_adapter_path=str(path), experts_shared_outer_loras=True)
    base = checkpoint("moe")
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(base)), debug=Debug(debug_rollout_only=True))
    found = dict(Lora(options, config).import_weights(read_tensors(base)))
    expected = by_hand(checkpoint("moe"), adapters_of(path))
    assert found.keys() == expected.keys()
    assert all((found[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())


@pytest.mark.parametrize(("kind", "shared"), [("dense", False), ("moe", True)])
def test_adapters_that_travel_alone_become_the_merged_weights(checkpoint, adapter, plan, kind, shared):
    """With the base, and after that without."""
    path = adapter(kind, shared=shared)
    flags = (*(SHARED if shared else LORA), "--lora-adapter-path", path, "--weight-sync", "adapter")
    made = plan(checkpoint(kind), *flags)
    trainer, engine = trainer_part(made.selected, made.config, Rank()), Base(3)
    expected = by_hand(checkpoint(kind), adapters_of(path))
    try:
        trainer.load()
        sent = [dict(trainer.weights()) for _ in range(2)]
    finally:
        cpu.leave()
    for found in [dict(engine.taken(iter(stream.items()))) for stream in sent]:
        assert found.keys() == expected.keys()
        assert all((found[name] - tensor).abs().max() < 1e-6 for name, tensor in expected.items())
    assert len(sent[0]) - len(sent[1]) == len(expected)
    with pytest.raises(SyncError) as caught:
        dict(engine.taken((name.replace("layers", "blocks"), one) for name, one in sent[1].items()))
    assert caught.value.code == "lora-adapter-without-weights"


def test_the_plan_counts_what_is_shared_once(checkpoint, adapter):
    from miles_lora.plan import parameters

    for shared in (False, True):
        tensors = adapters_of(adapter("moe", shared=shared))
        assert parameters(checkpoint("moe"), ("all-linear",), (), 4, shared) == sum(map(torch.numel, tensors.values()))
