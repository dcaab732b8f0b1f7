"""What the layers learn, against transformers' layers; that nothing else does; that no layout matters; that they stay.

Trainers live in processes that are started once.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches, distance
from miles_mtp.plugin import Mtp, MtpOptions
from safetensors.torch import load_file, save_file

from miles_core.config.load import with_values
from miles_core.errors import CheckpointError, UnknownKeyError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("mtp")  # one worker: the processes are started once

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
             attn_implementation="eager")
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
               decoder_sparse_step=1)

FRAME = {
    "mtp": ("mtp.layers.{k}.", "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
            "mtp.norm.weight"),
    "nextn": tuple("model.layers.{n}." + rest for rest in (
        "", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")),
    "mimo": tuple("model.mtp_layers.{k}." + rest for rest in (
        "", "input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")),
}  # fmt: skip
"""Of each scheme: the prefix of the layer, the projection, the norms of embedding and hidden state, the last norm."""

RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "96",
       "--trainer-host", "process", "--disable-rewards-normalization", "--advantage-estimator", "grpo",
       "--lr", "1e-2")  # fmt: skip
TRAIN = ("--enable-mtp-training",)


def drafts(model, scheme, count):
    """Tensors of `count` layers like the model's last one, by name."""
    draw = torch.Generator().manual_seed(1)
    last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
    found = {}
    for k in range(count):
        prefix, projection, *norms = (name.format(k=k, n=SIZES["num_hidden_layers"] + k) for name in FRAME[scheme])
        shapes = {prefix + name.removeprefix(last): tensor.shape for name, tensor in model.items()
                  if name.startswith(last)}
        shapes |= {projection: (SIZES["hidden_size"], 2 * SIZES["hidden_size"])}
        shapes |= dict.fromkeys(norms, (SIZES["hidden_size"],))
        found |= {name: torch.randn(shape, generator=draw) * 0.1 + (len(shape) == 1) for name, shape in shapes.items()}
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(scheme, count, moe, tied) -> a Hugging Face directory; no scheme, no such layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = {}

    def make(scheme=None, count=1, moe=False, tied=True):
        key = (scheme, count, moe, tied)
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp("checkpoint")
            torch.manual_seed(0)
            model = (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=tied)) if moe else
                     Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3 if parameter.dim() > 1 else 1)
            model.save_pretrained(folder)
            if scheme:
                save_file(drafts(load_file(folder / "model.safetensors"), scheme, count),
                          folder / "drafts.safetensors")
        return made[key]

    return make


@pytest.fixture(scope="module")
def plan():
    """(folder, *flags) -> the plan of a run on it."""
    return lambda folder, *flags: prepare(None, ["--hf-checkpoint", str(folder), *RUN, *map(str, flags)])


AUX = ("--moe-aux-loss-coeff", 1e-2)
KINDS = [pytest.param({}, (), id="tied"),
         *(pytest.param(kind, more, id=name, marks=pytest.mark.full) for name, kind, more in (
             ("untied", {"tied": False}, ()), ("moe", {"moe": True}, ()), ("moe-aux", {"moe": True}, AUX)))]
SP = ("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel")


def names_of(folder):
    return load_file(folder / "drafts.safetensors").keys()


