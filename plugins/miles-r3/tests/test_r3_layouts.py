"""The trainer's routes are the engine's under every layout, and log-probs, gradients and weights what they then have to
be. Trainers live in processes that are started once; what they are held to is transformers with the same routes."""

from __future__ import annotations

import copy
from itertools import pairwise

import mixture
import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import distance

from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("r3")  # one worker: the processes are started once

FALLS = 10
"""Times that replay brings the log-probs closer, at least: 25 were measured first."""

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
VPP, EP, ETP = ("--virtual-pipeline-model-parallel-size", "--expert-model-parallel-size",
                "--expert-tensor-parallel-size")
SP, RECOMPUTE = "--sequence-parallel", ("--recompute-granularity", "full")
FSDP = ("--trainer", "fsdp")
MODULES = ("--recompute-granularity", "selective", "--recompute-modules", "moe")

LAYOUTS = {
    "one": (1,),
    "one-recompute": (1, *RECOMPUTE),
    "one-recompute-experts": (1, *MODULES),
    "one-recompute-some": (1, *RECOMPUTE, "--recompute-method", "block", "--recompute-num-layers", 2),
    "tp2-sp": (2, TP, 2, SP),
    "tp2-sp-recompute": (2, TP, 2, SP, *RECOMPUTE),
    "pp2": (2, PP, 2),
    "pp2-recompute": (2, PP, 2, *RECOMPUTE),
    "pp2-vpp2": (2, PP, 2, VPP, 2),
    "pp2-vpp2-recompute": (2, PP, 2, VPP, 2, *RECOMPUTE),
    "pp2-vpp2-recompute-experts": (2, PP, 2, VPP, 2, *MODULES),
    "cp2": (2, CP, 2),
    "cp2-recompute": (2, CP, 2, *MODULES),
    "dp2": (2,),
    "dp2-overlap": (2, "--overlap-grad-reduce", "--overlap-param-gather"),
    "dp2-plain-optimizer": (2, "--no-use-distributed-optimizer"),
    "dp2-fixed-micro-batches": (2, "--no-use-dynamic-batch-size", "--micro-batch-size", 2),
    "ep2": (2, EP, 2),
    "ep2-recompute": (2, EP, 2, *RECOMPUTE),
    "tp2-sp-ep2-etp1": (2, TP, 2, SP, EP, 2, ETP, 1),
    "cp2-ep2": (2, CP, 2, EP, 2),
    "tp2-sp-pp2": (4, TP, 2, SP, PP, 2),
    "tp2-sp-cp2-ep2": (4, TP, 2, SP, CP, 2, EP, 2, ETP, 1),
    "tp2-sp-cp2-ep2-recompute": (4, TP, 2, SP, CP, 2, EP, 2, ETP, 1, *RECOMPUTE),
    "pp2-ep2": (4, PP, 2, EP, 2),
    "pp2-vpp2-dp2": (4, PP, 2, VPP, 2),
    "cp2-dp2": (4, CP, 2),
    "pp2-cp2-recompute": (4, PP, 2, CP, 2, *RECOMPUTE),
    "fsdp": (1, *FSDP),
    "fsdp-recompute": (1, *FSDP, "--gradient-checkpointing"),
    "fsdp-dp2": (2, *FSDP),
    "fsdp-cp2": (2, *FSDP, "--fsdp.context-parallel-size", 2),
}  # fmt: skip
GATE = {"one", "ep2"}
OTHERS = {name for name, words in LAYOUTS.items() if FSDP[1] in words}
"""Of the trainer fsdp, held to Megatron's one rank as all others are."""
FULL = {*OTHERS, "one-recompute", "one-recompute-some", "tp2-sp-recompute", "pp2-recompute",
        "pp2-vpp2-recompute-experts", "cp2"}


def tiers(gate, full, names=LAYOUTS):
    """The layouts; those of the second set are of the full tier, and those of neither are slow."""
    return [name if name in gate else pytest.param(name, marks=pytest.mark.full if name in full else pytest.mark.slow)
            for name in LAYOUTS if name in names]


