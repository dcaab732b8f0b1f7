"""What follows from how SGLang's servers are to run: the fields of ServerArgs, the context, the router."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_preflight.checkpoint_files import other_tokens, read

from miles_core.config.load import config_json, who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, HookError, UnknownKeyError
from miles_sglang import surface
from miles_sglang.forwarded import surface_of
from miles_sglang.hardware import engines
from miles_sglang.plugin import sglang_options

if TYPE_CHECKING:
    from miles_core.plugins.bind import Hooks

Note = Callable[[str], None]
EXACT: dict[str, object] = {"model_impl": "transformers", "attention_backend": "triton",
                            "enable_deterministic_inference": True}
"""What servers run with under --true-on-policy-mode."""


def serving(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with context, dtype and router decided.

    Raises:
        ConfigError: fields of ServerArgs that contradict each other or the run.
    """
    if "server_args" not in config.understood:
        origins = [str(origin) for key, origin in config.origin.items() if key.partition(".")[0] in (
            "sglang", "server", "router") and origin.kind != "plugin"]
        if origins and not config.debug.debug_train_only:
            note(f"the engine is {config.rollout.engine or 'local'}: what is for SGLang is not used "
                 f"({', '.join(dict.fromkeys(origins))})")
        return config
    if sglang_options(config).rollout_external and config.surface("server"):
        note("the servers run already: what would start them is not used "
             f"({who(config, *(f'server.{name}' for name in config.surface('server')))})")
    for table in ("server", "router"):
        if config.surface(table) and not surface_of(table).installed:
            note(f"[sglang] {table}: checked against {surface_of(table)}")
    for step in (_parallel, _dtype, _deterministic, _on_policy, _context, _speculative, _tokenizer, _router):
        config = step(config, note)
    return config