class Reference:
    """The layers in transformers' parts, one sequence at a time; SGLang's drafts compute the same."""

    def __init__(self, folder, scheme, count):
        from transformers import Qwen3ForCausalLM
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

        self.model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        held = {name: tensor.double() for name, tensor in load_file(folder / "drafts.safetensors").items()}
        self.first, self.layers, self.parameters = scheme == "mimo", [], {}
        for k in range(count):
            prefix, *frame = (name.format(k=k, n=SIZES["num_hidden_layers"] + k) for name in FRAME[scheme])
            layer = Qwen3DecoderLayer(self.model.config, 0).double()
            layer.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in held.items()
                                   if name.startswith(prefix + ("self_attn", "mlp", "input", "post")[0])
                                   or name.removeprefix(prefix) in layer.state_dict() and name.startswith(prefix)})
            norms = [Qwen3RMSNorm(SIZES["hidden_size"], 1e-6).double() for _ in range(3)]
            projection = torch.nn.Linear(2 * SIZES["hidden_size"], SIZES["hidden_size"], bias=False).double()
            for module, name in zip((projection, *norms), frame, strict=True):
                module.weight = torch.nn.Parameter(held[name])
                self.parameters[name] = module.weight
            self.parameters |= {prefix + name: parameter for name, parameter in layer.named_parameters()}
            self.layers.append((layer, projection, norms))

    def losses(self, sample):
        """[R] means over the layers of minus the log-probability of each response token."""
        tokens = torch.from_numpy(sample.tokens).long()
        with torch.no_grad():
            hidden = self.model.model(tokens[None]).last_hidden_state
            head = self.model.lm_head.weight.detach()
        positions = torch.arange(len(tokens))[None]
        rope = self.model.model.rotary_emb(hidden, positions)
        mask = torch.full((len(tokens), len(tokens)), -1e30, dtype=torch.float64).triu(1)[None, None]
        first, total = len(tokens) - sample.response_length, 0
        for depth, (layer, projection, (of_embedding, of_hidden, last)) in enumerate(self.layers, 1):
            ahead = torch.cat([tokens[depth:], tokens.new_zeros(depth)])
            with torch.no_grad():
                embedded = self.model.model.embed_tokens(ahead)[None]
            parts = [of_embedding(embedded), of_hidden(hidden)]
            joined = projection(torch.cat(parts[::-1] if self.first else parts, -1))
            hidden = last(layer(joined, attention_mask=mask, position_embeddings=rope, position_ids=positions))
            rows = torch.arange(first, len(tokens)) - 1 - depth
            total = total - (hidden[0, rows] @ head.t()).log_softmax(-1).gather(1, tokens[first:, None])[:, 0]
        return total / len(self.layers)


