"""Adapters on the modules of transformers that the trainer fsdp shards: as on Megatron's layers, step for step."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from miles_lora import peft
from miles_lora.merging import merged
from miles_lora.modules import attach, named
from miles_lora.targets import Switch, names_of
from miles_megatron.testing.ranks import batches
from safetensors.torch import load_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from miles_core.build import trainer_part
from miles_core.errors import CheckpointError, ConfigError
from miles_core.types import Rank

pytestmark = pytest.mark.xdist_group("lora")  # one worker: the processes are started once

LORA = ("--lora-rank", 4, "--lora-alpha", 12)
FSDP = ("--trainer", "fsdp")
STEPS = ("--lr", "5e-4", "--use-kl-loss", "--kl-loss-coef", "0.05", "--weight-decay", "0.1",
         "--num-steps-per-rollout", "2")
TWO = ("--actor-num-gpus-per-node", 2)


def whole(found):
    """The weights of a run with adapters merged, by name, from either trainer's stream."""
    stream = ((name, torch.from_numpy(value)) for name, value in found["weights"].items())
    return {name: one.numpy() for name, one in merged(named(stream), 3.0)}


def same(found, expected):
    def gap(key):
        return max(abs(a[key] - b[key]) for a, b in zip(found["steps"], expected["steps"], strict=True))

    ours, theirs = whole(found), whole(expected)
    weights = max(np.abs(ours[name] - value).max() for name, value in theirs.items())
    print(f"\nloss {gap('train/loss'):.1e}, norm {gap('train/grad_norm'):.1e}, weights {weights:.1e}")
    assert len(found["steps"]) == 4 and ours.keys() == theirs.keys()
    assert gap("train/loss") <= 2e-6 and gap("train/grad_norm") <= 1e-5 and weights <= 1e-5
    scores = max(np.abs(a.columns[name] - b.columns[name]).max() for name in ("log_probs", "ref_log_probs")
                 for a, b in zip(found["batch"].samples, expected["batch"].samples, strict=True))
    assert scores <= 1e-4


@pytest.mark.parametrize("kind", ["dense", pytest.param("fused", marks=pytest.mark.full),
                                  pytest.param("tied", marks=pytest.mark.full)])
def test_steps_are_those_of_adapters_on_megatrons_layers(checkpoint, adapter, plan, one, kind):
    """With a reference, which is the base; the adapters move, and the base stays to the bit."""
    flags = (*LORA, "--lora-adapter-path", adapter(kind), *STEPS)
    ours, theirs = (one.train(plan(checkpoint(kind), *flags, *trainer), batches(2, vocab=264))
                    for trainer in (FSDP, ()))
    same(ours, theirs)
    stored = {**load_file(checkpoint(kind) / "model.safetensors"), **load_file(adapter(kind) / peft.WEIGHTS)}
    moved = {name for name, value in named(ours["weights"].items()) if not np.array_equal(value, stored[name].numpy())}
    assert moved == {name for name in stored if ".lora_" in name}


@pytest.mark.full
def test_two_ranks_are_one(checkpoint, adapter, plan, one, two):
    flags = (*FSDP, *LORA, "--lora-adapter-path", adapter(), *STEPS)
    same(two.train(plan(checkpoint(), *flags, *TWO), batches(2, vocab=264)),
         one.train(plan(checkpoint(), *flags), batches(2, vocab=264)))


@pytest.mark.parametrize("more", [(), pytest.param(("--bf16",), marks=pytest.mark.full)], ids=["float32", "bfloat16"])
def test_a_resumed_run_goes_on_to_the_bit_from_a_checkpoint_of_adapters_alone(checkpoint, adapter, plan, one, tmp_path,
                                                                             more):
    """Under --bf16 the base is kept in 16 bits, and the adapters that are saved are float32."""
    from torch.distributed.checkpoint import FileSystemReader

    flags, [first, *rest] = (*FSDP, *LORA, "--lora-adapter-path", adapter(), *more), batches(3, vocab=264)
    straight = one.train(plan(checkpoint(), *flags), [first, *rest])
    one.train(plan(checkpoint(), *flags), [copy.deepcopy(first)], save=tmp_path / "kept")
    tensors = FileSystemReader(tmp_path / "kept" / "iter_0000001" / "tensors").read_metadata().state_dict_metadata
    weights = {name: one for name, one in tensors.items() if name.startswith("actor.model.")}
    assert len(weights) == 2 * 7 * 4 and all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in weights)
    assert {one.properties.dtype for one in weights.values()} == {torch.float32}
    resumed = one.train(plan(checkpoint(), *flags, "--load", tmp_path / "kept"), rest)
    for name, weight in straight["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][name], weight, err_msg=name)


@pytest.mark.full
def test_a_checkpoint_wants_its_adapters_and_its_base(checkpoint, plan, one, tmp_path):
    """Neither other adapters nor none, and no start where the base is gone."""
    one.train(plan(checkpoint(), *FSDP, *LORA), batches(1, vocab=264), save=tmp_path / "kept")
    load = ("--load", tmp_path / "kept")
    for flags in ((), ("--lora-rank", 8), (*LORA, "--target-modules", "q_proj")):
        with pytest.raises(CheckpointError) as caught:
            one.train(plan(checkpoint(), *FSDP, *flags, *load), batches(1, vocab=264))
        assert caught.value.code == "fsdp-checkpoint-unreadable", flags
    state = tmp_path / "kept" / "iter_0000001" / "fsdp.json"
    saved = json.loads(state.read_text())
    assert saved["base"] == str(checkpoint().resolve())
    state.write_text(json.dumps(saved | {"base": str(tmp_path / "gone")}))
    with pytest.raises(CheckpointError) as caught:
        one.train(plan(checkpoint(), *FSDP, *LORA, *load), batches(1, vocab=264))
    assert caught.value.code == "fsdp-base-missing" and "gone" in str(caught.value)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits[0]


@pytest.fixture
def trainer(plan, checkpoint):
    """(*flags) -> a trainer of this process, loaded."""
    started = []

    def make(*flags, folder=None):
        made = plan(folder or checkpoint(), *FSDP, *LORA, "--trainer-host", "thread", *flags)
        started.append(trainer_part(made.selected, made.config, Rank()))
        started[-1].load()
        return started[-1]

    yield make
    for one in started:
        one.close()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_is_exported_and_sent_is_merged_and_peft_loads_the_adapters(checkpoint, adapter, merged_base, trainer,
                                                                        tmp_path):
    import peft as lib
    from transformers import AutoModelForCausalLM

    ours = trainer("--lora-adapter-path", adapter())
    expected = load_file(merged_base / "model.safetensors")
    sent = dict(ours.weights())
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in sent)
    ours.export(tmp_path / "hf")
    base, whole = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint(), tmp_path / "hf"))
    plain, found = logits(base), logits(lib.PeftModel.from_pretrained(base, tmp_path / "hf-adapter"))
    assert (found - logits(whole)).abs().max() < 1e-4 and (found - plain).abs().max() > 0.1
    assert peft.read(tmp_path / "hf-adapter") == peft.Shape(4, 12)


