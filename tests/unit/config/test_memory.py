"""The memory plan, against what torch really keeps: parameters, saved tensors, the peak of the log-probs."""

import functools
import json
from dataclasses import replace

import pytest
from miles_megatron import estimate
from miles_megatron import memory_plan as memory
from miles_megatron.architecture import Architecture
from miles_megatron.layout import Layout

from miles_core.config.tables import Debug, Optimizer, Perf, RunConfig
from miles_core.errors import ConfigError

CONSTANTS = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "intermediate_size": 384, "max_position_embeddings": 1024}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
TOKENS = 512


def described(sparse: bool, layers: int, tied: bool = False, **layout) -> estimate.ModelDimensions:
    some = {"experts": 8, "expert_ffn": 64, "experts_per_token": 2, "sparse": layers} if sparse else {}
    size = Architecture(layers=layers, hidden=128, heads=4, groups=2, head_dim=64, vocab=512, ffn=384, checkpoint=True,
                        **some)
    return estimate.ModelDimensions(size=size, layout=Layout(**layout), value=2, tied=tied, qk_norm=True)


@pytest.fixture(scope="module")
def built():
    """(sparse, layers) -> a Megatron model in bf16."""
    from miles_megatron import cpu, model
    from miles_megatron.families import FAMILIES
    from transformers import Qwen3Config, Qwen3MoeConfig

    cpu.initialize()

    def make(sparse, layers):
        kind, more = (Qwen3MoeConfig, EXPERTS) if sparse else (Qwen3Config, {})
        hf = kind(**CONSTANTS, **more, num_hidden_layers=layers, tie_word_embeddings=False)
        spec = FAMILIES[hf.model_type].model_spec(hf)
        return model.build(model.transformer_config(spec, bf16=True), spec).bfloat16()

    return make


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_parameters_are_counted_exactly(built, sparse):
    model = described(sparse, 3)
    assert sum(estimate.parameters(model, 3, True, True)) == sum(p.numel() for p in built(sparse, 3).parameters())


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_what_a_layer_keeps_is_what_autograd_saves(built, sparse):
    """The local layers keep q, k and v as one tensor beside the copy that the norm of q reads: as much again as q."""
    import torch
    from miles_megatron.packed_layout import packed_rows

    def saved(layers: int) -> int:
        model, found = built(sparse, layers), {}
        own = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                found[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.arange(TOKENS)[None] % 512, None, None, packed_seq_params=packed_rows([0, 256, TOKENS]))
        size = sum(storage.nbytes() for storage in found.values())
        del out
        return size

    of_one = (saved(3) - saved(1)) / 2 / TOKENS
    again = 2 * 4 * 64
    estimated = sum(estimate.saved_activations(described(sparse, 1), sparse).values())
    assert estimated == pytest.approx(of_one - again, rel=0.01)


def test_the_peak_of_the_log_probs_is_what_torch_allocates():
    """Forward and backward in bf16, by torch's own record of the CPU's allocations."""
    import torch
    from miles_megatron.logprob import token_log_probs

    tokens, vocab, hidden, chunk = 2048, 4096, 128, 256
    states = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    weight = torch.randn(vocab, hidden).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        token_log_probs(states, weight, targets, chunk_size=chunk)[0].sum().backward()
    held, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    model = replace(described(False, 1), size=Architecture(layers=1, hidden=hidden, heads=4, groups=2, head_dim=32,
                                                           vocab=vocab, ffn=384, checkpoint=True))
    config = RunConfig(perf=Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=tokens, log_probs_chunk_size=chunk))
    assert estimate._logits(config, model, fused=False) == pytest.approx(most, rel=0.15)
    every, named = (replace(config, perf=replace(config.perf, log_probs_chunk_size=rows)) for rows in (-1, tokens))
    assert estimate._logits(every, model, False) == estimate._logits(named, model, False) > most