@pytest.mark.parametrize(("scheme", "count"), [("mtp", 1), ("nextn", 2), ("mimo", 1)])
def test_loss_and_gradient_are_those_of_transformers_layers(checkpoint, plan, one, scheme, count):
    """Packed, masked, several to a micro-batch: to 1e-5 of the loss, to 1e-5 of the gradient's largest entry."""
    folder = checkpoint(scheme, count)
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    found = one.ask("gradients", list((made := plan(folder, *TRAIN, "--no-use-distributed-optimizer", "--clip-grad", 0,
                                                    "--lr", 0)).selected), made.config, batch)
    reference = Reference(folder, scheme, count)
    expected = 0
    for sample in batch.samples:
        mask = torch.from_numpy(sample.columns["loss_mask"]).double()
        expected = expected + (reference.losses(sample) * mask).sum() / mask.sum() / len(batch.samples)
    assert found["train/mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)
    (0.2 * expected).backward()
    assert reference.parameters.keys() == names_of(folder)
    for name, parameter in reference.parameters.items():
        most = parameter.grad.abs().max().item()
        np.testing.assert_allclose(found["gradients"][name], parameter.grad, atol=1e-5 * most, rtol=0, err_msg=name)


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_policy_trains_to_the_same_bits_with_and_without(checkpoint, plan, one, kind, more):
    """Three steps of which each is clipped; the layers move; every metric but the loss's own is the same. Layers that
    train are work of the step, others none."""
    folder, rollouts = checkpoint("mtp", **kind), batches(3, vocab=SIZES["vocab_size"])
    kept, trained = (one.train(plan(folder, "--clip-grad", 0.01, *more, *flags), rollouts)
                     for flags in (("--plugin", "mtp"), TRAIN))
    before, drafts = load_file(folder / "drafts.safetensors"), names_of(folder)
    for name, weight in trained["weights"].items():
        same = np.array_equal(weight, kept["weights"][name])
        assert same != (name in drafts), name
    assert all(np.array_equal(kept["weights"][name], tensor) for name, tensor in before.items()), "kept as they were"
    for step, other in zip(trained["steps"], kept["steps"], strict=True):
        assert step["train/grad_norm"] == other["train/grad_norm"] > 0.01
        assert step["train/mtp_grad_norm"] > 0.01 and "train/mtp_loss" not in other
        for key in other.keys() - {"train/loss"}:
            assert key.startswith("perf/") or step[key] == other[key], key
        work, less = (one["perf/actor_train_tflops"] * one["perf/actor_train_time"] for one in (step, other))
        assert work > 1.05 * less


def test_fresh_layers_are_drawn_whatever_becomes_of_the_others(checkpoint, plan, one):
    """--no-initialization leaves memory as it is, for a checkpoint to fill; their numbers were those that lay there."""
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    plain = ["--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0, *TRAIN]
    _, expected = one.gradients(plan(checkpoint(), *plain), batch)
    _, found = one.gradients(plan(checkpoint(), *plain, "--no-initialization"), batch)
    assert all(np.array_equal(gradient, found[name]) for name, gradient in expected.items())


@pytest.mark.full
def test_the_gradient_of_the_policy_is_the_same_bits(checkpoint, plan, one):
    """Also with every layer recomputed, and also without a checkpoint's layers: those are drawn by the seed."""
    [batch] = batches(1, vocab=SIZES["vocab_size"])
    plain, drafted = ["--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0], checkpoint("mtp")
    _, expected = one.gradients(plan(checkpoint(), *plain), batch)
    _, found = one.gradients(plan(drafted, *plain, *TRAIN), batch)
    _, again = one.gradients(plan(drafted, *plain, *TRAIN, "--recompute-granularity", "full"), batch)
    _, fresh = one.gradients(plan(checkpoint(), *plain, *TRAIN), batch)
    for name, gradient in expected.items():
        assert np.array_equal(gradient, found[name]) and np.array_equal(gradient, fresh[name]), name
    assert found.keys() - expected.keys() == fresh.keys() - expected.keys() == names_of(drafted)
    for name in names_of(drafted):
        np.testing.assert_array_equal(found[name], again[name], err_msg=name)


@pytest.mark.full
def test_the_loss_falls(checkpoint, plan, one):
    """Fresh layers on one and the same rollout, seen again and again, with the policy at rest."""
    rollout, steps = batches(1, vocab=SIZES["vocab_size"]), 40
    made = plan(checkpoint(), *TRAIN, "--mtp-loss-scaling-factor", 1, "--clip-grad", 0, "--num-rollout", steps)
    for sample in rollout[0].samples:
        sample.reward = 0.0  # no advantage, no policy gradient
    found = one.train(made, [copy.deepcopy(rollout[0]) for _ in range(steps)])
    losses = [step["train/mtp_loss"] for step in found["steps"]]
    assert losses[0] > np.log(SIZES["vocab_size"]) * 0.9 and losses[-1] < 0.7 * losses[0], losses


LAYOUTS = {
    "tp2-sp": ({}, SP), "tp2": ({"tied": False}, SP[:-1]),
    "tp2-sp-recompute": ({}, (*SP, "--recompute-granularity", "full")),
    "dp2": ({}, ("--actor-num-gpus-per-node", 2)),
    "cp2": ({"tied": False}, ("--actor-num-gpus-per-node", 2, "--context-parallel-size", 2)),
    "pp2": ({}, ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)),
    "pp2-untied": ({"tied": False}, ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)),
    "pp2-moe": ({"moe": True}, ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)),
    "ep2": ({"moe": True}, ("--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(checkpoint, plan, one, two, layout):
    """Gradients of policy and layers on two ranks and on one, in other micro-batches."""
    kind, flags = LAYOUTS[layout]
    folder, [batch] = checkpoint("mtp", **kind), batches(1, vocab=SIZES["vocab_size"])
    plain = ["--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0, *TRAIN]
    loss, expected = one.gradients(plan(folder, *plain, "--max-tokens-per-gpu", 256), batch)
    other, found = two.gradients(plan(folder, *plain, *flags), batch)
    assert other == pytest.approx(loss, abs=1e-6)
    assert distance(found, expected, names_of(folder)) < 2e-6
    assert distance(found, expected, expected.keys() - names_of(folder)) < 4e-6


def on_disk(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "count", "moe"), [("mtp", 1, True), ("nextn", 2, False), ("mimo", 1, False)])
def test_conversion_keeps_every_bit_and_refuses_to_lose_any(checkpoint, convert, tmp_path, scheme, count, moe):
    folder = checkpoint(scheme, count, moe)
    with pytest.raises(CheckpointError, match=r"unexpected: .*enable the plugin .*--plugin mtp"):
        convert("hf-to-dist", folder, tmp_path / "lost")
    convert("hf-to-dist", folder, tmp_path / "dist", "--plugin", "mtp")
    with pytest.raises(CheckpointError, match=r"weights that the model does not have .*mtp\.layers.*--plugin mtp"):
        convert("dist-to-hf", tmp_path / "dist", tmp_path / "lost", "--hf-checkpoint", folder)
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder, "--plugin", "mtp")
    before, after = on_disk(folder), on_disk(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
@pytest.mark.parametrize(("count", "moe"), [(1, True), (2, False)])
def test_fresh_layers_are_added_by_the_seed(checkpoint, plan, one, convert, tmp_path, count, moe):
    """Tensors that were there keep every bit; config.json counts the others; a run takes them in."""
    folder, scheme = checkpoint(moe=moe), {1: "mtp", 2: "nextn"}[count]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert("add-mtp", folder, tmp_path / name, "--num-layers", count, "--seed", seed)
    first, again, other = (on_disk(tmp_path / name) for name in "abc")
    before, expected = on_disk(folder), drafts(on_disk(folder), scheme, count)
    assert first.keys() == before.keys() | expected.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(first[name], again[name]) for name in expected)
    for name, tensor in expected.items():
        assert first[name].shape == tensor.shape and first[name].dtype == before["model.norm.weight"].dtype, name
        assert torch.equal(first[name], other[name]) == (tensor.dim() == 1), name
        assert tensor.dim() == 1 or first[name].std() == pytest.approx(0.02, rel=0.2)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_nextn_predict_layers"] == count
    weights = one.train(plan(tmp_path / "a", "--plugin", "mtp"), [])["weights"]
    assert all(np.array_equal(weights[name], first[name].numpy()) for name in expected)
    with pytest.raises(CheckpointError, match="has multi-token-prediction layers"):
        convert("add-mtp", tmp_path / "a", tmp_path / "d")


@pytest.mark.full
def test_a_resume_goes_on_to_the_same_bits_and_refuses_to_lose_any(checkpoint, plan, one, tmp_path):
    folder, rollouts = checkpoint("mtp"), batches(3, vocab=SIZES["vocab_size"])
    whole = one.train(plan(folder, *TRAIN), rollouts)["weights"]
    one.train(plan(folder, *TRAIN), rollouts[:2], save=tmp_path)
    again = one.train(plan(folder, *TRAIN, "--load", tmp_path), rollouts[2:])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)
    with pytest.raises(CheckpointError, match=r"weights that the model does not have .*--plugin mtp"):
        one.train(plan(checkpoint(), "--load", tmp_path), [])


def test_without_the_plugin_a_run_does_not_start(checkpoint, plan, one):
    with pytest.raises(CheckpointError, match=r"unexpected: mtp\.fc\.weight.*--plugin mtp"):
        one.train(plan(checkpoint("mtp")), [])


@pytest.mark.full
def test_a_critic_reads_the_same_checkpoint_and_leaves_the_layers_to_the_actor(checkpoint, plan, one):
    found = one.train(plan(checkpoint("mtp"), *TRAIN, "--advantage-estimator", "ppo"),
                      batches(1, vocab=SIZES["vocab_size"]))
    assert found["steps"][0]["train/mtp_loss"] > 0 and np.isfinite(found["steps"][0]["critic/value_loss"])


def test_what_the_engine_is_sent(checkpoint, plan):
    """An engine that speculates gets the layers; the local one, which does not know them, gets the policy."""
    from miles_megatron.families import FAMILIES
    from transformers import Qwen3Config

    folder = checkpoint("mtp")
    weight_map = FAMILIES["qwen3"].weight_map(Qwen3Config.from_pretrained(folder))
    config = plan(folder).config
    for engine, sent in (("local", {"model.norm.weight"}), ("sglang", {"model.norm.weight", "mtp.fc.weight"})):
        plugin = Mtp(MtpOptions(), with_values(replace(config, rollout=replace(config.rollout, engine=engine)), "test"))
        plugin.weight_map(weight_map, folder, "actor")
        stream = plugin.export_weights((name, None) for name in ("model.norm.weight", "mtp.fc.weight"))
        assert {name for name, _ in stream} == sent


def test_its_flags_enable_it(checkpoint, plan, tmp_path):
    for flags in (["--mtp-num-layers", 1], TRAIN, [*TRAIN, "--mtp-loss-scaling-factor", 0.1]):
        assert "mtp" in [one.manifest.name for one in plan(checkpoint(), *flags).selected]
    assert "mtp" not in [one.manifest.name for one in plan(checkpoint()).selected]
    (tmp_path / "run.toml").write_text("[model]\nmtp_num_layers = 1\n")
    with pytest.raises(UnknownKeyError, match=r"write --mtp-num-layers, .* in \[mtp\]"):
        prepare(tmp_path / "run.toml", ["--hf-checkpoint", str(checkpoint())])
