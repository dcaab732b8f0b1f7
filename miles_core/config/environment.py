"""Environment variables that processes need before they start; what the user has set stays as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping

from miles_core.config.tables import RunConfig


def environment(config: RunConfig, *, gpus: bool, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a trainer's rank, which may compute on a GPU, gets beside `env`, which it inherits and which wins."""
    if not gpus:
        return {}
    perf, megatron = config.perf, config.surface("megatron")
    wanted = {}
    sizes = ("tensor_model_parallel_size", "context_parallel_size")
    if any((megatron.get(key) or 1) > 1 for key in sizes) or megatron.get("sequence_parallel"):
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron overlaps by the order in which kernels are queued
    needs = config.stated.get(f"weight_sync:{perf.weight_sync}")
    if "nccl" in (needs or ()) or perf.weight_sync is not None and needs is None and not perf.colocate:  # who knows
        wanted["NCCL_CUMEM_ENABLE"] = "0"  # SGLang sets it for its side; a group needs the same on both
    if megatron.get("fp8_recipe") == "blockwise":
        wanted["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"  # Hopper's kernels take no other scales
    if megatron.get("deterministic_mode"):
        wanted |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {name: value for name, value in wanted.items() if name not in env}


KINDS = ("NCCL_", "TORCH_NCCL_", "NVTE_", "GLOO_", "PYTORCH_", "OMP_", "CUBLAS", "CUDA_DEVICE_MAX_CONNECTIONS",
         "CUDA_LAUNCH_BLOCKING")
"""Names, or how they begin, of variables that change how ranks compute or talk."""


def relevant(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of these kinds, sorted: what a rank elsewhere gets too, and what the record holds."""
    return {name: env[name] for name in sorted(env) if name.startswith(KINDS)}
