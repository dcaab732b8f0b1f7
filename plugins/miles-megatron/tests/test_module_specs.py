"""Whose layers a model gets, and what they are made of; tests/gpu/test_te.py runs Transformer Engine's."""

import copy
from dataclasses import replace

import pytest
from miles_megatron.specs import Warming

from miles_core.errors import ConfigError

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 96, "vocab_size": 96, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "decoder_sparse_step": 2}  # fmt: skip


@pytest.fixture
def host(megatron, monkeypatch):
    """(gpu, transformer_engine) -> module_specs, on a host that has them or not."""
    from miles_megatron import cpu, module_specs

    def make(gpu: bool, engine: bool):
        monkeypatch.setattr(cpu, "no_cuda", lambda: not gpu)
        monkeypatch.setattr(cpu, "no_transformer_engine", lambda: not engine)
        return module_specs

    return make


@pytest.mark.parametrize(("gpu", "engine", "wanted", "bf16", "chosen"), [
    (True, True, None, True, "transformer_engine"), (True, True, None, False, "local"),
    (True, True, "local", True, "local"), (True, True, "transformer_engine", False, "transformer_engine"),
    (True, False, None, True, "local"), (False, True, None, True, "local"),
])  # fmt: skip
def test_the_host_the_dtype_and_the_run_decide(host, gpu, engine, wanted, bf16, chosen):
    assert host(gpu, engine).implementation(wanted, bf16) == chosen


def test_what_the_host_cannot_do_is_announced_and_what_is_unknown_refused(host, caplog):
    assert host(False, False).implementation("transformer_engine", True) == "local"
    assert "needs a GPU" in caplog.text
    assert host(True, False).implementation("transformer_engine", True) == "local"
    assert "needs the package transformer_engine" in caplog.text
    with pytest.raises(ConfigError, match="local or transformer_engine"):
        host(True, True).implementation("inference_optimized", True)


@pytest.fixture(scope="module")
def architecture(megatron):
    """(the ModelSpec of a tiny Qwen3-MoE whose second layer is sparse, its TransformerConfig)."""
    from miles_megatron.families import FAMILIES
    from miles_megatron.model import transformer_config
    from transformers import Qwen3MoeConfig

    spec = FAMILIES["qwen3_moe"].model_spec(Qwen3MoeConfig(**TINY))
    return spec, transformer_config(spec, bf16=True)


