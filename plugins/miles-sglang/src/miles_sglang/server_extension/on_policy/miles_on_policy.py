"""A plugin of SGLang's under --true-on-policy-mode: log-probs have the bits of one forward pass over whole sequences.

SGLang's deterministic mode computes a token alike whatever else is in its batch, and with transformers' own module
it computes what a trainer of that module does. Three things are left: decoding attends by another kernel than prefill
(here both are of miles_attention.py), the tables of a rope go through a product in TF32, and log-probs are the
logarithm of a softmax.

Some things take less time, in the trainer as here: a norm is one kernel in place of eight, a rope is one in place of
ten, an activation one in place of two, and products of few or many rows have other blocks.

SGLang finds the entry point in the folder beside this file, which is on a server's PYTHONPATH in this mode alone.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from miles_attention import decode, prefill
from miles_kernels import gated, product, rope, turn


def register() -> None:
    """SGLang calls it in each of its processes, before a model is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
    HookRegistry.register(f"{backend}.forward_decode", forward_decode, HookType.REPLACE)
    extend = "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd_unified"
    HookRegistry.register(extend, prefill, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sample, HookType.AROUND)
    HookRegistry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", invariant, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_native", norm, HookType.AROUND)
    products = "sglang.srt.batch_invariant_ops.batch_invariant_ops._matmul_persistent_triton"
    HookRegistry.register(products, product, HookType.AROUND)
    for kind in ("llama", "qwen2", "qwen3"):
        module = f"transformers.models.{kind}.modeling_{kind}"
        HookRegistry.register(f"{module}.apply_rotary_pos_emb", functools.partial(rope, turn),
                              HookType.AROUND)
        HookRegistry.register(f"{module}.{kind.title()}MLP.forward", feed_forward, HookType.AROUND)


def forward_decode(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                   save_kv_cache: bool = True, **_: Any) -> torch.Tensor:
    """Attention of one new token a sequence with the bits of prefill: [batch, heads D] -> [batch, heads D].

    Args:
        q: [batch, heads D]; k, v: of the heads for keys, which go into the cache first.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    metadata, pool = backend.forward_metadata, backend.token_to_kv_pool
    if save_kv_cache:
        place = KVWriteLoc(forward_batch.out_cache_loc, metadata.swa_out_cache_loc,
                           full_loc=metadata.out_cache_loc_full_physical)
        backend._set_kv_buffer(forward_batch, layer, place, k, v, layer.k_scale, layer.v_scale)
    q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    return decode(q, pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id), metadata.kv_indptr,
                  metadata.kv_indices, backend.max_context_len, layer.scaling).flatten(1)


def feed_forward(original: Any, module: Any, rows: torch.Tensor) -> torch.Tensor:
    """transformers' MLP: down(silu(gate) up)."""
    if module.config.hidden_act != "silu" or not rows.is_cuda:
        return original(module, rows)
    return module.down_proj(gated(module.gate_proj(rows), module.up_proj(rows)))


def norm(original: Any, module: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *rest: Any) -> Any:
    """torch's own kernel, a row at a time, in place of eight; the trainer has it as well."""
    if residual is not None or module.variance_size_override is not None or x.dtype != module.weight.dtype:
        return original(module, x, residual, *rest)
    return torch.ops.aten._fused_rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)[0]


def sample(original: Any, sampler: Any, logits_output: Any, sampling_info: Any, *rest: Any, **more: Any) -> Any:
    """Log-probs are log_softmax(logits / temperature), before anything is cut.

    SGLang states those of the logits as they come where SGLANG_RETURN_ORIGINAL_LOGPROB is set; so they come scaled.
    """
    if not sampling_info.is_all_greedy:
        logits_output.next_token_logits.div_(sampling_info.temperatures)
        sampling_info = copy.copy(sampling_info)
        sampling_info.temperatures = torch.ones_like(sampling_info.temperatures)
    return original(sampler, logits_output, sampling_info, *rest, **more)


def invariant(original: Any, *_: Any, **__: Any) -> None:
    """Without bmm, which a rope alone calls: each element is one product, exact in float32 and not in TF32."""
    original(enable_bmm=False)
