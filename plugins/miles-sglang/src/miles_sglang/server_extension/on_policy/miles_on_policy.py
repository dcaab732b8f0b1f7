"""A plugin of SGLang's under --true-on-policy-mode: log-probs have the bits of one forward pass over whole sequences.

SGLang's deterministic mode computes a token alike whatever else is in its batch, and with transformers' own module
it computes what a trainer of that module does. Three things are left: decoding attends by another kernel than prefill
(here both are of miles_attention.py), the tables of a rope go through a product in TF32, and log-probs are the
logarithm of a softmax.

Some things are the same bits in less time: a norm is one kernel, as in the trainer, in place of eight, a rope is one in
place of ten, and products of few rows are taken apart into more blocks.

SGLang finds the entry point in the folder beside this file, which is on a server's PYTHONPATH in this mode alone.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from miles_attention import decode, prefill

FEW = 64
"""Rows of a product up to which blocks have few columns."""
HEAD = 16384
"""Columns from which a product is one with a vocabulary."""


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
        HookRegistry.register(f"transformers.models.{kind}.modeling_{kind}.apply_rotary_pos_emb", rope, HookType.AROUND)


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


def product(original: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[m, k] @ [k, n] (+ [n]) by SGLang's kernel. Blocks only say which elements are computed where: each is added up
    over k in the same order. SGLang's blocks of 128 x 128 would leave most of a GPU idle with the rows of a decode."""
    processors = _processors(a.device) if a.dtype == torch.bfloat16 else 0
    sizes = blocks(len(a), b.shape[1]) if processors else None
    return original(a, b, bias) if sizes is None else multiply(a, b, bias, sizes, processors)


def blocks(rows: int, columns: int) -> tuple[int, int, int, int, int] | None:
    """(rows, columns, depth, warps, stages) of a block; None for SGLang's own."""
    if columns >= HEAD:
        return (64, 128, 64, 4, 4) if rows <= FEW else (128, 256, 64, 8, 3)
    return (64, 32, 128, 4, 4) if rows <= FEW else None


@functools.lru_cache
def _processors(device: torch.device) -> int:
    """Of a Hopper, on which the bits were compared; else 0."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == 9 else 0


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, int, int, int, int],
             processors: int) -> torch.Tensor:
    """SGLang's kernel with blocks of these sizes (see `blocks`), of which a GPU's processors take turns."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as ops

    (m, k), n, (rows, columns, depth, warps, stages) = a.shape, b.shape[1], sizes
    out, tiles = a.new_empty(m, n), triton.cdiv(m, rows) * triton.cdiv(n, columns)
    ops.matmul_kernel_persistent[(min(processors, tiles),)](
        a, b, out, bias, m, n, k, *a.stride(), *b.stride(), *out.stride(), BLOCK_SIZE_M=rows, BLOCK_SIZE_N=columns,
        BLOCK_SIZE_K=depth, GROUP_SIZE_M=8, NUM_SMS=processors, A_LARGE=a.numel() > 2**31, B_LARGE=b.numel() > 2**31,
        C_LARGE=out.numel() > 2**31, HAS_BIAS=bias is not None, num_stages=stages, num_warps=warps)
    return out


def rope(original: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
         *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' apply_rotary_pos_emb: q, k of [1, heads, T, D], cos, sin of [1, T, D]."""
    half = q.shape[-1] // 2
    alike = q.dtype == k.dtype == cos.dtype == sin.dtype == torch.bfloat16 and len(q) == 1 and q.is_cuda
    if rest or more or not alike or 2 * half != q.shape[-1] or half & (half - 1):
        return original(q, k, cos, sin, *rest, **more)
    return turn(q[0], cos[0], sin[0])[None], turn(k[0], cos[0], sin[0])[None]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + rotate_half(x) sin, each operation rounded: x of [heads, T, D], cos and sin of [T, D]."""
    heads, length, size = x.shape
    out = x.new_empty(length, heads, size).transpose(0, 1)
    _turn[(length, heads)](x, cos, sin, out, *x.stride(), *cos.stride(), *sin.stride(), *out.stride(),
                           HALF=size // 2, num_warps=1, enable_fp_fusion=False)  # a fused product would not be rounded
    return out


@triton.jit
def _turn(x, cos, sin, out, x_head, x_row, x_lane, cos_row, cos_lane, sin_row, sin_lane, out_head, out_row, out_lane,
          HALF: tl.constexpr):
    """One row of one head. What is a rounded number in transformers is one here: products, then their sum."""
    row, head, low = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    kind = out.dtype.element_ty
    high = low + HALF
    at, turned = x + head * x_head + row * x_row, out + head * out_head + row * out_row
    x_low, x_high = tl.load(at + low * x_lane).to(tl.float32), tl.load(at + high * x_lane).to(tl.float32)
    cos_low, cos_high = tl.load(cos + row * cos_row + low * cos_lane), tl.load(cos + row * cos_row + high * cos_lane)
    sin_low, sin_high = tl.load(sin + row * sin_row + low * sin_lane), tl.load(sin + row * sin_row + high * sin_lane)
    straight_low, straight_high = (x_low * cos_low).to(kind), (x_high * cos_high).to(kind)
    across_low, across_high = (-x_high * sin_low).to(kind), (x_low * sin_high).to(kind)
    tl.store(turned + low * out_lane, (straight_low.to(tl.float32) + across_low.to(tl.float32)).to(kind))
    tl.store(turned + high * out_lane, (straight_high.to(tl.float32) + across_high.to(tl.float32)).to(kind))


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