def changed(config, **fields):
    """A copy with other values; dataclasses.replace would derive everything anew."""
    other = copy.copy(config)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def test_every_part_of_a_layer_is_the_sets(architecture):
    """A layer holds no linear layer, norm or activation but those of the set it was asked for."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from miles_megatron import layers, module_specs
    from miles_megatron.rope import Rope

    class Column(ColumnParallelLinear): ...

    class Row(RowParallelLinear): ...

    class Norm(layers.Norm): ...

    class Gate(layers.SwiGLU): ...

    class Fc1: ...

    class Fc2: ...

    spec, config = architecture
    mine = replace(module_specs.OURS, column=Column, row=Row, norm=Norm, activations={"silu": Gate},
                   grouped=(TEGroupedMLP, Fc1, Fc2))
    rope = Rope(32, spec.attention[0].rotary)

    def made(sparse, config, **parts):
        other = replace(spec, **parts)
        return module_specs.layer(config, other, sparse, spec.attention[0], rope, mine).submodules

    dense = made(False, config, post_norms=True)
    inner = dense.self_attention.submodules
    assert (inner.linear_qkv, inner.linear_proj, inner.q_layernorm, inner.k_layernorm) == (Column, Row, Norm, Norm)
    assert dense.input_layernorm is dense.pre_mlp_layernorm is dense.mlp_bda.params["norm"] is Norm
    scaled = made(False, config, pre_norms=False, residual_scale=0.5)
    assert scaled.input_layernorm is scaled.pre_mlp_layernorm is IdentityOp
    assert scaled.self_attn_bda.params["scale"] == scaled.mlp_bda.params["scale"] == 0.5
    mlp = dense.mlp.submodules
    assert (mlp.linear_fc1, mlp.linear_fc2, mlp.activation_func) == (Column, Row, Gate)
    mixture = made(True, config).mlp.submodules
    assert mixture.experts.submodules.linear_fc1 is mixture.shared_experts.submodules.linear_fc1 is Column
    together = made(True, changed(config, moe_grouped_gemm=True)).mlp.submodules.experts
    assert together.module is TEGroupedMLP
    assert (together.submodules.linear_fc1, together.submodules.linear_fc2) == (Fc1, Fc2)


def test_fused_attention_is_for_what_it_can_compute(architecture):
    from megatron.core.transformer.enums import AttnBackend
    from miles_megatron.module_specs import fits

    spec, config = architecture
    plain = spec.attention[0]
    windowed = replace(plain, window=8)
    assert fits(config, plain) and fits(config, windowed) and fits(config, replace(plain, rotary=None))
    ring = changed(config, context_parallel_size=2)
    assert fits(ring, plain) and not fits(ring, windowed)
    assert not fits(config, replace(plain, softcap=50.0))
    assert fits(config, replace(plain, head_dim=256)) and not fits(config, replace(plain, head_dim=512))
    assert not fits(config, replace(plain, warming=Warming(0.1, 8192)))
    assert not fits(replace(config, deterministic_mode=True), plain)
    assert not fits(changed(config, bf16=False), plain)
    assert not fits(changed(config, attention_backend=AttnBackend.local), plain)


def test_boundaries_for_fused_attention_cover_every_row(megatron):
    """One more sequence for the rows behind the last one; padded boundaries under context parallelism only."""
    import torch
    from miles_megatron.packed_layout import packed_rows

    cpu = torch.device("cpu")
    rows = packed_rows([0, 5, 6, 24]).on_device(cpu, 32)
    assert rows.cu_seqlens_q.tolist() == rows.cu_seqlens_kv.tolist() == [0, 5, 6, 24, 32]
    assert rows.cu_seqlens_q.dtype == torch.int32
    assert rows.max_seqlen_q == 18 and rows.cu_seqlens_q_padded is None and rows.qkv_format == "thd"
    cut = packed_rows([0, 8, 16]).on_device(cpu, 32, ranks=2)
    assert cut.cu_seqlens_q_padded.tolist() == [0, 8, 16, 32] and cut.max_seqlen_q == 16
    whole = packed_rows([0, 16, 32])
    assert whole.on_device(cpu, 32) is whole.on_device(cpu, 32)
    assert whole.on_device(cpu, 32).cu_seqlens_q.tolist() == [0, 16, 32]


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_for_the_fused_rope_are_those_of_the_tables(megatron, interleaved):
    """[n, 1, 1, r], each pair's angle at both of its channels; a longer sequence makes them anew."""
    import torch
    from miles_megatron.rope import Rope, Rotate
    from miles_megatron.specs import Rotary

    rope = Rope(32, Rotary(1e4, fraction=0.5, interleaved=interleaved))
    angles = rope.angles(20, torch.device("cpu"))
    assert angles.shape == (20, 1, 1, 16) and angles.dtype == torch.float32
    assert rope.angles(7, torch.device("cpu")) is angles and len(rope.angles(21, torch.device("cpu"))) == 21
    x = torch.randn(20, 3, 32)
    cos, sin = (table[:, None] for table in rope.tables(torch.arange(20), torch.float32))
    part, rest = x[..., :16], x[..., 16:]
    # Transformer Engine's own formula: x cos + rotate_half(x) sin
    half = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2) if interleaved else torch.cat(
        [-part[..., 8:], part[..., :8]], -1)
    theirs = torch.cat([part * angles[:, 0].cos() + half * angles[:, 0].sin(), rest], -1)
    assert torch.allclose(Rotate.apply(x, cos, sin, interleaved), theirs, atol=1e-6)
