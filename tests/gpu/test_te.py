"""Transformer Engine's layers against Megatron's local ones, from one checkpoint: they are the same model.

    PYTHONPATH=SITE python -m pytest tests/gpu/test_te.py -s
"""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from miles_megatron.testing.ranks import Ranks, batches

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.integration,
              pytest.mark.full]

SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 512}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
"""Each token goes to all of them: bfloat16 in another order would send a few to other experts."""
LENGTHS = (37, 1, 64, 2, 1, 20, 128, 1)
"""Not a multiple of 16 in all: the rows behind are nobody's."""

BOUND = {"bf16": 0.03, "fp32": 3e-3}
"""Largest relative difference, as a share of the norm; in fp32 Transformer Engine multiplies in TF32."""


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory) -> Path:
    """A random Hugging Face checkpoint."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sparse = request.param == "qwen3_moe"
    config = Qwen3MoeConfig(**SIZES, **EXPERTS) if sparse else Qwen3Config(**SIZES)
    model = (Qwen3MoeForCausalLM if sparse else Qwen3ForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


def built(folder: Path, implementation: str, dtype: str, **overrides):
    """(model, weight map), filled from the checkpoint."""
    from miles_megatron import cpu, model, weights
    from miles_megatron.families import FAMILIES
    from transformers import AutoConfig

    cpu.initialize()
    hf = AutoConfig.from_pretrained(folder)
    family = FAMILIES[hf.model_type]
    spec, weight_map = family.model_spec(hf), family.weight_map(hf)
    config = model.transformer_config(spec, {"transformer_impl": implementation, **overrides}, bf16=dtype == "bf16")
    assert config.transformer_impl == implementation
    made = model.build(config, spec).to(cpu.device())
    weights.load_hf(folder, made, weight_map)
    return made, weight_map


def passed(model, weights_by_name) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of packed random sequences, and the gradient of a random direction in them."""
    from miles_megatron.packed_layout import packed_rows

    draw = torch.Generator().manual_seed(1)
    rows = -(-sum(LENGTHS) // 16) * 16
    tokens = torch.randint(0, SIZES["vocab_size"], (1, rows), generator=draw).cuda()
    direction = torch.randn(sum(LENGTHS), SIZES["hidden_size"], generator=draw).cuda()
    boundaries = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    hidden = model(tokens, None, None, packed_seq_params=packed_rows(boundaries))[: sum(LENGTHS), 0].float()
    (hidden * direction).sum().backward()
    named = {name: p.grad.float() for name, p in weights_by_name(model).items() if p.grad is not None}
    return hidden.detach(), named


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach(), other.detach()
    return float((one - other).norm() / other.norm().clamp_min(1e-12))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "sequential"])
