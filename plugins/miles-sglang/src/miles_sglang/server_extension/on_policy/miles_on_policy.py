"""A plugin of SGLang's under --true-on-policy-mode: log-probs have the bits of one forward pass over whole sequences.

SGLang's deterministic mode computes a token alike whatever else is in its batch, and with transformers' own module it
computes what a trainer of that module does. Three things are left: decoding attends by another kernel than prefill, the
tables of a rope go through a product in TF32, and log-probs are the logarithm of a softmax. A norm is one kernel here,
as in the trainer, in place of eight.

SGLang finds the entry point in the folder beside this file, which is on a server's PYTHONPATH in this mode alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

EVERY = 2**30
"""A prefix longer than any sequence: its keys are seen by all rows."""
ROWS, WARPS = 16, 1
"""Of a block that decodes; prefill's has more rows, which would be empty. Two warps would add some in another order."""


def register() -> None:
    """SGLang calls it in each of its processes, before a model is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
    HookRegistry.register(f"{backend}.forward_decode", forward_decode, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sample, HookType.AROUND)
    HookRegistry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", invariant, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_native", norm, HookType.AROUND)


def forward_decode(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                   save_kv_cache: bool = True, **_: Any) -> torch.Tensor:
    """Attention of one new token a sequence by the kernel of prefill: [batch, heads D] -> [batch, heads D].

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
    return attend(q, pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id), metadata.kv_indptr,
                  metadata.kv_indices, layer.scaling, backend.page_size).flatten(1)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor,
           scale: float, page_size: int = 1) -> torch.Tensor:
    """The last row of each sequence. The heads that share keys are rows of one block, as a block has many.

    Args:
        q: [batch, heads, D] of the last tokens.
        keys, values: [cache, heads for keys, D], of which `places` from `offsets[i]` on are sequence i's.

    Returns:
        [batch, heads, D].
    """
    from sglang.kernels.ops.attention import extend_attention

    batch, heads, shared = len(q), q.shape[1], keys.shape[-2]
    group = heads // shared
    rows = q.unflatten(1, (shared, group)).transpose(1, 2).reshape(batch * group, shared, -1)
    out = rows.new_empty(*rows.shape[:2], values.shape[-1])
    starts = torch.arange(0, batch * group + 1, group, dtype=torch.int32, device=q.device)
    before = torch.full((batch,), EVERY, dtype=torch.int32, device=q.device)
    sizes = extend_attention._get_block_sizes_for_extend_attention
    extend_attention._get_block_sizes_for_extend_attention = lambda *heads: _narrow(sizes(*heads))
    try:  # causal, though nothing is hidden: another kernel would be another order of operations
        extend_attention.extend_attention_fwd_unified(
            rows, out, keys, values, 1.0, 1.0, starts, offsets, places, before, group, is_causal=True, sm_scale=scale,
            page_size=page_size)
    finally:
        extend_attention._get_block_sizes_for_extend_attention = sizes
    return out.unflatten(0, (batch, group)).transpose(1, 2).reshape(batch, heads, -1)


def _narrow(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """(BLOCK_DMODEL, BLOCK_DPE, BLOCK_DV, BLOCK_M, BLOCK_N, num_warps) of a block for few rows."""
    model, positional, value, _rows, columns, _warps = sizes
    return model, positional, value, ROWS, columns, WARPS


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
