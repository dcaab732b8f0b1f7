"""The emulation against transformers' model with every linear layer rounded by numpy; layouts; layers that are left.

Rounding is a step function: a difference of one part in 10^7 before it now and then becomes one of 6 % behind it. So
what should be alike is measured in shares of what rounding changes at all.
"""


import base64
import functools

import numpy as np
import pytest
import torch
from fp8_reference import E4M3, E5M2, rounded
from miles_fp8.emulate import Emulation, emulate
from miles_fp8.precisions import recipes_of
from miles_fp8.recipe import RECIPES, ROWS, WEIGHTS
from miles_megatron.testing.parity import Case, family_of, packed_logits, random_model
from miles_megatron.testing.ranks import batches, distance

from miles_core.errors import DataError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("fp8")  # one worker: the processes are started once

SIZES = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": []}
CASES = {"dense": Case("qwen3", "dense", SIZES), "moe": Case("qwen3_moe", "moe", SIZES | EXPERTS)}


class Linear(torch.autograd.Function):
    """torch's linear with its operands rounded by the reference, and the gradient of its output as well."""

    @staticmethod
    def forward(ctx, x, weight, recipe, table):
        ctx.recipe, ctx.table, ctx.shape = recipe, table, x.shape
        row, block = ROWS[recipe], WEIGHTS[recipe]
        x8 = rounded(x.detach().numpy().reshape(-1, x.shape[-1]), row.rows, row.columns, row.powers)
        w8 = rounded(weight.detach().numpy(), block.rows, block.columns, block.powers)
        ctx.save_for_backward(*(held := [torch.from_numpy(one) for one in (x8, w8)]))
        return (held[0] @ held[1].t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        (x8, w8), row = ctx.saved_tensors, ROWS[ctx.recipe]
        flat = grad.reshape(-1, grad.shape[-1])
        g8 = torch.from_numpy(rounded(flat.numpy(), row.rows, row.columns, row.powers, ctx.table))
        return (g8 @ w8).view(ctx.shape), g8.t() @ x8, None, None


def mixture(experts, hidden, chosen, weights):
    """Experts one after the other, which weigh what goes into their last layer, as Megatron's do, not what comes out:
    scales that are powers of two tell the difference."""
    total = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        token, place = torch.where(chosen == expert)
        gate, up = torch.nn.functional.linear(hidden[token], experts.gate_up_proj[expert]).chunk(2, -1)
        inside = torch.nn.functional.silu(gate) * up * weights[token, place, None]
        total = total.index_add(0, token, torch.nn.functional.linear(inside, experts.down_proj[expert]))
    return total


def reference(case, recipe, table, sequences, targets, monkeypatch):
    """Logits and gradients by name of transformers' model, rounded or, without a recipe, plain."""
    model = random_model(case)
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.forward = functools.partial(mixture, module)
    plain, plainly = torch.nn.functional.linear, {96, 4}  # rows of the output layer and of a router

    def linear(x, weight, bias=None):
        if recipe is None or weight.shape[0] in plainly or not x.numel():
            return plain(x, weight, bias)
        return Linear.apply(x, weight, recipe, table)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        logits = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters()}


@pytest.fixture
def prompts():
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 96, (length,), generator=draw) for length in (40, 1, 17, 64)]
    return found, torch.randint(0, 96, (sum(map(len, found)),), generator=draw)


def share(got, wanted, plain):
    """How far `got` is from `wanted`, in shares of how far rounding moves it."""
    return float((got - wanted).abs().mean() / (plain - wanted).abs().mean())


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_rounds_as_transformers_with_rounded_layers(recipe, kind, tmp_path, monkeypatch, prompts):
    from miles_megatron import cpu, model, weights
    from miles_megatron.testing.parity import _initialized

    if not _initialized():
        cpu.initialize()
    case, (sequences, targets) = CASES[kind], prompts
    theirs, hybrid = random_model(case), recipe == "tensorwise"
    theirs.save_pretrained(tmp_path)
    family = family_of(case.family, theirs.config)
    spec, weight_map = family.model_spec(theirs.config), family.weight_map(theirs.config)
    ours = model.build(model.transformer_config(spec), spec)
    gradients = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    count = emulate(ours, Emulation(recipe, frozenset(range(2)), gradients), weight_map)
    assert count == 2 * (2 + (2 if kind == "dense" else 2 * EXPERTS["num_experts"]))
    weights.load_hf(tmp_path, ours, weight_map)
    got = packed_logits(ours, sequences, spec.logit_softcap)
    torch.nn.functional.cross_entropy(got, targets, reduction="sum").backward()
    table = E5M2 if hybrid else E4M3
    wanted, wanted_gradients = reference(case, recipe, table, sequences, targets, monkeypatch)
    plain, plain_gradients = reference(case, None, table, sequences, targets, monkeypatch)
    assert (plain - wanted).abs().mean() > 1e-3
    if recipe == "tensorwise":  # one scale for q, k and v together, and for all packed sequences, is Megatron's alone
        assert 0.2 < share(got.detach(), plain, wanted) < 2, "as far off as the reference, in a way of its own"
        return
    assert share(got.detach(), wanted, plain) < 0.05
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    found = dict(weights.hf_stream(ours, weight_map))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight",
                 "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"):
        assert share(found[name], wanted_gradients[name], plain_gradients[name]) < 0.1, name


RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "192",
       "--trainer-host", "process", "--disable-rewards-normalization", "--rm-type", "math",
       "--no-use-distributed-optimizer", "--clip-grad", "0", "--lr", "0")  # fmt: skip
ENDS = ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16")


@pytest.fixture(scope="module")
def gradients(tmp_path_factory, ranks_of):
    """(kind, *flags, draw) -> the whole gradient of one step on a batch by HF name, on as many ranks as flags say."""
    folders, made = {}, {}
    for kind, case in CASES.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        random_model(case).save_pretrained(folders[kind])
    drawn = batches(DRAWS, groups=2, samples=2, vocab=96)

    def ask(kind, *flags, draw=0):
        if (kind, flags, draw) not in made:
            plan = prepare(None, ["--hf-checkpoint", str(folders[kind]), *RUN, *flags])
            ranks = ranks_of(plan.config.perf.actor_num_gpus_per_node)
            made[kind, flags, draw] = ranks.gradients(plan, drawn[draw])[1]
        return made[kind, flags, draw]

    return ask


TWO = ("--actor-num-gpus-per-node", "2")
DRAWS = 8


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout"), [
    ("dense", ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    ("moe", ("--expert-model-parallel-size", "2")),
    pytest.param("dense", ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "4",
                           "--sequence-parallel"), marks=pytest.mark.slow),
    pytest.param("dense", ("--pipeline-model-parallel-size", "2"), marks=pytest.mark.slow),
    pytest.param("dense", ("--recompute-granularity", "full"), marks=pytest.mark.slow),
], ids=["TP2", "EP2", "TP4-of-2-keys", "PP2", "recompute"])
def test_a_layout_rounds_as_one_rank(kind, layout, gradients):
    """To float32's accuracy, on a batch where no value is so near a boundary of rounding that a sum's order decides.

    A layout adds in another order, and so may another machine. One value on the other side of a boundary is off by a
    sixteenth; behind it more and more are, until the gradients differ by a large share of what rounding moves, as they
    do on one rank when norms change in their last bits. About half of the batches have such a value; a layout that
    rounds otherwise is off on every one.
    """
    flags = [*(TWO if "recompute" not in layout[0] else ()), *layout]
    shares = []
    while not shares or min(shares) > 1e-3 and len(shares) < DRAWS:
        draw = len(shares)
        fp8, plain = gradients(kind, "--plugin", "fp8", draw=draw), gradients(kind, draw=draw)
        moved = distance(fp8, plain)
        assert moved > 0.01, "8 bits show"
        shares.append(distance(gradients(kind, "--plugin", "fp8", *flags, draw=draw), fp8) / moved)
    assert min(shares) < 1e-3, shares


@pytest.mark.full
def test_first_and_last_layers_stay(gradients):
    plain, all_of_them = gradients("dense"), gradients("dense", "--plugin", "fp8")
    none = gradients("dense", "--plugin", "fp8", *ENDS, "1", "--num-layers-at-end-in-bf16", "1")
    last = gradients("dense", "--plugin", "fp8", *ENDS, "1", "--num-layers-at-end-in-bf16", "0")
    assert distance(none, plain) == 0
    assert distance(last, plain) > 0.005 and distance(last, all_of_them) > 0.005


PRECISIONS = """
configs:
  plain: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  coarse:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: tensorwise}
matchers:
  attention: {type: glob, enabled: true, pattern: "decoder.layers.*.self_attention.linear_*", config: plain}
  inner: {type: glob, enabled: true, pattern: "*.mlp.linear_fc?", config: %s}
  nothing: {type: glob, enabled: false, pattern: "*", config: coarse}
"""


def test_modules_have_precisions_of_their_own(gradients, tmp_path):
    """Those that a file names, the first pattern that fits; none rounded is as without FP8."""
    def of(config):
        inline = base64.b64encode((PRECISIONS % config).encode()).decode()
        return gradients("dense", "--plugin", "fp8", "--te-precision-config-file", f"base64:{inline}")

    plain, fp8 = gradients("dense"), gradients("dense", "--plugin", "fp8")
    assert distance(of("plain"), plain) == 0
    assert distance(of("coarse"), plain) > 0.005 and distance(of("coarse"), fp8) > 0.005


@pytest.mark.parametrize("text", ["", "configs: [", "matchers: {a: {enabled: true, type: glob, pattern: a, config: b}}",
                                  "matchers: {a: {enabled: false}}"])
def test_a_file_of_precisions_that_says_nothing_is_refused(text, tmp_path):
    (tmp_path / "precisions.yaml").write_text(text)
    with pytest.raises(DataError) as caught:
        recipes_of(str(tmp_path / "precisions.yaml"))
    assert caught.value.code == ("module-precisions-empty" if "false" in text else "module-precisions-unreadable")


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_every_recipe_trains(recipe, gradients):
    found = [gradients("moe", "--fp8-recipe", one) for one in (recipe, "blockwise")]
    assert 0.005 < distance(*found) < 0.7 and all(np.isfinite(grad).all() for grad in found[0].values())


@pytest.mark.full
def test_hybrid_rounds_gradients_otherwise(gradients):
    one, other = gradients("dense", "--plugin", "fp8"), gradients("dense", "--fp8-format", "hybrid")
    assert 0.005 < distance(other, one) < 0.5
    assert distance(gradients("dense", "--plugin", "fp8", "--fp8-format", "none"), gradients("dense")) == 0