def test_hidden_states_and_gradients_are_those_of_the_local_layers(checkpoint, dtype, grouped):
    """Under the same names; sequences of one token and rows behind the last one included."""
    from miles_megatron.weights import global_parameters

    expected, wanted = passed(built(checkpoint, "local", dtype)[0], global_parameters)
    made, _ = built(checkpoint, "transformer_engine", dtype, moe_grouped_gemm=grouped)
    found, gradients = passed(made, global_parameters)
    assert gradients.keys() == wanted.keys()
    gaps = {"hidden": apart(found, expected), **{name: apart(gradients[name], wanted[name]) for name in wanted}}
    worst = max(gaps, key=gaps.get)
    print(f"{checkpoint.name} {dtype}: hidden {gaps['hidden']:.1e}, worst {worst} {gaps[worst]:.1e}")
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert gaps["hidden"] < BOUND[dtype] and gaps[worst] < 3 * BOUND[dtype]


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
def test_router_losses_are_those_of_the_local_layers(checkpoint, tmp_path):
    """Of two experts a token, with rows behind the last sequence, which they leave out. A token near a tie may have
    another expert in TF32."""
    from miles_megatron.packed_layout import packed_rows
    from miles_megatron.weights import global_parameters

    folder = shutil.copytree(checkpoint, tmp_path / "two")
    constants = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(constants | {"num_experts_per_tok": 2}))
    losses = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    rows = -(-sum(LENGTHS) // 16) * 16
    tokens = torch.arange(rows)[None].remainder(SIZES["vocab_size"]).cuda()
    boundaries = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    padding = (torch.arange(rows) >= sum(LENGTHS)).cuda()
    found = {}
    for name, fused in (("local", {}), ("transformer_engine", {"moe_router_fusion": True})):
        model, _ = built(folder, name, "fp32", **losses, **fused)
        hidden = model(tokens, None, None, packed_seq_params=packed_rows(boundaries, padding=padding))
        (hidden * 0).sum().backward()
        found[name] = {key: one.grad.float() for key, one in global_parameters(model).items() if "router" in key}
    assert found["local"] and all(float(one.norm()) > 0 for one in found["local"].values())
    for key, gradient in found["local"].items():
        assert apart(found["transformer_engine"][key], gradient) < 0.05, key


@pytest.mark.parametrize("ahead", [False, True], ids=["causal", "ahead"])
@pytest.mark.parametrize("window", [None, 8])
def test_fused_attention_is_ours(window, ahead):
    """Rope in part of a head and interleaved, with and without a window, and where tokens see later ones: out and
    gradients to bf16."""
    from miles_megatron import cpu, module_specs, te
    from miles_megatron.packed_layout import packed_rows
    from miles_megatron.rope import Rope
    from miles_megatron.specs import Attention, Rotary

    cpu.initialize()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(num_layers=1, hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=64,
                               bf16=True, params_dtype=torch.bfloat16, attention_dropout=0.0)
    boundaries = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    rows = -(-boundaries[-1] // 16) * 16
    last = torch.cat([torch.arange(length) for length in (*LENGTHS, rows - boundaries[-1])])
    last[40:60] = last[59].clone()  # of the third sequence
    last = last.cuda() if ahead else None
    for rotary in (Rotary(1e4), Rotary(1e4, fraction=0.5), Rotary(1e4, interleaved=True)):
        wanted, rope = Attention(rotary, window=window), Rope(64, rotary)
        outs = []
        for make in (module_specs.packed_attention, te.attention):
            torch.manual_seed(0)
            core = make(config, wanted, rope)(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal,
                                              attention_type="self")
            q, k, v = (torch.randn(rows, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                       for heads in (4, 2, 2))
            packed = packed_rows(boundaries, last=last)
            out = core(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
            out.float()[: boundaries[-1]].square().sum().backward()
            outs.append([out[: boundaries[-1]].float(), *(x.grad.float() for x in (q, k, v))])
        gaps = [apart(found, expected) for expected, found in zip(*outs, strict=True)]
        print(rotary, window, gaps)
        assert max(gaps) < 0.02, (rotary, gaps)


def test_what_was_loaded_is_streamed_again(checkpoint):
    """Every tensor of the checkpoint, bit for bit in bf16."""
    from miles_megatron import weights
    from miles_megatron.shards import read_into, stored_tensors

    made, weight_map = built(checkpoint, "transformer_engine", "bf16")
    streamed = {name: tensor.cpu() for name, tensor in weights.hf_stream(made, weight_map)}
    stored = stored_tensors(checkpoint / "model.safetensors")
    for name, one in stored.items():
        tensor = torch.empty(one.shape, dtype=one.dtype)
        read_into(one, tensor)
        assert torch.equal(streamed[name], tensor.bfloat16()), name
    assert streamed.keys() == stored.keys()


@pytest.fixture
def run_file(checkpoint, tmp_path) -> Path:
    """A run on it that never samples."""
    path = tmp_path / "run.toml"
    path.write_text(f"""
[checkpoint]
hf_checkpoint = "{checkpoint}"
[rollout]
prompt_data = "data/none.jsonl"
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 41
engine = "local"
rm_type = ["math"]
[perf]
bf16 = true
use_dynamic_batch_size = true
max_tokens_per_gpu = 512
[optimizer]
lr = 1e-3
""")
    return path


def trained(ranks: Ranks, run_file: Path, *flags: str, save: Path | None = None, count: int = 2) -> dict:
    from miles_core.plugins.plan import prepare

    plan = prepare(run_file, ["--actor-num-gpus-per-node", str(ranks.size), "--trainer-host", "process", *flags])
    return ranks.train(plan, batches(count), save=save)


def test_checkpoints_go_from_one_to_the_other_and_back(run_file, tmp_path):
    """Weights and optimizer state: loading changes nothing, and the next step's loss agrees to bf16."""
    with Ranks(1) as ranks:
        first = trained(ranks, run_file, "--transformer-impl", "local", save=tmp_path / "local")
        there = trained(ranks, run_file, "--load", str(tmp_path / "local"), save=tmp_path / "te", count=0)
        back = trained(ranks, run_file, "--transformer-impl", "local", "--load", str(tmp_path / "te"), count=0)
        for name, weight in first["weights"].items():
            assert (there["weights"][name] == weight).all() and (back["weights"][name] == weight).all(), name
        one = trained(ranks, run_file, "--transformer-impl", "local", "--load", str(tmp_path / "local"), count=1)
        other = trained(ranks, run_file, "--load", str(tmp_path / "te"), count=1)
    assert one["steps"][0]["train/loss"] == pytest.approx(other["steps"][0]["train/loss"], abs=0.02)
    assert one["steps"][0]["train/grad_norm"] == pytest.approx(other["steps"][0]["train/grad_norm"], rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["tensor", "context", "expert"])
def test_two_ranks_train_like_one(run_file, layout, checkpoint):
    """Tensor with sequence parallelism, context parallelism round the ring, experts on two ranks."""
    if layout == "expert" and "moe" not in checkpoint.name:
        pytest.skip("a dense model")
    flags = {"tensor": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
             "context": ["--context-parallel-size", "2"], "expert": ["--expert-model-parallel-size", "2"]}[layout]
    with Ranks(1) as ranks:
        expected = trained(ranks, run_file)
    with Ranks(2) as ranks:
        found = trained(ranks, run_file, *flags)
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=0.02)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.1)


def test_the_gpus_memory_goes_and_comes_back(run_file):
    """torch counts almost nothing while everything is off, and the training has the same bits."""
    from miles_core.build import trainer_part
    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    plan = prepare(run_file, ["--trainer-host", "process"])
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    trainer.load()
    try:
        batch, = batches(1)
        trainer.take_batch(batch)
        trainer.score(), trainer.advantage(), trainer.step(0), trainer.end_batch()
        gc.collect()
        held = torch.cuda.memory_allocated()
        before = {name: tensor.cpu() for name, tensor in trainer.models.stream()}
        trainer.offload(["weights", "gradients", "optimizer"])
        left = torch.cuda.memory_allocated()
        print(f"held {held / 2**20:.1f} MiB, left {left / 2**20:.1f} MiB")
        # bf16 weights, fp32 gradients, masters and two moments; workspaces of cuBLAS and Transformer Engine stay.
        state = 18 * sum(tensor.numel() for tensor in before.values())
        assert held - left > 0.9 * state
        assert all(one.is_pinned() for host in trainer.models.actor.memory.host.values() for one in host.blocks)
        trainer.onload(["weights"])
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in trainer.models.stream())
    finally:
        trainer.close()
    with Ranks(1) as ranks:
        given = prepare(run_file, ["--trainer-host", "process"])
        one, other = (ranks.train(given, batches(2), turns=turns) for turns in (False, True))
    gaps = {name: abs(weight - other["weights"][name]) for name, weight in one["weights"].items()}
    worst = max(gaps, key=lambda name: gaps[name].max())
    print(f"apart by {gaps[worst].max():.1e} in {worst}, mean {max(float(gap.mean()) for gap in gaps.values()):.1e}")
    # Atomics: a GPU's sums have no fixed order, and Adam's step is lr wherever a gradient is nearly 0.
    assert max(float(gap.mean()) for gap in gaps.values()) < 1e-3


def test_a_fused_step_over_small_moments_takes_little_more_than_they_do():
    """Transformer Engine widens a group's moments at once; in slices a step's peak is a slice's, and no bit changes."""
    from miles_megatron.adam import step_in_slices
    from transformer_engine.pytorch.optimizers import FusedAdam

    def trained(slices: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        parameters = [torch.randn(2**20, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(64)]
        optimizer = FusedAdam(parameters, lr=1e-3, master_weights=True, use_decoupled_grad=True,
                              store_param_remainders=True, exp_avg_dtype=torch.bfloat16,
                              exp_avg_sq_dtype=torch.bfloat16)
        if slices:
            step_in_slices(optimizer, 2**22)
        for _ in range(3):
            for parameter in parameters:
                parameter.decoupled_grad = torch.randn_like(parameter, dtype=torch.float32)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        assert optimizer.param_groups[0]["step"] == 3
        return [parameter.detach().clone() for parameter in parameters], peak

    (whole, widened), (cut, sliced) = trained(False), trained(True)
    print(f"peak of a step of 2^26 parameters: {widened / 2**20:.0f} MiB whole, {sliced / 2**20:.0f} MiB in slices")
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    assert widened >= 2**26 * 8 and sliced <= 2**22 * 8 * 2.5  # the arguments of the slice before live on for a while
