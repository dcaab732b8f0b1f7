"""Every parallel layout trains as one rank does: loss, weights and checkpoints. Several processes, started once.

Six optimizer steps (three rollouts of two) of GRPO with a KL loss on packed samples of unequal lengths, real
Megatron-core over gloo, the same plan that `miles run` would carry out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_megatron.testing.ranks import batches

from miles_core.plugins.plan import prepare
from tests.integration.samples import sampled

pytestmark = pytest.mark.xdist_group("layouts")  # one worker: the processes are started once

LOSS, WEIGHTS, RESUMED = 2e-6, 1e-5, 1e-6

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
VPP, EP, ETP = ("--virtual-pipeline-model-parallel-size", "--expert-model-parallel-size",
                "--expert-tensor-parallel-size")
SP, OVERLAP = "--sequence-parallel", ("--overlap-grad-reduce", "--overlap-param-gather")

LAYOUTS = {
    "tp2": (2, "dense", TP, 2),
    "tp2-sp": (2, "dense", TP, 2, SP),
    "tp2-sp-tied": (2, "tied", TP, 2, SP),
    "tp2-one-key": (2, "one-key", TP, 2),
    "tp4-sp-cut-groups": (4, "dense", TP, 4, SP),
    "pp2": (2, "dense", PP, 2),
    "pp2-tied": (2, "tied", PP, 2),
    "pp2-vpp2": (2, "dense", PP, 2, VPP, 2),
    "cp2": (2, "dense", CP, 2),
    "dp2": (2, "dense"),
    "dp2-overlap": (2, "dense", *OVERLAP),
    "dp2-plain-optimizer": (2, "dense", "--no-use-distributed-optimizer"),
    "dp2-fixed-micro-batches": (2, "dense", "--no-use-dynamic-batch-size", "--micro-batch-size", 2),
    "ep2": (2, "moe", EP, 2),
    "cp2-ep2": (2, "moe", CP, 2, EP, 2),
    "tp2-sp-moe": (2, "moe", TP, 2, SP),
    "pp2-moe": (2, "moe", PP, 2),
    "tp2-sp-recompute": (2, "dense", TP, 2, SP, "--recompute-granularity", "full"),
    "tp2-sp-pp2": (4, "tied", TP, 2, SP, PP, 2),
    "tp2-sp-cp2-ep2": (4, "moe", TP, 2, SP, CP, 2, EP, 2, ETP, 1),
    "pp2-ep2": (4, "moe", PP, 2, EP, 2),
    "pp2-vpp2-dp2": (4, "dense", PP, 2, VPP, 2),
    "cp2-dp2": (4, "dense", CP, 2),
}  # fmt: skip

CONSTANTS = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256)

RUN_FILE = """
plugins = ["grpo"]
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
[algorithm]
use_kl_loss = true
kl_loss_coef = 0.05
rewards_normalization = false
entropy_coef = 0.001
[optimizer]
lr = 5e-4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random four-layer models of a size that every layout divides, and the run file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("layouts")
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    models = {"dense": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS, tie_word_embeddings=False)),
              "one-key": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS | {"num_key_value_heads": 1})),
              "tied": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS, tie_word_embeddings=True)),
              "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONSTANTS, **experts, tie_word_embeddings=False))}
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # so large that a wrong layout shows
                    parameter.mul_(3)
        model.save_pretrained(folder / name)
    (folder / "run.toml").write_text(RUN_FILE)
    return folder


@pytest.fixture(scope="module")
def ranks(one, two, ranks_of):
    """size -> Ranks; more than two are started when first asked for."""
    return ranks_of


@pytest.fixture(scope="module")
def train(folder, ranks):
    """(layout, rollouts, *flags, save=) -> what Ranks.train answers."""
    rollouts = batches(3)

    def run(layout: tuple, which=slice(0, 3), *flags, save=None) -> dict:
        size, model, *more = layout
        argv = ["--hf-checkpoint", folder / model, "--actor-num-gpus-per-node", size, *more, *flags]
        return ranks(size).train(prepare(folder / "run.toml", [str(word) for word in argv]), rollouts[which], save=save)

    return run


@pytest.fixture(scope="module")
def one_rank(train, tmp_path_factory):
    """model -> (what one rank answers for all three rollouts, a checkpoint of it after the second)."""
    found = {}

    def run(model: str):
        if model not in found:
            save = tmp_path_factory.mktemp(f"one-{model}")
            train((1, model), slice(0, 2), save=save)
            found[model] = train((1, model)), save
        return found[model]

    run("dense")
    return run


@pytest.fixture(scope="module")
def compared(folder, ranks):
    """(batch, layout, tokens of a micro-batch) -> loss of a step under a layout and on one rank, and of their whole
    gradients the norm of the difference and one rank's."""
    def gradients(batch, limit, size: int, model: str, *more: object):
        argv = ["--hf-checkpoint", folder / model, "--actor-num-gpus-per-node", size, "--rollout-batch-size",
                len(batch.groups), "--n-samples-per-prompt", 2, "--num-steps-per-rollout", 1, "--max-tokens-per-gpu",
                limit, *more, "--no-use-distributed-optimizer", "--clip-grad", 0]
        return ranks(size).gradients(prepare(folder / "run.toml", [str(word) for word in argv]), batch)

    def norm(arrays):
        return np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays))

    def run(batch, layout, limit):
        expected_loss, expected = gradients(batch, limit, 1, layout[1])
        loss, found = gradients(batch, limit, *layout)
        return loss, expected_loss, norm(found[k] - value for k, value in expected.items()), norm(expected.values())

    return run


