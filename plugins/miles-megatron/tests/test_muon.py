"""Muon under Megatron: the steps of the trainer fsdp, the same in every layout, runs that go on, what the plan says."""

from __future__ import annotations

import functools

import pytest
import torch
from miles_megatron.testing import muon
from miles_megatron.testing.muon import gap
from miles_megatron.testing.ranks import batches
from miles_testing import trainer_contract

from miles_core.errors import CheckpointError, ConfigError, MilesError

pytestmark = pytest.mark.xdist_group("muon")  # one worker: the processes are started once

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
LAYOUTS = {
    "tp2": (2, "qwen3", TP, 2),
    "pp2": (2, "qwen3", PP, 2),
    "dp2": (2, "qwen3"),
    "ep2": (2, "qwen3_moe", EP, 2),
    "tp2-moe": (2, "qwen3_moe", TP, 2),
    "one": (1, "qwen3"),
    "one-moe": (1, "qwen3_moe"),
    "tp2-ep2": (4, "qwen3_moe", TP, 2, EP, 2, ETP, 1),
    "tp2-pp2": (4, "qwen3", TP, 2, PP, 2),
    "tp2-dp2-moe": (4, "qwen3_moe", TP, 2),
}  # fmt: skip
GATE, FULL = ("tp2", "pp2", "ep2"), ("dp2", "tp2-moe", "tp2-ep2", "tp2-pp2", "tp2-dp2-moe")
LOSS, WEIGHTS = 2e-6, 1e-5


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    sizes, experts = muon.SIZES | dict(intermediate_size=48), muon.EXPERTS | dict(num_experts=4, norm_topk_prob=True)
    return muon.planner(tmp_path_factory.mktemp("muon"), sizes, experts, "--lr", "5e-4", "--optimizer", "muon")


@pytest.fixture(scope="module")
def train(plan, one, two, ranks_of):
    """(layout, *flags, which=, save=) -> what Ranks.train answers; the layout may be a kind of model, of one rank."""
    def run(name, *flags, which=slice(0, 3), save=None):
        size, kind, *layout = LAYOUTS.get(name, (1, name))
        made = plan("--actor-num-gpus-per-node", size, *layout, *flags, kind=kind)
        return ranks_of(size).train(made, batches(3)[which], save=save)

    return run


@pytest.fixture(scope="module")
def alone(train):
    """A layout -> six steps of one rank of the same model."""
    of = functools.cache(train)
    return lambda name: of(LAYOUTS[name][1])


def losses_apart(ours, theirs):
    return max(abs(one["train/loss"] - other["train/loss"]) for one, other in
               zip(ours["steps"], theirs["steps"], strict=True))


def full(*rows):
    return [pytest.param(*row, marks=pytest.mark.full) for row in rows]


@pytest.mark.parametrize(("kind", "flags"), [
    ("qwen3", ()), ("qwen3_moe", ()), *full(("qwen3_moe", (
        "--muon-use-nesterov", "--muon-scale-mode", "unit_rms_norm", "--muon-momentum", 0.8, "--muon-num-ns-steps", 3,
        "--muon-extra-scale-factor", 0.4)))])
def test_six_steps_are_those_of_the_trainer_fsdp(kind, flags, train):
    ours, theirs = train("one" if kind == "qwen3" else "one-moe", *flags), train(kind, *flags, "--trainer", "fsdp")
    print(f"\n{kind}: loss {losses_apart(ours, theirs):.1e}, weights {gap(ours, theirs):.1e}")
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert losses_apart(ours, theirs) <= LOSS and gap(ours, theirs) <= WEIGHTS


@pytest.mark.parametrize("name", [*GATE, *full(*zip(FULL, strict=True))])
def test_six_steps_are_those_of_one_rank(name, train, alone):
    several, one = train(name), alone(name)
    print(f"\n{name}: loss {losses_apart(several, one):.1e}, weights {gap(several, one):.1e}")
    assert losses_apart(several, one) <= LOSS and gap(several, one) <= WEIGHTS


@pytest.mark.parametrize("flags", [(), *full((("--bf16",),))])
def test_a_resumed_run_goes_on_bit_for_bit(flags, train, tmp_path):
    straight = train("one-moe", *flags)
    train("one-moe", *flags, which=slice(0, 2), save=tmp_path)
    resumed = train("one-moe", *flags, "--load", tmp_path, which=slice(2, 3))
    assert gap(resumed, straight) == 0
    with pytest.raises(CheckpointError) as caught:  # Adam has no moments in there
        train("one-moe", *flags, "--load", tmp_path, "--optimizer", "adam", which=slice(2, 3))
    assert caught.value.code == "optimizer-state-mismatch"