def _parallel(config: RunConfig, note: Note) -> RunConfig:
    server, each = config.surface("server"), config.perf.rollout_num_gpus_per_engine
    size = "perf.rollout_num_gpus_per_engine"
    stages = server.get("pp_size", 1)
    if each % stages:
        raise ConfigError(f"an engine's {each} GPUs do not divide by its pipeline of {stages}",
                          code="pipeline-gpus-not-divisible", who=who(config, size, "server.pp_size"),
                          fix="a multiple of --sglang-pp-size")
    if server.get("tp_size", each // stages) != each // stages:
        raise ConfigError(f"the tensor-parallel size is an engine's {each} GPUs / pipeline size {stages}",
                          got=server["tp_size"], who=who(config, "server.tp_size", size),
                          fix=f"leave --sglang-tp-size out, or write --rollout-num-gpus-per-engine "
                          f"{server['tp_size'] * stages}", code="tensor-parallel-size-wrong")
    if server.get("dp_size", 1) > 1 and not server.get("enable_dp_attention"):
        raise ConfigError("copies of a server are engines here; dp_size is for data-parallel attention",
                          got=server["dp_size"], code="dp-size-without-attention", who=who(config, "server.dp_size"),
                          fix="add --sglang-enable-dp-attention, or raise --rollout-num-gpus")
    tensor = each // stages
    for names in (("dp_size", "attn_cp_size"), ("moe_dp_size", "ep_size")):
        product = math.prod(server.get(name) or 1 for name in names)
        if product < 1 or tensor % product:
            keys = [f"server.{name}" for name in names if name in server]
            raise ConfigError(f"{' x '.join(name for name in names if name in server)} does not divide an engine's "
                              f"{tensor} tensor-parallel ranks",
                              code="parallel-sizes-not-divisible", got=product, who=who(config, *keys, size),
                              fix="make it a divisor of --rollout-num-gpus-per-engine")
    if server.get("moe_dense_tp_size") not in (None, 1, tensor):
        raise ConfigError("dense layers are on one GPU each, or cut over all of an engine's", code="dense-layers-size",
                          got=server["moe_dense_tp_size"], who=who(config, "server.moe_dense_tp_size", size),
                          fix="--sglang-moe-dense-tp-size 1, or leave it out")
    return config


def _dtype(config: RunConfig, note: Note) -> RunConfig:
    dtype, own = config.surface("server").get("dtype"), config.rollout.engine_dtype
    if dtype is None or own == dtype:
        return config
    if own is not None:
        raise ConfigError("the engine's dtype is set twice", code="engine-dtype-twice", got=f"{own} and {dtype}",
                          who=who(config, "rollout.engine_dtype", "server.dtype"), fix="drop one")
    if dtype not in ("float32", "bfloat16"):
        return config
    return with_values(config, str(config.origin["server.dtype"]), rollout__engine_dtype=dtype)


def _deterministic(config: RunConfig, note: Note) -> RunConfig:
    """--deterministic-mode is of the whole run: answers then do not depend on what else a server computes."""
    server, field = config.surface("server"), "enable_deterministic_inference"
    if not config.surface("megatron").get("deterministic_mode") or field in server:
        return config
    note(f"deterministic_mode: servers run with {field} ({who(config, 'megatron.deterministic_mode')})")
    return config.with_surface("server", **{field: True})


def _on_policy(config: RunConfig, note: Note) -> RunConfig:
    """--true-on-policy-mode: servers run transformers' module, as the trainer does, by the same kernels."""
    server = config.surface("server")
    if not config.algorithm.true_on_policy_mode:
        return config
    wanted = EXACT | {"speculative_algorithm": None, "kv_cache_dtype": "auto", "enable_fp32_lm_head": False}
    if others := [name for name, value in wanted.items() if server.get(name, value) != value]:
        raise ConfigError("true_on_policy_mode sets what its servers compute by", code="server-not-on-policy",
                          got=", ".join(f"{name} = {server[name]}" for name in others), fix="leave it out",
                          who=who(config, *(f"server.{name}" for name in others)))
    note(f"true_on_policy_mode: servers run with {', '.join(f'{name} {value}' for name, value in EXACT.items())}")
    return config.with_surface("server", **EXACT)


def _context(config: RunConfig, note: Note) -> RunConfig:
    """--sglang-context-length overrides what the model was made for, and bounds prompt and answer together."""
    most, own = config.surface("server").get("context_length"), config.rollout.rollout_max_context_len
    if most is None:
        return config
    if own is not None and own > most:
        raise ConfigError("rollout_max_context_len is beyond the servers' context length", got=f"{own} > {most}",
                          who=who(config, "rollout.rollout_max_context_len", "server.context_length"),
                          fix=f"at most {most}", code="context-above-servers")
    made = (config_json(config)[1] or {}).get("max_position_embeddings")
    if isinstance(made, int) and most > made:
        note(f"the context of {most} tokens is longer than the {made} that config.json says: beyond them the model was "
             "not trained, unless its rope is scaled")
    if own is None:
        note(f"prompt and response are at most {most} tokens together ({config.origin['server.context_length']})")
    return with_values(config, str(config.origin["server.context_length"]),
                       rollout__rollout_max_context_len=own or most)


def _speculative(config: RunConfig, note: Note) -> RunConfig:
    keys = [f"server.{name}" for name, value in config.surface("server").items()
            if name.startswith("speculative_") and value is not None]
    if keys and config.surface("server").get("speculative_algorithm") is None:
        raise ConfigError("nothing is decoded speculatively without an algorithm", code="speculation-without-algorithm",
                          who=who(config, *keys), fix="add --sglang-speculative-algorithm, for instance EAGLE")
    draft = config.surface("server").get("speculative_draft_model_path")
    if draft and draft.startswith((".", "/", "~")) and not Path(draft).expanduser().exists():
        raise ConfigError("there is no such draft model", code="draft-model-missing", got=draft,
                          who=who(config, "server.speculative_draft_model_path"), fix="name a Hugging Face folder")
    for name, fix in (("speculative_draft_model_path", "name a draft with the policy's tokenizer"),
                      ("tokenizer_path", "leave --sglang-tokenizer-path out: it is --hf-checkpoint's")):
        path = config.surface("server").get(name)
        if path and (other := other_tokens(Path(str(config.checkpoint.hf_checkpoint)), Path(path))):
            whose = "the draft's" if name.startswith("spec") else "the servers'"
            raise ConfigError(f"{whose} tokens are not the policy's", got=other, who=who(config, f"server.{name}"),
                              fix=fix, code="draft-vocabulary-differs")
    made = "max_position_embeddings"
    its = read(Path(draft, "config.json")).get(made) if draft else None
    most = its and (config.surface("server").get("context_length") or (config_json(config)[1] or {}).get(made))
    if isinstance(its, int) and isinstance(most, int) and its < most and (
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in os.environ):
        raise ConfigError("the draft was made for a shorter context than the servers have",
                          got=f"{its} < {most}", who=who(config, "server.speculative_draft_model_path"),
                          fix=f"--sglang-context-length {its}, or another draft", code="draft-context-shorter")
    return config


def _tokenizer(config: RunConfig, note: Note) -> RunConfig:
    rollout = config.rollout
    needs = {"rollout.rollout_stop": rollout.rollout_stop,
             "rollout.rollout_min_new_tokens": rollout.rollout_min_new_tokens,
             "eval.eval_min_new_tokens": config.eval.eval_min_new_tokens}
    keys = [key for key, value in needs.items() if value]
    if config.surface("server").get("skip_tokenizer_init") and keys:
        raise ConfigError("servers without a tokenizer know no stop strings and no least number of tokens",
                          who=who(config, "server.skip_tokenizer_init", *keys), code="stop-without-tokenizer",
                          fix="drop --sglang-skip-tokenizer-init")
    if (least := rollout.rollout_min_new_tokens) and config.trains:
        note(f"SGLang takes ends out of the distribution of the first {least} tokens: their log-probs are not the "
             f"trainer's ({who(config, 'rollout.rollout_min_new_tokens')})")
    return config


def _router(config: RunConfig, note: Note) -> RunConfig:
    options = sglang_options(config)
    router = options.router
    if router is None:
        several, running = engines(config) > 1, options.router_ip is not None
        reason = "a router runs already" if running else "several engines" if several else "one engine"
        router = "smg" if several or running else "none"
        config = with_values(config, reason, sglang__router=router)
    if router == "none":
        if config.surface("router"):
            note("no router is in front of the engine: what is for one is not used "
                 f"({who(config, *(f'router.{name}' for name in config.surface('router')))})")
        return config
    if router == "sglang-router":
        _older_router(config)
    return config


def _older_router(config: RunConfig) -> None:
    """What sglang-router cannot do and smg can."""
    if config.surface("server").get("enable_return_routed_experts"):
        raise ConfigError("sglang-router drops routed experts from answers", code="router-drops-routed-experts",
                          who=who(config, "sglang.router", "server.enable_return_routed_experts"),
                          fix="leave --router out: smg hands them on")
    known = surface.router("sglang_router")
    for name in config.surface("router"):
        if known.package == "sglang_router" and name not in known.fields:
            raise UnknownKeyError(f"{known} has no argument {name}", who=who(config, f"router.{name}"),
                                  fix="leave it out, or --router out: smg has it", code="router-argument-unknown")


def with_engine_args(config: RunConfig, hooks: Hooks) -> RunConfig:
    """What plugins set of the servers' fields (hook `engine_args`).

    Raises:
        HookError: a field that no flag of the server has.
    """
    if hooks.engine_args is None:
        return config
    fields = hooks.engine_args(dict(config.surface("server")))
    if unknown := sorted(fields.keys() - surface_of("server").fields.keys()):
        raise HookError("engine_args sets a field that the server does not have", code="engine-args-field-unknown",
                        got=", ".join(unknown), who=str(surface_of("server")),
                        fix="see the fields of SGLang's ServerArgs")
    return replace(config, surfaces={**config.surfaces, "server": fields})