def gap(found: list[dict], expected: list[dict], key: str = "train/loss") -> float:
    """Largest difference of a metric over steps."""
    return max(abs(a[key] - b[key]) for a, b in zip(found, expected, strict=True))


GATE = ("pp2", "cp2", "dp2", "ep2")
"""Each way of cutting once, but for tensor parallelism, which takes more than a test of the gate may."""

FULL = ("tp2-sp", "tp2-one-key", "pp2-tied", "pp2-vpp2", "tp2-sp-cp2-ep2")
"""And tensor parallelism, with a key that ranks share, tied embeddings, a virtual pipeline, and all ways at once."""


@pytest.mark.parametrize("name", sampled(LAYOUTS, GATE, FULL))
def test_six_steps_are_those_of_one_rank(name, train, one_rank, record_property):
    """Loss, gradient norm, metrics' names, the old log-probs of every sample, and the final weights."""
    expected, _ = one_rank(LAYOUTS[name][1])
    found = train(LAYOUTS[name])
    loss = gap(found["steps"], expected["steps"])
    norm = max(abs(a["train/grad_norm"] / b["train/grad_norm"] - 1)
               for a, b in zip(found["steps"], expected["steps"], strict=True))  # of it: it is between 1 and 6
    weights = max(np.abs(found["weights"][k] - value).max() for k, value in expected["weights"].items())
    scores = max(np.abs(a.columns[column] - b.columns[column]).max() for column in ("log_probs", "ref_log_probs")
                 for a, b in zip(found["batch"].samples, expected["batch"].samples, strict=True))
    for key, value in (("loss", loss), ("gradient norm", norm), ("weights", weights), ("log-probs", scores)):
        record_property(key, f"{value:.1e}")
    print(f"\n{name}: loss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}, log-probs {scores:.1e}")
    assert found["weights"].keys() == expected["weights"].keys()
    assert found["steps"][0].keys() == expected["steps"][0].keys()
    assert loss <= LOSS and norm <= 1e-5 and weights <= WEIGHTS and scores <= 1e-4


WATCHED = '''
"""Every tensor on its way to another stage is looked at again when its sender learns that it has left."""
from unittest import mock

import torch
from miles_core import hookimpl


class Sent:
    def __init__(self, work, tensor):
        self.work, self.tensor, self.shape = work, tensor, tensor.shape

    def wait(self):
        assert self.tensor.shape == self.shape, f"freed on its way: {tuple(self.shape)} -> {tuple(self.tensor.shape)}"
        return self.work.wait()


class Watched:
    @hookimpl
    def train_step(self, proceed, access):
        c10d = torch.distributed.distributed_c10d
        isend = c10d.isend

        def watched(tensor, *args, **given):
            return Sent(isend(tensor, *args, **given), tensor)

        with mock.patch.object(torch.distributed, "isend", watched), mock.patch.object(c10d, "isend", watched):
            return proceed()
'''


@pytest.mark.full
@pytest.mark.parametrize("name", ["pp2-vpp2", "pp2"])
def test_what_a_stage_sends_stays_until_it_has_left(name, train, tmp_path):
    """A virtual pipeline's stages go on meanwhile. What they free was seen to arrive as other numbers, rarely."""
    (tmp_path / "watched.py").write_text(WATCHED)
    train(LAYOUTS[name], slice(0, 1), "--plugin", tmp_path / "watched.py")


@pytest.mark.full
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 200), groups=st.sampled_from([1, 2, 3]),
       layout=st.sampled_from([(2, "dense"), (2, "dense", CP, 2), (2, "moe"), (2, "moe", CP, 2)]))
def test_the_gradient_depends_on_neither_data_nor_context_parallelism(compared, seed, limit, groups, layout):
    """Any lengths, masks and rewards, packed by any budget: the whole gradient of a step is that of one rank."""
    [batch] = batches(1, groups=groups, samples=2, seed=seed)

    loss, expected, off, total = compared(batch, layout, limit)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert off <= 2e-6 * max(total, 1e-3)