def test_the_kernels_for_log_probs_have_a_chunk_in_16_bits_once():
    """Only where they compute: not under tensor parallelism, with a softcap, in float32, or with unrounded logits."""
    config = RunConfig(perf=Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=4096))
    large = Architecture(layers=1, hidden=128, heads=4, groups=2, head_dim=64, vocab=151936, ffn=384, checkpoint=True)
    model = replace(described(False, 1), size=large)
    kernels, torchs = (estimate._logits(config, model, fused) for fused in (True, False))
    assert kernels == 1024 * 151936 * 2 + 4096 * 128 * 8 and torchs > 4 * kernels
    waiting = config.with_surface("megatron", overlap_grad_reduce=True)
    assert estimate._logits(waiting, model, fused=True) > 1024 * 151936 * 2 + 151936 * 128 * 4
    assert estimate._fused(config, model)
    others = replace(model, layout=Layout(tensor=2)), replace(model, softcap=True), replace(model, value=4)
    unrounded = replace(config, algorithm=replace(config.algorithm, fp32_lm_head=True))
    assert not any((*(estimate._fused(config, other) for other in others), estimate._fused(unrounded, model)))


def test_dense_layers_at_the_front_leave_later_stages_more_experts():
    """As DeepSeek-V3's: of eight layers the first two are dense, and the second stage of two has four mixtures."""
    before = tuple(max(count - 2, 0) for count in range(9))
    size = replace(described(True, 8).size, sparse=6)
    model = replace(described(True, 8, pipeline=2, world=2), size=size, sparse_before=before)
    assert [estimate._sparse_of(RunConfig(), model, stage) for stage in (0, 1)] == [2, 4]
    average = replace(model, sparse_before=())
    assert [estimate._sparse_of(RunConfig(), average, stage) for stage in (0, 1)] == [3, 3]
    known, not_known = (estimate._stage(RunConfig(), one, 1)["weights"] for one in (model, average))
    assert known - not_known == model.value * (3 * 128 * 64 * 8 + 128 * 8 - 3 * 128 * 384)


def test_the_fullest_stage_counts_where_stages_hold_different_numbers_of_layers():
    config, model = RunConfig(), described(False, 61, pipeline=8, world=8)
    stages = [config.with_surface("megatron", **more) for more in (
        {}, {"num_layers_in_last_pipeline_stage": 5}, {"num_layers_in_first_pipeline_stage": 5})]
    assert [[estimate.layers_of(one, model, at) for at in (0, 1, 7)] for one in stages] == [
        [61 / 8] * 3, [8, 8, 5], [5, 8, 8]]
    even, last, first = (estimate.trainer(one, model)["weights"] for one in stages)
    assert last > even and first == pytest.approx(even, rel=0.05)


def test_ranks_share_what_the_layout_splits():
    """Tensor ranks share matrices, stages layers, data ranks the optimizer; experts have ranks of their own."""
    whole, split = described(False, 4), described(False, 4, tensor=2, sequence_parallel=True, world=2)
    one, two = (sum(estimate.saved_activations(m, False).values()) for m in (whole, split))
    assert two == pytest.approx(one / 2)
    dense, sparse = estimate.parameters(described(True, 4), 4, True, True)
    assert estimate.parameters(described(True, 4, expert=4), 4, True, True) == (dense, sparse / 4)
    assert estimate.parameters(described(True, 4), 2, True, False)[1] == sparse / 2
    config = RunConfig(perf=Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=1024))
    alone = estimate.trainer(config, described(False, 4))
    shared = estimate.trainer(config, described(False, 4, data=4))
    assert shared["optimizer"] == alone["optimizer"] / 4 and shared["weights"] == alone["weights"]
    again = estimate.trainer(config.with_surface("megatron", recompute_granularity="full"), described(False, 4))
    assert again["activations"] < alone["activations"] / 5
    away = replace(config, surfaces={"megatron": {"optimizer_cpu_offload": True}})
    assert estimate.trainer(away, described(False, 4))["optimizer"] == 0


def test_muon_has_one_momentum_of_each_matrix_of_a_layer(built):
    """And of norms in the estimate: 128 numbers of thousands each. The rest has two moments."""
    adam = RunConfig()
    muon = replace(adam, optimizer=replace(adam.optimizer, optimizer="muon"))
    model = described(True, 4)
    spared = estimate.trainer(adam, model)["optimizer"] - estimate.trainer(muon, model)["optimizer"]
    named = built(True, 4).named_parameters()
    matrices = sum(one.numel() for name, one in named if ".layers." in name and one.ndim == 2)
    assert spared == pytest.approx(4 * matrices, rel=2e-3) and spared >= 4 * matrices


