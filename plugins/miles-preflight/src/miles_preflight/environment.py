"""Environment variables by which a run would hang, be several runs, or not be what it says."""

from __future__ import annotations

import os
import re

from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError


def check_environment(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a variable by which the run would hang, be several runs, or not be what it says.
    """
    perf, env = config.perf, os.environ
    ray = perf.placement == "ray" and perf.ray_address is None
    broadcast = perf.weight_sync == "broadcast" and config.rollout.engine == "sglang"
    kernels = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    loose = config.surface("megatron").get("deterministic_mode") and env.get(kernels, "0") != "0"
    cards = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if env.get(name, "").strip(" =") == "lo"]
    problems = {
        "LOCAL_RANK": ("LOCAL_RANK" in env and env.get("WORLD_SIZE", "1") != "1",
                       "torchrun, accelerate or deepspeed has started this, and each of its processes would be a run "
                       "of its own", "start miles run by itself: --actor-num-nodes and --actor-num-gpus-per-node say "
                       "how many ranks it starts"),
        "RAY_ADDRESS": (ray and re.search(r"^https?:|:8265/?$", env.get("RAY_ADDRESS", "")),
                        "this is the address of Ray's dashboard, where jobs are handed in, and not that of the cluster",
                        "unset it, or write the head's --ray-address HOST:6379"),
        **dict.fromkeys(cards, (perf.actor_num_nodes > 1, "the interface lo ends at its own machine, and the run has "
                                "several", "name the interface between the machines, or unset it")),
        "NCCL_CUMEM_ENABLE": (broadcast and env.get("NCCL_CUMEM_ENABLE", "").strip() not in ("", "0"),
                              "SGLang sets it to 0, and a group of trainer and engines needs the same on both sides",
                              "unset it"),
        kernels: (loose, "attention may be nondeterministic, and --deterministic-mode asks for the opposite",
                  "unset it, or leave --deterministic-mode out"),
    }
    for name, (wrong, what, fix) in problems.items():
        if wrong:
            raise ConfigError(what, got=f"{name}={env[name]}", who="environment", fix=fix)