@pytest.mark.parametrize("tokens", [2048, pytest.param(8192, marks=pytest.mark.full)])
def test_a_long_context_cut_in_two_has_the_loss_and_the_gradient_of_the_whole(tokens, compared, record_property):
    """One answer of so many tokens beside a short one; attention, targets and masks across every cut."""
    [batch] = batches(1, groups=1, samples=2)
    long, short = batch.groups[0].samples
    draw, first = np.random.default_rng(tokens), long.length - long.response_length
    long.response_length, long.reward, short.reward = tokens - first, 1.0, 0.0
    more = {"tokens": draw.integers(0, 256, tokens).astype(np.int32),
            "loss_mask": (draw.random(tokens - first) < 0.9).astype(np.uint8),
            "rollout_log_probs": -draw.random(tokens - first).astype(np.float32) * 6,
            "versions": np.ones(tokens - first, np.int32)}
    more["tokens"][:first] = long.tokens[:first]
    long.columns |= more

    loss, expected, off, total = compared(batch, (2, "dense", CP, 2), 2 * tokens)
    differences = {"loss": abs(loss - expected) / abs(expected), "gradient": off / total}
    for name, difference in differences.items():
        record_property(name, f"{difference:.1e}")
        print(f"\n{tokens} tokens: {name} {difference:.1e}")
    assert total > 0.1 and differences["loss"] <= 1e-6 and differences["gradient"] <= 1e-5


STAR = ["tp2-sp", "pp2", "pp2-tied", "pp2-vpp2", "cp2", "dp2", "ep2", "tp2-sp-moe", "tp2-sp-cp2-ep2", "pp2-ep2",
        "tp2-one-key"]


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(STAR, (), STAR[::4]))
def test_a_checkpoint_of_one_rank_goes_on_under_any_layout(name, train, one_rank):
    """Weights, optimizer and schedule: the losses of the third rollout are those of the run that went on."""
    expected, save = one_rank(LAYOUTS[name][1])
    found = train(LAYOUTS[name], slice(2, 3), "--load", save)
    assert gap(found["steps"], expected["steps"][4:]) <= RESUMED


@pytest.mark.parametrize("name", sampled(STAR, ["pp2"], [*STAR[3::4], "tp2-one-key"]))
def test_a_checkpoint_of_any_layout_goes_on_under_one_rank(name, train, one_rank, tmp_path):
    expected, _ = one_rank(LAYOUTS[name][1])
    train(LAYOUTS[name], slice(0, 2), save=tmp_path / "saved")
    found = train((1, LAYOUTS[name][1]), slice(2, 3), "--load", tmp_path / "saved")
    assert gap(found["steps"], expected["steps"][4:]) <= RESUMED


@pytest.mark.parametrize(("first", "second"), [
    pytest.param("tp2-sp", "pp2", marks=pytest.mark.full), pytest.param("ep2", "one", marks=pytest.mark.slow),
    pytest.param("pp2-vpp2", "tp2-sp", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_from_layout_to_layout(first, second, train, one_rank, tmp_path):
    model = LAYOUTS[first][1]
    expected, _ = one_rank(model)
    train(LAYOUTS[first], slice(0, 2), save=tmp_path / "saved")
    found = train(LAYOUTS.get(second, (1, model)), slice(2, 3), "--load", tmp_path / "saved")
    assert gap(found["steps"], expected["steps"][4:]) <= RESUMED


CLIPPING = '''
"""Megatron's clipping, written with nothing but what the hook clip_gradients is given."""
from miles_core import hookimpl


class Clipping:
    @hookimpl("clip_gradients", name="again")
    def again(self, gradients):
        squares = sum(piece.grad.double().square().sum() for piece in gradients.pieces if piece.counts)
        norm = gradients.sums({"norm": squares})["norm"] ** 0.5
        for piece in gradients.pieces:
            piece.grad.mul_(min(1.0, gradients.clip_grad / (norm + 1e-6)))
        return norm

    @hookimpl("clip_gradients", name="each")
    def each(self, gradients):
        """Every parameter to a norm of its own: the pieces and copies of one find the same one."""
        pieces, squares = gradients.pieces, {}
        for piece in pieces:
            square = float(piece.grad.double().square().sum()) if piece.counts else 0.0
            squares[piece.name] = squares.get(piece.name, 0.0) + square
        squares = gradients.sums(squares)
        for piece in pieces:
            piece.grad.mul_(0.001 / (squares[piece.name] ** 0.5 + 1e-6))
        return sum(squares.values()) ** 0.5
'''


@pytest.mark.parametrize("name", sampled(["tp2-sp", "pp2-tied", "dp2", "dp2-plain-optimizer", "ep2"],
                                         (), ["tp2-sp"]))
def test_a_clipping_of_ones_own_sees_every_gradient_once(name, train, tmp_path):
    """The global norm from pieces is Megatron's, and a norm of each parameter that of one rank."""
    (tmp_path / "clipping.py").write_text(CLIPPING)
    clip = ("--clip-grad", 0.05, "--plugin", tmp_path / "clipping.py", "--clip-gradients")
    one = (1, LAYOUTS[name][1])
    for kind, expected in (("again", train(LAYOUTS[name], slice(0, 1), *clip, "norm")),
                           ("each", train(one, slice(0, 1), *clip, "each"))):
        found = train(LAYOUTS[name], slice(0, 1), *clip, kind)
        assert expected["steps"][0]["train/grad_norm"] > 0.1, "there is something to clip"
        bound = 1e-6 if kind == "again" else 1e-5
        assert gap(found["steps"], expected["steps"], "train/grad_norm") <= bound
        weights = max(np.abs(found["weights"][key] - value).max() for key, value in expected["weights"].items())
        print(f"\n{name} {kind}: weights {weights:.1e}")
        assert weights <= bound