def test_layer_wise_muon_has_a_ranks_share_and_an_embedding_whole():
    plain, divided = (replace(RunConfig(), optimizer=Optimizer(optimizer=name), surfaces={
        "megatron": {"use_distributed_optimizer": False}}) for name in ("muon", "dist_muon"))
    model = functools.partial(described, True, 4, data=2, expert=2, world=4)
    few, many = model(expert_data=2), model(expert_data=8)
    dense, experts = estimate.state_of(plain, few, 0, 12)
    assert estimate.trainer(plain, few)["optimizer"] == dense + experts
    assert estimate.trainer(divided, few)["optimizer"] == dense / 2 + experts / 2
    table = 12 * 512 * 128
    assert estimate.trainer(divided, replace(many, layout=replace(many.layout, data=64)))["optimizer"] == (
        table + experts / 8)


def test_small_moments_leave_less_of_the_optimizer():
    """A fused Adam with moments in bfloat16 keeps 16 bits of the fp32 master beside a bfloat16 weight."""
    small = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    model = replace(described(False, 4), value=2)
    usual, less, whole = (estimate.trainer(RunConfig(surfaces={"megatron": given}), model)["optimizer"] for given in (
        {}, small, small | {"store_param_remainders": False}))
    assert less == usual * 6 / 12 and whole == usual * 8 / 12


@pytest.fixture
def large(tmp_path) -> RunConfig:
    """A run of Qwen3-4B on one GPU."""
    said = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
            "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = RunConfig(perf=Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=16384),
                       stated={"engine:sglang": ("servers", "server_args")})
    return replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(tmp_path)))


def on(config: RunConfig, gib: float | None) -> RunConfig:
    return replace(config, perf=replace(config.perf, gpu_memory_gib=gib))


def test_a_run_that_cannot_fit_is_refused_with_what_would(large):
    """Each remedy fits by the same estimate; a run that is close is announced, one with room is silent."""
    needed = memory.peak(large, estimate.dimensions_of(large)) / memory.GIB
    with pytest.raises(ConfigError, match=r"does not fit.*--recompute-granularity full \(\d+ GiB\)"):
        memory.check_memory(on(large, 100), print)
    notes = []
    memory.check_memory(on(large, needed + 3), notes.append)
    memory.check_memory(on(large, 2 * needed), notes.append)
    memory.check_memory(on(large, None), notes.append)
    assert len(notes) == 1 and "tight" in notes[0]
    with pytest.raises(ConfigError, match="larger --tensor-model-parallel-size"):
        memory.check_memory(on(large, 5), print)


def test_both_sides_in_memory_at_once_have_to_fit_together(large):
    """Only where they share the GPU and neither makes room, and there are both."""
    needed = memory.peak(large, estimate.dimensions_of(large)) / memory.GIB
    served = replace(on(large, 1.5 * needed), rollout=replace(large.rollout, engine="sglang"))
    shared = replace(served, surfaces={"server": {"mem_fraction_static": 0.8}})
    shared = replace(shared, perf=replace(shared.perf, colocate=True, offload_train=False, offload_rollout=False))
    with pytest.raises(ConfigError, match=r"both stay in its memory.*--offload-rollout"):
        memory.check_memory(shared, print)
    memory.check_memory(replace(shared, surfaces={"server": {"mem_fraction_static": 0.2}}), print)
    memory.check_memory(replace(shared, perf=replace(shared.perf, offload_rollout=True)), print)
    memory.check_memory(replace(shared, debug=Debug(debug_train_only=True)), print)


def test_the_plan_says_it_for_gpus_only(large, monkeypatch):
    assert memory.lines(on(large, None)) == []
    _, title, trainer = memory.lines(on(large, 140))
    assert title == "memory of a GPU, estimated" and trainer.startswith("  trainer  ") and " of 140.0 GiB" in trainer
    rollout = replace(large.rollout, engine="sglang")
    served = replace(on(large, 140), rollout=rollout, surfaces={"server": {"mem_fraction_static": 0.5}})
    served = replace(served, perf=replace(served.perf, rollout_num_gpus=2, rollout_num_gpus_per_engine=2))
    engine, verdict = memory.lines(served)[-2:]
    assert engine == "  engine   70.0 of 140.0 GiB: weights 3.7, KV cache 66.3"
    each = 2 * 36 * 2 * 4 * 128  # keys and values of half of the groups
    count = int(verdict.split()[-2].replace(",", ""))
    assert "2 GPUs fits" in verdict and count == pytest.approx(66.25 * memory.GIB / each, rel=0.01)


