"""What vLLM's servers cannot do exactly, and is refused: by the plan for a run, by the engine for a request.

vLLM returns the log-prob of a drawn token in one of two ways, for all requests of a server: of the logits as they are,
or of the distribution that it drew from. Miles wants the temperature-scaled one before anything is cut off, which is
the first at temperature 1, and the second where nothing is cut off.
"""

from __future__ import annotations

from miles_core.build import sampling
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, EngineError
from miles_core.stages.rollout import Request, SamplingParams, check_request
from miles_vllm.plugin import VllmOptions

OWN = ("model", "host", "port", "dtype", "seed", "tensor-parallel-size", "logprobs-mode", "max-model-len",
       "worker-extension-cls", "enable-scale-out", "load-format", "served-model-name", "api-key")
"""Flags of a server that Miles sets, or whose values it relies on."""
CUTS = ("temperature", "top_p", "top_k", "min_new_tokens")


def logprobs_mode(config: RunConfig) -> str:
    """How the servers of a run state log-probs: by the temperature that it trains at."""
    return "raw_logprobs" if config.rollout.rollout_temperature in (0, 1) else "processed_logprobs"


def inexact(params: SamplingParams, mode: str) -> str | None:
    """What makes the log-probs of a request others than those that Miles asks for; None where they are right."""
    if mode == "raw_logprobs":
        return None if params.temperature in (0, 1) else f"temperature {params.temperature:g}"
    if params.min_new_tokens:
        return f"min_new_tokens {params.min_new_tokens}"
    if params.temperature and params.top_p < 1:
        return f"top_p {params.top_p:g}"
    return f"top_k {params.top_k}" if params.temperature and params.top_k > 0 else None


def check_servers(config: RunConfig, options: VllmOptions) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a run that these servers would sample inexactly, or whose memory they would not give back.
    """
    if config.rollout.engine != "vllm" or config.debug.debug_train_only:
        return config
    for word in options.args:
        flag = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if flag in OWN:
            raise ConfigError("Miles sets this argument of vLLM itself", got=word, who=who(config, "vllm.args"),
                              fix="leave it out", code="vllm-argument-owned")
    if config.perf.colocate:
        raise ConfigError("the engine vllm does not give its memory back", code="vllm-with-colocate",
                          who=who(config, "perf.colocate", "rollout.engine"),
                          fix="give the engines GPUs of their own, or use --engine sglang")
    sampled = {"rollout": sampling(config)} | {str(dataset["name"]): sampling(config, dataset)
                                               for dataset in config.eval.every if config.eval.eval_interval}
    for name, params in sampled.items():
        if (what := inexact(params, logprobs_mode(config))) is not None:
            table = "rollout.rollout" if name == "rollout" else "eval.eval"
            raise ConfigError("vLLM's log-probs are exact where all temperatures are 1, or where nothing is cut off",
                              got=f"{what} of {name}", code="vllm-log-probs-inexact",
                              who=who(config, *(f"{table}_{key}" for key in CUTS)),
                              fix="sample at temperature 1, or leave top_p, top_k and min_new_tokens out of rollout "
                                  "and evaluation; --engine sglang cuts exactly by top_p and top_k at any temperature")
    return config


def check(request: Request, mode: str, vocabulary: int) -> None:
    """
    Raises:
        EngineError: a request that these servers cannot answer, or not exactly.
    """
    name = f"request {request.id}"
    check_request(request, vocabulary, experts=False, engine="the engine vllm")
    for what, needed in (("adapters", request.adapter), ("images", request.images)):
        if needed:
            raise EngineError(f"{name} needs {what}, which the engine vllm does not have", got=what,
                              fix="use --engine sglang", code="vllm-feature-missing")
    if (inexactly := inexact(request.sampling, mode)) is not None:
        raise EngineError(f"{name} would get log-probs of another distribution", code="vllm-request-inexact",
                          got=f"{inexactly}, from a server with --logprobs-mode {mode}",
                          fix="sample at temperature 1, or cut nothing off")
