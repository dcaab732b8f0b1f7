"""--optimizer dist_muon: the weights of plain Muon, a rank's share of its state, checkpoints that both go on from."""

from __future__ import annotations

import functools

import pytest
import torch
from miles_megatron.testing import muon
from miles_megatron.testing.muon import gap
from miles_megatron.testing.ranks import batches

from miles_core.errors import ConfigError

pytestmark = pytest.mark.xdist_group("muon")  # one worker: the processes are started once

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
LAYOUTS = {
    "dp2": (2, "qwen3"),
    "dp4": (4, "qwen3"),
    "cp2": (2, "qwen3", "--context-parallel-size", 2),
    "pp2": (2, "qwen3", PP, 2),
    "tp2-dp2": (4, "qwen3", TP, 2),
    "pp2-dp2": (4, "qwen3", PP, 2),
    "dp2-moe": (2, "qwen3_moe"),
    "ep2": (2, "qwen3_moe", EP, 2),
    "ep2-dp2": (4, "qwen3_moe", EP, 2),
    "tp2-etp1": (2, "qwen3_moe", TP, 2, ETP, 1),
    "tp2-dp2-moe": (4, "qwen3_moe", TP, 2),
    "one": (1, "qwen3"),
    "one-moe": (1, "qwen3_moe"),
}  # fmt: skip
PARTS = {"pp2": 2, "tp2-dp2": 2, "pp2-dp2": 2, "ep2": 2, "ep2-dp2": 2, "tp2-etp1": 2, "tp2-dp2-moe": 2}
"""How many different parts of the model there are among the ranks, where they do not all have the whole."""
WEIGHTS = 2e-7
PLAIN = ("--optimizer", "muon")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    sizes, experts = muon.SIZES | dict(intermediate_size=48), muon.EXPERTS | dict(num_experts=4, norm_topk_prob=True)
    return muon.planner(tmp_path_factory.mktemp("muon"), sizes, experts, "--lr", "5e-4", "--optimizer", "dist_muon")


@pytest.fixture(scope="module")
def train(plan, ranks_of):
    """(layout, *flags, which=, save=, turns=) -> what Ranks.train answers."""
    def run(name, *flags, which=slice(0, 3), **options):
        size, kind, *layout = LAYOUTS[name]
        made = plan("--actor-num-gpus-per-node", size, *layout, *flags, kind=kind)
        return ranks_of(size).train(made, batches(3)[which], **options)

    return run


@pytest.fixture(scope="module")
def trained(train):
    """(layout, *flags) -> six steps, made once; those of dp2 ahead, which most tests look at."""
    made = functools.cache(train)
    made("dp2")
    return made


@pytest.fixture(scope="module")
def alone(trained):
    """(layout, *flags) -> six steps of plain Muon on one rank, of the same model."""
    return lambda name, *flags: trained({"qwen3": "one", "qwen3_moe": "one-moe"}[LAYOUTS[name][1]], *flags, *PLAIN)


def full(*rows):
    return [pytest.param(*row, marks=pytest.mark.full) for row in rows]


ALL = ["dp2", *full(*[(name,) for name, (size, *_) in LAYOUTS.items() if size > 1 and name != "dp2"])]


@pytest.mark.parametrize("name", ALL)
def test_weights_are_those_of_plain_muon_on_one_rank_and_the_same_on_all(name, trained, alone):
    ours, theirs = trained(name), alone(name)
    print(f"\n{name}: weights {gap(ours, theirs):.1e}")
    assert gap(ours, theirs) <= WEIGHTS
    assert len({one["weights"] for one in ours["ranks"]}) == PARTS.get(name, 1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("flags", [(), *full((("--bf16",),))])
def test_a_rank_has_the_share_of_state_that_the_plan_counts(name, flags, trained, plan):
    """Of the rank that has most."""
    from miles_megatron import estimate

    size, kind, *layout = LAYOUTS[name]
    state = [one["state"] for one in trained(name, *flags)["ranks"]]
    config = plan("--actor-num-gpus-per-node", size, *layout, *flags, kind=kind).config
    planned = estimate.trainer(config, estimate.dimensions_of(config))["optimizer"]
    print(f"\n{name} {flags}: {state}, planned {planned:.0f}")
    assert max(state) == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("name", "flags"), [("dp2", ()), *full(
    ("dp2", ("--bf16",)), ("ep2-dp2", ()), ("ep2-dp2", ("--bf16",)), ("pp2-dp2", ("--bf16",)))])
def test_a_resumed_run_goes_on_bit_for_bit(name, flags, train, trained, tmp_path):
    straight = trained(name, *flags)
    train(name, *flags, which=slice(0, 2), save=tmp_path)
    resumed = train(name, *flags, "--load", tmp_path, which=slice(2, 3))
    assert gap(resumed, straight) == 0


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [
    (("dp2",), ("dp4",)), (("dp4",), ("dp2",)), (("dp2",), ("one", *PLAIN)), (("one", *PLAIN), ("dp4",)),
    (("tp2-dp2",), ("pp2-dp2",)), (("ep2-dp2",), ("one-moe", *PLAIN)), (("ep2", *PLAIN), ("ep2-dp2",)),
    (("tp2-dp2-moe",), ("dp2-moe", *PLAIN))])