def test_the_plan_says_where_a_trainer_need_not_leave(large):
    """Where an engine beside its state has room for all answers at once; the tokens count, and so does the GPU."""
    shared = replace(on(large, 140), perf=replace(on(large, 140).perf, colocate=True, offload_train=True))
    batch = replace(large.rollout, engine="sglang", rollout_batch_size=32, n_samples_per_prompt=8)
    last = memory.lines(replace(shared, rollout=batch))[-1]
    parts = estimate.trainer(shared, estimate.dimensions_of(shared))
    moved, each = parts["weights"] + parts["optimizer"], 2 * 36 * 2 * 8 * 128
    left = (140 * memory.GIB - memory.OUTSIDE - moved - parts["gradients"]) * 0.9 - parts["weights"]
    assert f"--no-offload-train {moved / memory.GIB:.1f} GiB" in last
    assert int(last.split()[-2].replace(",", "")) == pytest.approx(left / each, rel=0.001)
    for other in (replace(batch, rollout_max_response_len=2048), replace(batch, rollout_batch_size=64)):
        assert "no-offload-train" not in memory.lines(replace(shared, rollout=other))[-1]
    for gib, offload in ((80, True), (140, False)):
        config = replace(shared, rollout=batch, perf=replace(shared.perf, gpu_memory_gib=gib, offload_train=offload))
        assert "no-offload-train" not in memory.lines(config)[-1]


V3 = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
      "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
      "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
      "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
      "tie_word_embeddings": False}  # fmt: skip
LLAMA = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
LATENT, SHARED, DENSE = (rf"re:model\.layers\.\d+\.{block}" for block in (
    r"self_attn\..*", r"mlp\.shared_experts\..*", r"mlp\.(gate|up|gate_up|down)_proj$"))
IN_BF16 = ["lm_head", r"re:model\.layers\.\d+\.mlp\.gate$"]


def in_int4(group: int, *kept: str) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [*IN_BF16, *kept],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.fixture
def largest(tmp_path):
    """(quantization, model) -> a run of DeepSeek-V3 on eight GPUs of 140 GiB, one engine on all of them."""
    def make(quantization=None, model=V3):
        (tmp_path / "config.json").write_text(json.dumps(model | {"quantization_config": quantization}))
        eight = Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=8192, actor_num_gpus_per_node=8,
                     rollout_num_gpus=8, rollout_num_gpus_per_engine=8, gpu_memory_gib=140)
        config = RunConfig(perf=eight, stated={"engine:sglang": ("servers", "server_args")})
        return replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(tmp_path)),
                       rollout=replace(config.rollout, engine="sglang"), surfaces={"server": {}, "megatron": {
                           "tensor_model_parallel_size": 8, "sequence_parallel": True,
                           "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}})

    return make


EXPERTS_ALONE = (LATENT, SHARED, DENSE)


@pytest.mark.parametrize(("model", "quantization", "gigabytes"), [
    (V3, None, 1342.1), (V3, in_int4(32, *EXPERTS_ALONE), 402.1), (V3, in_int4(128, *EXPERTS_ALONE), 371.4),
    (V3, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 673.0),
    (LLAMA, None, 141.1), (LLAMA, in_int4(32), 42.7), (LLAMA, in_int4(128), 39.5),
])  # fmt: skip
def test_an_engine_takes_what_its_checkpoint_has(largest, model, quantization, gigabytes):
    """Figures of `python -m miles_int4_qat.sizes`, which counts the tensors of transformers' model one by one."""
    config = largest(quantization, model)
    weights, _ = memory.engine(config, estimate.dimensions_of(config))
    assert 8 * weights / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_what_fits_of_671b_on_eight_gpus_of_140_gib(largest):
    """An engine in INT4 or FP8 and none in bfloat16; the trainer on more GPUs, and the error says on how many."""
    for group in (32, 128):
        config = largest(in_int4(group, *EXPERTS_ALONE))
        engine, verdict = memory.lines(config)[-2:]
        assert "weights 4" in engine and "fits" in verdict and "not" not in verdict
        with pytest.raises(ConfigError, match=r"trainer does not fit.*engine's weights 4\d GiB.*16 times the GPUs"):
            memory.check_memory(config, print)
        more = replace(config, perf=replace(config.perf, actor_num_nodes=16)).with_surface(
            "megatron", pipeline_model_parallel_size=16)
        memory.check_memory(more, print)
    plain = largest()
    assert "does not fit" in memory.lines(plain)[-1]
    with pytest.raises(ConfigError, match="weights alone exceed.*INT4"):
        memory.check_memory(plain, print)
