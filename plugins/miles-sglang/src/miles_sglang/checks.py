"""Settings that SGLang's servers would silently interpret differently from the run; what they reject is not checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from miles_core.config.load import quantised, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_sglang.plugin import sglang_options

ARCHITECTURE = re.compile(
    r'"(num_hidden_layers|hidden_size|(moe_)?intermediate_size|num_attention_heads|num_key_value_heads|head_dim|'
    r'vocab_size|num_experts|n_routed_experts|num_experts_per_tok|tie_word_embeddings|architectures|model_type|'
    r'rms_norm_eps|hidden_act|rope_theta|rope_scaling)"\s*:')
"""Keys of config.json that make another model."""
DETERMINISTIC = ("ascend", "fa3", "fa4", "flashinfer", "triton")
"""Attention backends whose results do not depend on the batch."""

Problem = tuple[str, str, str]
"""Field of ServerArgs, what it would do, the fix."""


def check_servers(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a field of ServerArgs by which servers would answer as another model than the one that is trained.
    """
    options, variable = sglang_options(config), os.environ.get("NCCL_CUMEM_ENABLE", "")
    if "server_args" in config.understood and not options.rollout_external:
        for name, what, fix in (*_answers(config), *_weights(config)):
            raise ConfigError(what, got=config.surface("server")[name], who=who(config, f"server.{name}"), fix=fix,
                              code="server-answers-as-other-model")
        if config.perf.weight_sync == "broadcast" and variable.strip() not in ("", "0"):
            raise ConfigError("the first weight sync would hang: SGLang sets this variable to 0, and the group of "
                              "trainer and engines needs the same on both sides", got=f"NCCL_CUMEM_ENABLE={variable}",
                              who="environment", fix="unset it", code="sglang-cumem-differs")
    return config


def _answers(config: RunConfig) -> Iterator[Problem]:
    server, leave = config.surface("server"), "leave it out"
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if server.get(name, 1) < 1:
            yield (name, "drafts below the policy's own probability would be accepted, and samples not be the policy's",
                   leave)
    if ARCHITECTURE.search(str(server.get("json_model_override_args") or "")):
        yield ("json_model_override_args", "the servers would run another model than the one that is trained",
               "change config.json of --hf-checkpoint, which both read")
    modes = ("enable_deterministic_inference", "rl_on_policy_target")
    wanted = next((name for name in modes if server.get(name)), None)
    if wanted and (server.get("attention_backend") or "fa3") not in DETERMINISTIC:
        yield "attention_backend", f"this attention backend is not deterministic, which {wanted} asks for", leave
    if wanted and server.get("sampling_backend") == "flashinfer":
        yield "sampling_backend", f"sampling by flashinfer is not deterministic, which {wanted} asks for", leave
    if server.get("load_format") == "dummy" and config.debug.debug_rollout_only:
        yield "load_format", "weights would be random, and no trainer sends others", leave
    if server.get("lora_paths") and "lora" not in config.options and config.rollout.generate == "single-turn":
        yield ("lora_paths", "servers would hold an adapter that no request names, and answers be the base's",
               "begin with it by --plugin lora --lora-adapter-path FOLDER, or merge it: miles convert merge-lora")


def _weights(config: RunConfig) -> Iterator[Problem]:
    server, draft = config.surface("server"), config.surface("server").get("speculative_draft_model_path")
    if draft not in (None, config.checkpoint.hf_checkpoint) and str(config.perf.weight_sync).startswith("disk"):
        yield ("speculative_draft_model_path", "SGLang loads a version's files into the draft as well, which is "
               "another model", "--weight-sync broadcast, or ipc with --colocate")
    if server.get("delete_ckpt_after_loading"):
        yield ("delete_ckpt_after_loading", "the first server that is up would delete the checkpoint, which other "
               "servers and the trainer read", "leave it out")
    if server.get("checkpoint_engine_wait_weights_before_ready"):
        yield ("checkpoint_engine_wait_weights_before_ready", "servers would wait for weights before they are ready, "
               "and the run sends weights to servers that are", "leave it out")
    own = ("modelopt_quant", "quantize_and_serve", *(() if quantised(config) else ("quantization",)))
    for name in own if not config.debug.debug_rollout_only else ():
        if server.get(name):
            yield (name, "the engine would quantise plain weights by itself, and cannot load new ones after that",
                   "serve a checkpoint that is quantised (`miles convert --help` lists what writes one) as "
                   "--hf-checkpoint with the plain one as --ref-load, or leave it out")
