"""How a server of an engine is started: the words of its command and what is added to its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from miles_core.config.hardware import engine_dtype
from miles_core.config.load import quantised
from miles_core.config.tables import RunConfig
from miles_core.types import NodeSlot
from miles_sglang.forwarded import words
from miles_sglang.plugin import sglang_options

LOADER = "miles_weights.load"
"""The function, of a file that runs inside the server, that loads what a weight sync sends, and verifies it."""
SERVED = Path(__file__).with_name("server_extension")
ON_POLICY, ROUTES = SERVED / "on_policy", SERVED / "routes"
"""Each holds a plugin that a server finds where it is on its path."""


def command(config: RunConfig, seat: NodeSlot, port: int, meeting: str | None) -> list[str]:
    """The words that start one node's share of an engine; what the run sets wins over what Miles would.

    Args:
        port: where the node listens; requests go to that of node 0.
        meeting: HOST:PORT where the nodes of an engine find each other; None for one node.
    """
    start = sglang_options(config).server_command or [sys.executable, "-m", "sglang.launch_server"]
    fields = {**_placed(config, seat, port, meeting), **_usual(config), **config.surface("server")}
    return [*start, *words("server", fields)]


def environment(config: RunConfig, seat: NodeSlot) -> dict[str, str]:
    """What a server's environment has beyond that of the process which starts it."""
    exact = config.algorithm.true_on_policy_mode
    routes = ROUTES if config.surface("server").get("enable_return_routed_experts") else None
    folders = [SERVED, ON_POLICY if exact else None, routes, os.environ.get("PYTHONPATH")]
    variables = {
        # Without it a weight group between trainer and server fails with "invalid argument"; SGLang sets the same.
        "NCCL_CUMEM_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, folders))),
    }
    if exact:
        variables["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"  # see the plugin's `sample`
    if seat.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, seat.gpus))
    if config.perf.colocate:
        # The trainer's ranks need not hold the same amount on every GPU while servers start.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    if "context_length" in config.surface("server"):
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return variables


def tensor_parallel(config: RunConfig) -> int:
    """GPUs that share each layer of an engine."""
    return config.perf.rollout_num_gpus_per_engine // int(config.surface("server").get("pp_size", 1))


def _placed(config: RunConfig, seat: NodeSlot, port: int, meeting: str | None) -> dict[str, object]:
    """Fields that belong to one server."""
    fields: dict[str, object] = {
        "model_path": config.checkpoint.hf_checkpoint, "host": seat.host, "port": port,
        "tp_size": tensor_parallel(config), "random_seed": config.rollout.rollout_seed + seat.engine,
    }
    if seat.nodes > 1:
        fields |= {"nnodes": seat.nodes, "node_rank": seat.node, "dist_init_addr": meeting}
    return fields


def _usual(config: RunConfig) -> dict[str, object]:
    """Fields that every server of the run has, unless the run says otherwise.

    trust_remote_code is not among them: a checkpoint's own code runs only where the run asks for it.
    """
    fields: dict[str, object] = {"dtype": engine_dtype(config), "skip_server_warmup": True, "enable_metrics": True}
    if not config.debug.debug_rollout_only:  # else the weights on disk are those to serve
        fields |= {"custom_weight_loader": [LOADER], "load_format": "dummy"}
    if method := quantised(config):
        # Beside weights and scales an engine of such has numbers that it derives when it loads and that are never sent.
        fields["load_format"] = "auto"
    if config.perf.colocate and config.perf.offload_rollout:
        fields["enable_memory_saver"] = True
        if method:
            fields["enable_weights_cpu_backup"] = True  # released weights come back empty, these numbers among them
    if config.perf.colocate and not {"cuda_graph_config", "disable_cuda_graph"} & set(config.surface("server")):
        fields["cuda_graph_backend_prefill"] = "disabled"  # its capture needs memory that the trainer has
    if config.algorithm.fp32_lm_head:
        fields["enable_fp32_lm_head"] = True
    if "speculative_algorithm" in config.surface("server"):
        fields["enable_draft_weights_cpu_backup"] = True  # released weights come back empty, and no sync brings a draft
        algorithm = str(config.surface("server")["speculative_algorithm"])
        if fields.get("load_format") == "dummy" and algorithm.upper() != "NGRAM":
            fields["speculative_draft_load_format"] = "auto"  # else a draft would be as random as the servers start
    return fields
