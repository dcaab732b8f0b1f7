"""Muon: which parameters it moves, the plain algorithm's steps on any number of ranks, runs that go on."""

from __future__ import annotations

import copy
import dataclasses
import math
import typing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from miles_fsdp.muon import Muon, output_axes
from miles_fsdp.optimizer import optimizer_of
from miles_fsdp.plugin import FsdpOptions
from miles_local import muon_options
from miles_local.muon import QUINTIC
from miles_megatron.testing import muon
from miles_megatron.testing.muon import gap
from miles_megatron.testing.ranks import batches
from miles_testing import tiny_checkpoint, trainer_contract
from miles_testing.singular_values import on_singular_values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from miles_core.config.tables import Optimizer
from miles_core.errors import CheckpointError, MilesError

pytestmark = pytest.mark.xdist_group("muon")  # one worker: the processes are started once

SIZES = muon.SIZES | dict(intermediate_size=49)
EXPERTS = muon.EXPERTS | dict(num_experts=3)
"""Neither 49 rows nor 3 experts divide among ranks."""
MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return muon.planner(tmp_path_factory.mktemp("muon"), SIZES, EXPERTS, "--trainer", "fsdp", "--lr", "2e-3")


def test_options_take_what_muon_knows():
    """They have to be literals, so they are written again."""
    hints, within = typing.get_type_hints(FsdpOptions), {
        one.name: one.metadata["within"] for one in dataclasses.fields(FsdpOptions)}
    assert hints["muon_scale_mode"] == muon_options.Scale
    assert hints["muon_fp32_matmul_prec"] == muon_options.Precision | None
    assert within["muon_momentum"] == muon_options.MOMENTUM
    assert within["muon_num_ns_steps"] == muon_options.NUM_NS_STEPS
    assert {*muon_options.MUON, "adam"} == set(typing.get_args(typing.get_type_hints(Optimizer)["optimizer"]))


@pytest.mark.parametrize("name", muon_options.MUON)
def test_both_values_of_the_optimizer_are_muon(name):
    assert isinstance(optimizer_of(torch.nn.Linear(2, 2), Optimizer(optimizer=name), FsdpOptions()), Muon)


