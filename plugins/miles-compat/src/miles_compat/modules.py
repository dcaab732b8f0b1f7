"""Modules that functions of Miles and slime import, where neither is installed: the names that make sense here.

`from miles.utils.types import Sample` stands at the head of nearly every such file. These modules exist in a process in
which a function is named by path, under `miles` and under `slime`; a package of that name that is installed wins. What
stands behind a name is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import Any

_CONTEXT = "context_parallel: all_gather_with_cp slice_log_prob_with_cp get_sum_of_sample_mean"
_STATE = "rollout_types: GenerateState compute_sampling_params"
_TOGETHER = "generators: generate_and_rm generate_and_rm_group"

NAMES = MappingProxyType({
    "utils.types": ("sample: Sample",),
    "utils.http_utils": ("session: post get wait_http_ok",),
    "utils.async_utils": ("loading: run eager_create_task",),
    "utils.misc": ("loading: load_function SingletonMeta get_free_port as_completed_async",),
    "utils.processing_utils": ("loading: load_tokenizer load_processor",),
    "utils.mask_utils": ("masks: MultiTurnLossMaskGenerator get_response_lengths",),
    "utils.lora": ("loading: LORA_ADAPTER_NAME is_lora_enabled lora_rollout_enabled",),
    "backends.training_utils.cp_utils": (_CONTEXT,),
    "backends.megatron_utils.cp_utils": (_CONTEXT,),
    "backends.megatron_utils.model_provider": ("model: get_model_provider_func",),
    "rollout.base_types": ("rollout_types: GenerateFnInput GenerateFnOutput RolloutFnConstructorInput RolloutFnInput "
                           "RolloutFnTrainInput RolloutFnEvalInput RolloutFnTrainOutput RolloutFnEvalOutput",),
    "rollout.data_source": ("data_sources: DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first",),
    "rollout.sglang_rollout": (_STATE, _TOGETHER, "generators: generate", "requests: get_model_url",
                               "own_rollout: generate_rollout generate_rollout_async eval_rollout"),
    "rollout.sft_rollout": ("own_rollout: generate_rollout=sft_rollout",),
    "rollout.fully_async_rollout": ("own_rollout: generate_rollout_fully_async=generate_rollout "
                                    "FullyAsyncRolloutFn=InferenceRolloutFn",),
    "rollout.inference_rollout.inference_rollout_common": (
        _STATE, _TOGETHER, "own_rollout: InferenceRolloutFn", "requests: policy_uses_routing_key"),
    "rollout.inference_rollout.inference_rollout_train": ("own_rollout: generate_rollout_async",),
    "rollout.inference_rollout.inference_rollout_eval": ("own_rollout: run_eval_datasets",),
    "rollout.inference_rollout.compatibility": ("generators: load_generate_function",),
    "rollout.generate_hub.single_turn": ("generators: generate=single_turn",),
    "rollout.generate_hub.multi_turn": ("generators: generate=multi_turn",),
    "rollout.generate_hub.agentic_tool_call": ("agents: generate build_chat_request_kwargs",),
    "rollout.generate_hub.benchmarkers": ("generators: generate_with_random_osl",),
    "rollout.generate_utils.generate_endpoint_utils": (
        "requests: compute_prompt_ids_from_sample compute_request_payload compute_routing_headers "
        "policy_uses_routing_key update_sample_from_response",),
    "rollout.generate_utils.tool_call_utils": (
        "requests: create_tool_call_parser execute_tool_calls update_sample_with_tool_responses "
        "tokenize_tool_responses",),
    "rollout.filter_hub.base_types": ("filters: DynamicFilterOutput MetricGatherer call_dynamic_filter",),
    "rollout.filter_hub.dynamic_sampling_filters": (
        "filters: check_reward_nonzero_std check_no_aborted DynamicFilterOutput",),
    "rollout.rm_hub": ("scorers: async_rm batched_async_rm grade_answer_verl compute_score_dapo=compute_score "
                       "extract_boxed_answer=extract_answer f1_score compute_gpqa_reward "
                       "get_deepscaler_rule_based_reward",),
    "rollout.rm_hub.math_utils": ("scorers: extract_answer grade_answer_verl extract_boxed_answer=extract_answer",),
    "rollout.rm_hub.math_dapo_utils": ("scorers: compute_score",),
    "rollout.rm_hub.deepscaler": ("scorers: get_deepscaler_rule_based_reward",),
    "rollout.rm_hub.f1": ("scorers: f1_score",),
    "rollout.rm_hub.gpqa": ("scorers: compute_gpqa_reward",),
    "rollout.sample_hooks": ("own_rollout: apply_rollout_sample_hooks",),
})  # fmt: skip
"""Module below `miles` and `slime` -> what can be imported from it, as "module of this package: name name=ours"."""


def provide() -> None:
    """Have these modules for whatever is imported from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        packages = [name for name in ("miles", "slime") if name not in sys.modules and not _installed(name)]
        sys.meta_path.insert(0, _Finder(packages))


def members(name: str) -> dict[str, tuple[str, str]]:
    """Name in a module below `miles` -> (module of this package, name there)."""
    found: dict[str, tuple[str, str]] = {}
    for line in NAMES.get(name, ()):
        where, _, words = line.partition(": ")
        for word in words.split():
            theirs, _, ours = word.partition("=")
            found[theirs] = f"miles_compat.{where}", ours or theirs
    return found


def ours(path: str) -> bool:
    """Whether a path names a function of Miles's or slime's own that is here."""
    package, _, rest = path.replace(":", ".").partition(".")
    module, _, name = rest.rpartition(".")
    return package in ("miles", "slime") and name in members(module)


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name without __init__.py is no package


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]):
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        known = not rest or any(module == rest or module.startswith(f"{rest}.") for module in NAMES)
        if package not in self._packages or not known:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, "What plugin compat has of this module of Miles.")

    def exec_module(self, module: ModuleType) -> None:
        found = members(module.__name__.partition(".")[2])

        def attribute(name: str) -> Any:
            if name not in found:
                raise AttributeError(f"{module.__name__} has no {name!r} here")
            where, ours = found[name]
            return getattr(importlib.import_module(where), ours)

        vars(module).update(__getattr__=attribute, __all__=[*found])
