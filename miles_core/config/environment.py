"""Environment variables that processes need before they start; what the user has set stays as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError


def environment(config: RunConfig, *, gpus: bool, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a trainer's rank gets beside what it inherits.

    Args:
        gpus: whether it computes on one.
        given: the environment that it inherits; what stands there wins.
    """
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
    return {name: value for name, value in wanted.items() if name not in given}


KINDS = ("NCCL_", "TORCH_NCCL_", "NVTE_", "GLOO_", "PYTORCH_", "OMP_", "CUDA_DEVICE_MAX_CONNECTIONS",
         "CUDA_LAUNCH_BLOCKING")
"""Names, or how they begin, of variables that change how ranks compute or talk."""


def relevant(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of these kinds, sorted: what a rank elsewhere gets too, and what the record holds."""
    return {name: given[name] for name in sorted(given) if name.startswith(KINDS)}


def check_environment(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a variable by which the run would hang, be several runs, or not be what it says.
    """
    perf, given = config.perf, os.environ
    ray = perf.placement == "ray" and perf.ray_address is None
    broadcast = perf.weight_sync == "broadcast" and config.rollout.engine == "sglang"
    kernels = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    loose = config.surface("megatron").get("deterministic_mode") and given.get(kernels, "0") != "0"
    cards = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if given.get(name, "").strip(" =") == "lo"]
    problems = {
        "LOCAL_RANK": ("LOCAL_RANK" in given and given.get("WORLD_SIZE", "1") != "1",
                       "torchrun, accelerate or deepspeed has started this, and each of its processes would be a run "
                       "of its own", "start miles run by itself: --actor-num-nodes and --actor-num-gpus-per-node say "
                       "how many ranks it starts"),
        "RAY_ADDRESS": (ray and re.search(r"^https?:|:8265/?$", given.get("RAY_ADDRESS", "")),
                        "this is the address of Ray's dashboard, where jobs are handed in, and not that of the cluster",
                        "unset it, or write the head's --ray-address HOST:6379"),
        **dict.fromkeys(cards, (perf.actor_num_nodes > 1, "the interface lo ends at its own machine, and the run has "
                                "several", "name the interface between the machines, or unset it")),
        "NCCL_CUMEM_ENABLE": (broadcast and given.get("NCCL_CUMEM_ENABLE", "").strip() not in ("", "0"),
                              "SGLang sets it to 0, and a group of trainer and engines needs the same on both sides",
                              "unset it"),
        kernels: (loose, "attention may be nondeterministic, and --deterministic-mode asks for the opposite",
                  "unset it, or leave --deterministic-mode out"),
    }
    for name, (wrong, what, fix) in problems.items():
        if wrong:
            raise ConfigError(what, got=f"{name}={given[name]}", who="environment", fix=fix)
    return config