@pytest.fixture
def merged_base(merged):
    return merged()


def test_adapters_travel_alone_after_the_base(checkpoint, trainer):
    """As the engine in the driver's process gets them: the second time nothing but A and B."""
    ours = trainer("--weight-sync", "adapter")
    names = [names_of(name) for name in load_file(checkpoint() / "model.safetensors") if "_proj" in name]
    first, second = (dict(ours.weights()) for _ in range(2))
    assert second.keys() == {one for pair in names for one in pair}
    assert first.keys() == second.keys() | load_file(checkpoint() / "model.safetensors").keys()
    assert list(first)[: len(second)] == list(second), "who merges needs them first"


def test_a_directory_with_base_and_adapters_is_a_start(checkpoint, adapter, trainer, tmp_path):
    """As `miles convert dist-to-hf` leaves it; there need be no PEFT directory."""
    import shutil

    from safetensors.torch import save_file

    both = shutil.copytree(checkpoint(), tmp_path / "both")
    adapters = load_file(adapter() / peft.WEIGHTS)
    save_file({**load_file(both / "model.safetensors"), **adapters}, both / "model.safetensors", {"format": "pt"})
    ours = dict(named(trainer(folder=both).models.stream()))
    assert all(torch.equal(ours[name], tensor) for name, tensor in adapters.items())


def test_the_reference_is_the_actor_without_its_adapters(trainer, adapter):
    """One module for both, whose passes differ; its base is in the type that it computes in."""
    models = trainer("--use-kl-loss", "--lora-adapter-path", adapter(), "--bf16").models
    assert models.modules["ref"] is models.actor
    kinds = {(one.dtype, one.requires_grad) for one in models.actor.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    assert sum(len(group["params"]) for group in models.trained["actor"].optimizer.param_groups) == 2 * 7 * 4


@pytest.mark.parametrize(("flags", "code", "fact"), [
    ((), "lora-experts-stacked", "down_proj, gate_proj, up_proj"),
    (("--target-modules", "k_proj,no_proj"), "lora-target-unknown", "no_proj"),
])
def test_layers_that_can_have_no_adapter_are_named(checkpoint, trainer, flags, code, fact):
    with pytest.raises(ConfigError) as caught:
        trainer(*flags, folder=checkpoint("moe"))
    assert caught.value.code == code and fact in str(caught.value)


@pytest.mark.parametrize("wanted", ["all-linear", "q_proj"])
def test_a_tower_beside_the_language_model_has_none(tmp_path, wanted):
    """As under Megatron's trainer, whatever its layers are called."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=sizes | {"head_dim": 8, "vocab_size": 16}, vision_config=sizes)
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    attach(model, tmp_path, (wanted,), (), peft.Shape(2, 1.0), 0, Switch())
    adapted = [name for name, one in model.named_parameters() if one.requires_grad]
    layers = {"all-linear": 7, "q_proj": 1}[wanted]
    assert len(adapted) == 2 * layers and all(".language_model.layers." in name for name in adapted)


def test_other_adapters_than_the_runs_are_refused(adapter, trainer):
    with pytest.raises(CheckpointError) as caught:
        trainer("--lora-adapter-path", adapter(), "--exclude-modules", "o_proj")
    assert caught.value.code == "lora-initial-adapters-differ" and "o_proj" in str(caught.value)


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_a_plan_counts_what_trains(checkpoint, adapter, plan, trainer):
    """Without weights of the checkpoint among gradients and moments, and without a copy of them for the reference."""
    flags = ("--lora-adapter-path", adapter(), "--lora-alpha", 12, "--use-kl-loss", "--trainer", trainer)
    text = plan(checkpoint(), *flags).to_text()
    count = sum(one.numel() for one in load_file(adapter() / peft.WEIGHTS).values())
    assert f"{count:,} parameters train" in text
    if trainer == "fsdp":
        [memory] = [line for line in text.splitlines() if "GiB in" in line]
        assert "frozen weights" in memory and not any(word in memory for word in ("gradients", "moments", "reference"))