@pytest.fixture(scope="module")
def ranks(one, two, ranks_of):
    """size -> Ranks; what one and two import is nobody's time."""
    return ranks_of


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone."""
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if joined:
        dist.destroy_process_group()


@pytest.mark.parametrize(("nesterov", "scale", "axis"), [
    (False, "spectral", -2), (True, "unit_rms_norm", -2), (True, "unit_rms_norm", -1), (False, "shape_scaling", -1)])
@pytest.mark.parametrize("shape", [(12, 20), (3, 12, 20)])
def test_steps_are_those_of_the_plain_algorithm_and_of_adamw(mesh, nesterov, scale, axis, shape):
    """In float64: momentum, decoupled weight decay, the scale by outputs and inputs; beside it torch's AdamW."""
    draw, options = torch.Generator().manual_seed(2), FsdpOptions(
        muon_momentum=0.9, muon_use_nesterov=nesterov, muon_scale_mode=scale, muon_extra_scale_factor=0.3,
        muon_fp32_matmul_prec="highest", muon_num_ns_steps=4)
    start, other = torch.randn(shape, generator=draw), torch.randn(7, generator=draw)
    matrix, vector = (torch.nn.Parameter(distribute_tensor(one, mesh, [Shard(0)])) for one in (start, other))
    plain = torch.nn.Parameter(other.clone())
    ours = Muon([{"params": [matrix], "weight_decay": 0.5, "output_axis": axis}, {"params": [vector]}], options, lr=0.1)
    theirs = torch.optim.AdamW([plain], lr=0.1)
    expected, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    outputs, inputs = (12, 20) if axis == -2 else (20, 12)
    factor = math.sqrt({"spectral": 20, "unit_rms_norm": outputs / inputs,
                        "shape_scaling": max(1, outputs / inputs)}[scale])
    for _ in range(3):
        for one, size in ((matrix, shape), (vector, (7,))):
            one.grad = distribute_tensor(torch.randn(size, generator=draw), mesh, [Shard(0)])
        plain.grad = vector.grad.full_tensor()
        gradient = matrix.grad.full_tensor().double()
        momentum = 0.9 * momentum + 0.1 * gradient
        ahead = 0.9 * momentum + 0.1 * gradient if nesterov else momentum
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.3 * factor * on_singular_values(ahead, 4, QUINTIC)
        ours.step()
        theirs.step()
    torch.testing.assert_close(matrix.full_tensor().double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(vector.full_tensor(), plain)
    assert sorted(ours.state[matrix]) == ["momentum_buffer", "step"] and len(ours.param_groups) == 2


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_matrices_of_layers_are_moved_and_nothing_else(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {"gpt_oss": {"num_local_experts": 4}}.get(kind, EXPERTS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **own, layer_types=None))
    axes = output_axes(model)
    named = {name.rpartition(".layers.")[2]: one for name, one in model.named_parameters()}
    moved = {name: axes[one] for name, one in named.items() if one in axes}
    rest = {name for name, one in named.items() if one not in axes}
    assert all(one.ndim == 1 or "embed" in name or "lm_head" in name or "conv1d" in name or name.endswith("_bias")
               for name, one in named.items() if name in rest), rest
    assert {"model.embed_tokens.weight", "lm_head.weight", "0.input_layernorm.weight"} <= rest
    experts = {"0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"}
    assert (experts & set(named)) <= set(moved)
    assert {axis for name, axis in moved.items() if name in experts} <= {-1 if kind == "gpt_oss" else -2}
    assert {axis for name, axis in moved.items() if ".experts." not in name} == {-2}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_no_bias_and_no_norm_decays(optimizer):
    """The biases of stacked experts have two axes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES, num_local_experts=4))
    groups = optimizer_of(model, Optimizer(optimizer=optimizer, weight_decay=0.1), FsdpOptions()).param_groups
    decay = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    for name, one in model.named_parameters():
        assert decay[id(one)] == (0 if "bias" in name or "norm" in name or "sinks" in name else 0.1), name


@pytest.mark.parametrize(("kind", "size"), [
    ("qwen3_moe", 2), pytest.param("qwen3", 2, marks=pytest.mark.full),
    pytest.param("qwen3_moe", 4, marks=pytest.mark.full)])
def test_several_ranks_are_one(plan, ranks, kind, size):
    """To float32, while a matrix that each rank had orthogonalized by its rows would go elsewhere."""
    alone = ranks(1).train(plan(*MUON, kind=kind), batches(3))
    several = ranks(size).train(plan(*MUON, "--actor-num-gpus-per-node", size, kind=kind), batches(3))
    print(f"{gap(alone, several):.1e}")
    assert gap(alone, several) <= 1e-5
    for name in ("train/loss", "train/grad_norm", "train/lr-pg_0"):
        for ours, theirs in zip(several["steps"], alone["steps"], strict=True):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


@pytest.mark.parametrize(("saver", "flags"), [
    (1, ()), pytest.param(2, (), marks=pytest.mark.full), pytest.param(1, ("--bf16",), marks=pytest.mark.full)])
def test_a_resumed_run_goes_on(plan, ranks, tmp_path, saver, flags):
    """To the bit on one rank, up to the order of sums from two."""
    [first, *rest], flags = batches(3), (*MUON, *flags)
    straight = ranks(1).train(plan(*flags), [first, *rest])
    ranks(saver).train(plan(*flags, "--actor-num-gpus-per-node", saver), [copy.deepcopy(first)], save=tmp_path)
    resumed = ranks(1).train(plan(*flags, "--load", tmp_path), rest)
    assert gap(resumed, straight) <= (0 if saver == 1 else 1e-5)
    with pytest.raises(CheckpointError) as caught:  # Adam has no moments in there
        ranks(1).train(plan("--load", tmp_path), rest)
    assert caught.value.code == "fsdp-checkpoint-unreadable" and "exp_avg" in str(caught.value)


def test_parameters_have_rates_of_their_own_and_stay_where_they_are_frozen(plan, ranks):
    flags = (*MUON, "--weight-decay", 0, "--plugin", "param-groups", "--freeze-params-name-list",
             r"layers\.0\.mlp", "--lr-mult", r"layers\.1\.mlp=0.5")
    start = ranks(1).train(plan(*flags, "--lr", 0), batches(1))
    once, half = (ranks(1).train(plan(*flags, "--lr", rate), batches(1)) for rate in (2e-3, 1e-3))
    far = {name: [np.linalg.norm(run["weights"][name] - value) for run in (once, half)]
           for name, value in start["weights"].items()}
    down = "model.layers.{}.mlp.down_proj.weight".format
    assert far[down(0)] == [0, 0]
    # Each of two steps: a direction whose 32 singular values are about 1, times the root of 49, 0.2 and the rate.
    assert 0.5 < far[down(1)][0] / (1e-3 * 0.2 * 7 * math.sqrt(32) * 2) < 1.2
    assert far[down(1)][0] / far[down(1)][1] == pytest.approx(2, rel=0.2)
    assert once["steps"][0]["train/lr-pg_1"] == pytest.approx(1e-3)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_answers_of_large_advantage_become_likelier(plan, ranks, optimizer):
    """Of one batch, over four steps on it."""
    def likely(*flags):
        samples = ranks(1).train(plan("--optimizer", optimizer, *flags), batches(1) * 3)["batch"].samples
        return np.mean([np.sum(one.columns["advantages"] * one.columns["log_probs"]) for one in samples])

    before, after = likely("--lr", 0), likely()
    print(f"{optimizer} {before:.3f} -> {after:.3f}")
    assert after > before + 2


def test_the_trainer_keeps_its_contract():
    trainer_contract("fsdp", plugins=["fsdp"], options={"perf.trainer": "fsdp", "optimizer.optimizer": "muon"})


@pytest.mark.parametrize(("flags", "code", "fact"), [
    (("--muon-tp-mode", "blockwise"), "megatron-flag-not-applicable", "whole"),
    (("--muon-num-ns-steps", "0"), "option-out-of-range", "0"),
    (("--muon-scale-mode", "largest"), "option-wrong-type", "unit_rms_norm"),
])  # fmt: skip
def test_what_muon_cannot_do_is_refused(plan, flags, code, fact):
    with pytest.raises(MilesError) as caught:
        plan("--optimizer", "muon", *flags)
    assert caught.value.code == code and fact in str(caught.value)


def test_the_plan_counts_one_moment_of_a_matrix_and_says_what_has_no_effect(plan):
    from miles_fsdp.memory import parameters

    folder = tiny_checkpoint()
    assert 0 < parameters(folder, matrices=True) < parameters(folder)
    adam, muon = (plan(*flags, kind="qwen3_moe").to_text() for flags in ((), MUON))
    assert adam != muon
    notes = plan("--muon-momentum", "0.8").notes
    assert any("fsdp.muon_momentum" in one for one in notes)