def test_a_checkpoint_goes_to_other_ranks_and_to_plain_muon_and_back(first, second, train, alone, tmp_path):
    train(*first, which=slice(0, 2), save=tmp_path)
    resumed = train(*second, "--load", tmp_path, which=slice(2, 3))
    print(f"\n{first} to {second}: weights {gap(resumed, alone(first[0])):.1e}")
    assert gap(resumed, alone(first[0])) <= WEIGHTS


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--bf16",)])
def test_state_that_leaves_the_device_between_calls_comes_back(flags, train, trained):
    assert gap(train("dp2-moe", *flags, turns=True), trained("dp2-moe", *flags)) == 0


@pytest.mark.full
@pytest.mark.parametrize("flags", [
    ("--plugin", "lora", "--lora-rank", 4, "--lora-alpha", 8),
    ("--plugin", "param-groups", "--lr-mult", "embed_tokens=0.25", r"\.mlp\.=0.5", "--clip-grad", 0.01),
    ("--plugin", "param-groups", "--freeze-params-name-list", "embed_tokens", r"layers\.0\."),
])  # fmt: skip
def test_adapters_rates_and_frozen_parameters_are_those_of_plain_muon(flags, train, trained, alone, tmp_path):
    flags = (*flags, "--adam-eps", "1e-3")  # where gradients cancel, Adam would take what is rounded for a direction
    ours, theirs = trained("ep2-dp2", *flags), alone("ep2-dp2", *flags)
    print(f"\n{flags}: weights {gap(ours, theirs):.1e}")
    assert gap(ours, theirs) <= WEIGHTS
    for one, other in zip(ours["steps"], theirs["steps"], strict=True):
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-5)
        assert {key: one[key] for key in one if "lr-pg" in key} == {key: other[key] for key in other if "lr-pg" in key}
    train("ep2-dp2", *flags, which=slice(0, 2), save=tmp_path)
    assert gap(train("ep2-dp2", *flags, "--load", tmp_path, which=slice(2, 3)), ours) == 0


COUNTING = '''
from miles_core import hookimpl


class Counting:
    @hookimpl("clip_gradients", name="counting")
    def counting(self, gradients):
        """The norm from what the hook is given; nothing is clipped."""
        squares = sum(float(piece.grad.double().square().sum()) for piece in gradients.pieces if piece.counts)
        return gradients.sums({"norm": squares})["norm"] ** 0.5
'''


@pytest.mark.full
@pytest.mark.parametrize("name", ["dp2", "tp2-etp1", "tp2-dp2-moe"])
def test_a_clipping_of_ones_own_sees_every_gradient_once(name, train, trained, tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    ours = train(name, "--plugin", tmp_path / "counting.py", "--clip-gradients", "counting", which=slice(0, 1))
    assert ours["steps"][0]["train/grad_norm"] == pytest.approx(trained(name)["steps"][0]["train/grad_norm"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_a_checkpoint_goes_on_where_a_rank_has_no_parameter_of_a_group(optimizer, train, trained, tmp_path):
    """The output layer's rate is a group that the first stage has nothing of."""
    flags = ("--plugin", "param-groups", "--lr-mult", "lm_head=0.5", "--bf16", "--optimizer", optimizer)
    train("pp2", *flags, which=slice(0, 2), save=tmp_path)
    assert gap(train("pp2", *flags, "--load", tmp_path, which=slice(2, 3)), trained("pp2", *flags)) == 0


def test_the_plan_says_that_state_is_divided_and_refuses_stretches(plan):
    made = plan("--actor-num-gpus-per-node", 2)
    assert made.config.surface("megatron")["use_distributed_optimizer"] is False
    assert any("data-parallel ranks divide parameters" in note for note in made.notes)
    with pytest.raises(ConfigError) as caught:
        plan("--use-distributed-optimizer")
    assert caught.value.code == "muon-option"


def test_a_rank_makes_state_of_its_own_parameters_alone_and_all_train_again(hf_model, port):
    from miles_megatron import layer_wise, optimizer

    model, model.weight_map = port(hf_model(moe=True))
    options = optimizer.OptimizerOptions(optimizer="dist_muon", use_distributed_optimizer=False)
    chunks = optimizer.wrap([model], model.config, options)
    made, _ = optimizer.make_optimizer(chunks, options)
    assert isinstance(made, layer_wise.LayerWiseOptimizer)
    own = layer_wise.shares(chunks, torch.numel)
    assert all(share.own for share in own) and {share.parameter for share in own} == set(model.parameters())
    sizes = [share.parameter.numel() for share in own]
    assert sizes == sorted(sizes, reverse=True)
    with layer_wise.only_own([layer_wise.Share(one.parameter, 1, one.group) for one in own[:2]]):
        assert [one.requires_grad for one in model.parameters()].count(False) == 2
    assert all(one.requires_grad for one in model.parameters())