@pytest.mark.parametrize(("first", "second"), [
    ("ep2", "one-moe"), *full(("tp2", "pp2"), ("one", "tp2"), ("pp2", "dp2"), ("one-moe", "ep2"), ("ep2", "tp2-moe"))])
def test_a_checkpoint_goes_from_layout_to_layout(first, second, train, alone, tmp_path):
    train(first, which=slice(0, 2), save=tmp_path)
    resumed = train(second, "--load", tmp_path, which=slice(2, 3))
    print(f"\n{first} to {second}: weights {gap(resumed, alone(first)):.1e}")
    assert gap(resumed, alone(first)) <= WEIGHTS


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--bf16",)])
def test_state_that_leaves_the_device_between_calls_comes_back(flags, plan, train, one):
    stayed = train("one-moe", *flags)
    left = one.train(plan(*flags, kind="qwen3_moe"), batches(3), turns=True)
    assert gap(left, stayed) == 0


@pytest.mark.full
def test_adapters_are_moved_in_any_layout(train):
    flags = ("--plugin", "lora", "--lora-rank", 4, "--lora-alpha", 8)
    alone, cut = (train(name, *flags) for name in ("one-moe", "tp2-moe"))
    assert any("lora_A" in name for name in alone["weights"]) and gap(cut, alone) <= WEIGHTS


def test_matrices_of_layers_have_one_momentum_and_all_else_two(hf_model, port):
    from miles_megatron import muon, optimizer
    from miles_megatron.weights import global_parameters

    model, model.weight_map = port(hf_model(moe=True))
    options = optimizer.OptimizerOptions(optimizer="muon", use_distributed_optimizer=False)
    chunks = optimizer.wrap([model], model.config, options)
    updated, _ = optimizer.make_optimizer(chunks, options)
    optimizer.prepare_state(updated)
    state = updated.chained_optimizers[0].state
    names = {name: state[one].keys() - {"step"} for name, one in global_parameters(chunks).items()}
    assert {name for name, own in names.items() if own == {"momentum_buffer"}} == {
        name for name, one in global_parameters(chunks).items() if name.startswith("decoder.layers.") and one.ndim == 2}
    assert {frozenset(own) for own in names.values()} == {
        frozenset(("momentum_buffer",)), frozenset(("exp_avg", "exp_avg_sq"))}
    for one, matrices in muon.matrices_of(chunks).items():
        whole = matrices.whole(one)
        assert len(whole) == {"linear_qkv": 3, "linear_fc1": 1}.get(matrices.kind.split(".")[-2], 1)
        assert torch.equal(matrices.part(whole), one)


def test_stretches_of_parameters_are_refused_where_they_would_be_made(hf_model, port):
    """Whoever makes an optimizer without a plan, too."""
    from miles_megatron import optimizer

    model, model.weight_map = port(hf_model())
    options = optimizer.OptimizerOptions(optimizer="muon")
    with pytest.raises(ConfigError, match="whole matrices"):
        optimizer.make_optimizer(optimizer.wrap([model], model.config, options), options)


@pytest.mark.parametrize(("flags", "code", "fact"), [
    (("--use-distributed-optimizer",), "muon-option", "whole matrices"),
    (("--no-decoupled-weight-decay",), "muon-option", "decay"),
    (("--optimizer-cpu-offload",), "muon-option", "optimizer_cpu_offload"),
    (("--muon-num-ns-steps", 0), "muon-option", "1 or more"),
    (("--muon-momentum", 1.5), "muon-option", "0 to 1"),
    (("--muon-scale-mode", "largest"), "muon-option", "unit_rms_norm"),
    (("--muon-fp32-matmul-prec", "low"), "muon-option", "highest"),
    (("--muon-tp-mode", "blockwise"), "megatron-flag-not-applicable", "whole"),
    (("--muon-no-split-qkv",), "megatron-flag-not-applicable", "whole"),
])  # fmt: skip
def test_what_muon_cannot_do_is_refused(plan, flags, code, fact):
    with pytest.raises(MilesError) as caught:
        plan(*flags)
    assert caught.value.code == code and fact in str(caught.value)


def test_the_plan_has_no_distributed_optimizer_and_says_so(plan):
    muon, adam = plan(), plan("--optimizer", "adam")
    assert muon.config.surface("megatron")["use_distributed_optimizer"] is False
    assert any("use_distributed_optimizer is off" in note for note in muon.notes)
    assert "use_distributed_optimizer" not in adam.config.surface("megatron")


@pytest.mark.full
def test_the_trainer_keeps_its_contract():
    trainer_contract("megatron", options={"optimizer.optimizer": "muon"})