RUN_FILE = """
plugins = ["grpo", "r3"]
[rollout]
prompt_data = "data/none.jsonl"
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 4
num_steps_per_rollout = 2
rollout_max_response_len = 41
[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 96
trainer_host = "process"
[optimizer]
lr = 5e-4
[r3]
compare_every = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r3")
    mixture.checkpoint(folder / "moe")
    (folder / "run.toml").write_text(RUN_FILE)
    return folder


@pytest.fixture(scope="module")
def batch(folder):
    return mixture.rollout(folder / "moe")


@pytest.fixture(scope="module")
def ranks(one, two, ranks_of):
    """size -> Ranks; more than two are started when first asked for."""
    return ranks_of


@pytest.fixture(scope="module")
def plan(folder):
    """(layout, *flags) -> the plan of a run under it."""
    return lambda layout, *flags: prepare(folder / "run.toml", [str(word) for word in (
        "--hf-checkpoint", folder / "moe", "--actor-num-gpus-per-node", layout[0], "--no-skip-actor-forward-only",
        *layout[1:], *flags)])


@pytest.fixture(scope="module")
def train(ranks, plan, batch):
    """(layout, *flags, of=batch) -> what Ranks.train answers."""
    def run(layout, *flags, of=None):
        return ranks(layout[0]).train(plan(layout, *flags), [batch if of is None else of])

    return run


@pytest.fixture(scope="module")
def one_rank(train):
    return train(LAYOUTS["one"])


@pytest.fixture(scope="module")
def model(folder):
    return mixture.reference(folder / "moe")


@pytest.fixture(scope="module")
def expected(model, batch):
    """(log-probs with the engine's routes by sample, share of token-layers that transformers routes otherwise)."""
    found, differ = [], []
    with torch.no_grad():
        for sample in batch.samples:
            routes = sample.columns["routed_experts"]
            found.append(mixture.log_probs(model, sample, routes)[0].numpy())
            for number, free in mixture.log_probs(model, sample, routes)[1].items():
                theirs = torch.from_numpy(routes[:, number].astype(np.int64)).sort(-1).values
                differ.append((free.sort(-1).values != theirs).any(-1))
    return found, float(torch.cat(differ).double().mean())


def trained(samples, name):
    return np.concatenate([s.columns[name][s.columns["loss_mask"] > 0] for s in samples])


@pytest.mark.full
@pytest.mark.parametrize("name", tiers(GATE, FULL))
def test_routes_are_the_engines_under_every_layout(name, train, one_rank, expected, record_property):
    """All token-layers are replayed; log-probs are those of transformers with these routes; losses and weights after
    two optimizer steps are those of one rank."""
    found = one_rank if name == "one" else train(LAYOUTS[name])
    first = found["steps"][0]
    routed = {key.rpartition("/")[2]: value for key, value in first.items() if key.startswith("rollout/r3/")}
    assert routed["replayed"] == 1 and routed["fallback"] == 0
    assert all(step["train/r3/replayed"] == 1 for step in found["steps"])
    assert 0.05 < routed["routes_differ"] == pytest.approx(expected[1], abs=2e-3), "both sides would choose otherwise"
    samples = found["batch"].samples
    gap = np.abs(trained(samples, "log_probs") - trained(samples, "rollout_log_probs")).mean()
    assert routed["log_prob_diff"] == pytest.approx(gap, rel=1e-5)
    assert routed["log_prob_diff_free"] >= FALLS * routed["log_prob_diff"] > 0
    off = max(np.abs(s.columns["log_probs"] - e).max() for s, e in zip(samples, expected[0], strict=True))
    weights = max(np.abs(found["weights"][key] - value).max() for key, value in one_rank["weights"].items())
    losses = max(abs(a["train/loss"] - b["train/loss"]) for a, b in zip(found["steps"], one_rank["steps"], strict=True))
    print(f"\n{name}: {routed['routes_differ']:.3f} differ, |d| {routed['log_prob_diff']:.2e} for "
          f"{routed['log_prob_diff_free']:.2e}, log-probs {off:.1e}, loss {losses:.1e}, weights {weights:.1e}")
    record_property("log-probs", f"{off:.1e}")
    assert off <= 1e-5 and losses <= 2e-6 and weights <= 5e-5, "Adam makes more of rounding than a gradient has"
    assert not any("routed_rows" in sample.columns for sample in samples), "what the plugin added for itself is gone"


@pytest.mark.full
@pytest.mark.parametrize("name", tiers({"one-recompute"}, {"pp2-vpp2-recompute-experts"},
                                       LAYOUTS.keys() - {"dp2-overlap", "dp2-plain-optimizer", *OTHERS}))
def test_the_gradient_is_that_of_transformers_with_these_routes(name, ranks, plan, batch, model):
    """Of every tensor, the routers' among them, which is not zero."""
    one_step = ("--num-steps-per-rollout", 1, "--no-use-distributed-optimizer", "--clip-grad", 0)
    _, found = ranks(LAYOUTS[name][0]).gradients(plan(LAYOUTS[name], *one_step), batch)
    wanted = policy_gradient(model, batch)
    off = distance(found, wanted)
    routers = [f"model.layers.{number}.mlp.gate.weight" for number in mixture.SPARSE]
    worst = max(np.abs(found[key] - wanted[key]).max() / np.abs(wanted[key]).max() for key in routers)
    print(f"\n{name}: gradient off by {off:.1e}, worst router {worst:.1e}")
    assert found.keys() >= wanted.keys() and all(np.abs(wanted[key]).max() > 1e-4 for key in routers)
    assert off <= 1e-5 and worst <= 1e-4


def policy_gradient(model, batch) -> dict[str, np.ndarray]:
    """GRPO's first step by transformers and autograd, with the engine's routes: name on disk -> gradient."""
    model.zero_grad()
    for group in batch.groups:
        rewards = np.array([sample.reward for sample in group.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            found, _ = mixture.log_probs(model, sample, sample.columns["routed_experts"])
            (-advantage * found.mean() / len(batch.samples)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(grad):
                gate, up = np.split(both, 2)
                found |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{expert}.down_proj.weight": one for expert, one in
                      enumerate(grad)}
        else:
            found[name] = grad
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", tiers((), {"one", "tp2-sp", "fsdp"}, ("one", "tp2-sp", "fsdp", "cp2", "pp2")))
def test_the_reference_chooses_freely_in_the_actors_own_modules(name, train, batch):
    """Its log-probs are those of a run without the plugin, though the same routers replay for the actor."""
    kl = ("--use-kl-loss", "--kl-loss-coef", 0.05)
    bare = copy.deepcopy(batch)
    for sample in bare.samples:
        del sample.columns["routed_experts"]
    found, free = train(LAYOUTS[name], *kl), train(LAYOUTS[name], *kl, "--r3.compare-every", 0, of=bare)
    references = [np.concatenate([s.columns["ref_log_probs"] for s in one["batch"].samples]) for one in (found, free)]
    actors = [np.concatenate([s.columns["log_probs"] for s in one["batch"].samples]) for one in (found, free)]
    assert np.array_equal(*references) and np.abs(actors[0] - actors[1]).max() > 1e-2
    assert np.array_equal(references[1], actors[1]), "without routes the actor, too, is free"


@pytest.mark.full
@pytest.mark.parametrize("name", tiers((), {"one", "cp2", "fsdp"}, (
    "one", "cp2", "fsdp", "tp2-sp-pp2", "pp2-vpp2-recompute")))
def test_rows_without_routes_choose_freely_and_are_counted(name, train, batch, model):
    """A sample without any, and the second half of another."""
    gaps = copy.deepcopy(batch)
    none, half = gaps.samples[1], gaps.samples[6]
    half.columns["routed_experts"][half.length // 2:] = 255
    del none.columns["routed_experts"]
    missing = none.length - 1 + half.length - 1 - half.length // 2
    whole = sum(sample.length - 1 for sample in gaps.samples)
    found = train(LAYOUTS[name], of=gaps)
    assert found["steps"][0]["rollout/r3/fallback"] == pytest.approx(missing / whole)
    assert sum(step["train/r3/fallback"] for step in found["steps"]) > 0
    with torch.no_grad():
        alone, _ = mixture.log_probs(model, none, None)
        part, _ = mixture.log_probs(model, half, half.columns["routed_experts"][: half.length // 2])
    for sample, expected in ((found["batch"].samples[1], alone), (found["batch"].samples[6], part)):
        assert np.abs(sample.columns["log_probs"] - expected.numpy()).max() <= 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", tiers({"one"}, {"tp2-sp-cp2-ep2-recompute", "pp2-vpp2-recompute", "fsdp-recompute"}, (
    "one", "fsdp-recompute", "tp2-sp-cp2-ep2-recompute", "pp2-vpp2-recompute", "pp2-cp2-recompute", "dp2")))
def test_routes_of_the_log_prob_pass_are_replayed_by_the_steps(name, train, batch, model):
    """--use-routing-replay, with other micro-batches in the two passes: what is replayed is what was free then."""
    bare = copy.deepcopy(batch)
    for sample in bare.samples:
        del sample.columns["routed_experts"]
    record = ("--r3.compare-every", 0, "--use-routing-replay", "--log-probs-max-tokens-per-gpu", 160, "--lr", 5e-3)
    found = train(LAYOUTS[name], *record, of=bare)
    assert all(step["train/r3/replayed"] == 1 for step in found["steps"])
    assert found["steps"][1]["train/r3/routes_differ"] > 0.02, "the first step has moved the routers"
    same, rows = 0, 0
    for sample in found["batch"].samples:
        with torch.no_grad():
            _, free = mixture.log_probs(model, sample, None)
        recorded = sample.columns["routed_experts"]
        assert (recorded[:, 1] == 255).all(), "a dense layer routes nothing"
        for number, chosen in free.items():
            same += int((np.sort(recorded[:, number]) == chosen.sort(-1).values.numpy()).all(-1).sum())
            rows += len(recorded)
    print(f"\n{name}: {same} of {rows} recorded as transformers routes; steps differ by "
          f"{found['steps'][1]['train/r3/routes_differ']:.3f}")
    assert same >= 0.995 * rows


@pytest.mark.full
def test_micro_batches_of_any_size_give_the_same_gradient(ranks, plan, batch):
    """Routes follow their rows through packing."""
    more = ("--num-steps-per-rollout", 1, "--no-use-distributed-optimizer", "--clip-grad", 0)
    found = [ranks(1).gradients(plan((1,), *more, "--max-tokens-per-gpu", limit), batch)[1] for limit in (1, 60, 2000)]
    for a, b in pairwise(found):
        assert distance(b, a) <= 2e-6
