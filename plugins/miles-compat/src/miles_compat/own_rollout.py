"""Miles's rollout functions, for functions of a user's own that call them for a part of their work."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from miles_compat.filters import call_dynamic_filter
from miles_compat.generators import generate_and_rm_group
from miles_compat.loading import load_function, run
from miles_compat.masks import MultiTurnLossMaskGenerator
from miles_compat.paths import noted
from miles_compat.rollout_types import GenerateState, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles_compat.sample import Sample
from miles_core.errors import HookError


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """A rollout as the run would sample it. Of an evaluation nothing: the run samples its datasets itself."""
    if evaluation:
        return RolloutFnEvalOutput({})
    return run(generate_rollout_async(args, rollout_id, data_buffer))[0]


async def generate_rollout_async(state: Any, rollout_id: int, source: Any) -> tuple[Any, list[Any]]:
    """(a rollout's groups, none that were left over). `state` may be args, and `source` its get_samples."""
    args, ask = getattr(state, "args", state), getattr(source, "get_samples", source)
    state = state if hasattr(state, "args") else GenerateState(args)
    keep = load_function(args.dynamic_sampling_filter_path)
    found: list[list[Any]] = []
    everything: list[list[Any]] = []
    while (missing := args.rollout_batch_size - len(found)) > 0:
        groups = ask(missing)
        sampled = await asyncio.gather(*(generate_and_rm_group(state, group, state.sampling_params)
                                         for group in groups))
        everything += sampled
        found += [group for group in sampled if call_dynamic_filter(keep, args, group).keep]
    if mark := load_function(args.rollout_sample_filter_path):
        mark(args, found)
    if process := load_function(args.rollout_all_samples_process_path):
        process(args, everything, source)
    return RolloutFnTrainOutput(found), []


async def eval_rollout(args: Any, rollout_id: int) -> tuple[Any, list[Any]]:
    """(nothing: the run samples its datasets itself, no group that was left over)."""
    return RolloutFnEvalOutput({}), []


async def run_eval_datasets(state: Any, cache: Any) -> dict[str, Any]:
    """Nothing: the run samples its datasets itself."""
    return {}


class InferenceRolloutFn:
    """The same as a class, which a user's own may build on."""

    def __init__(self, input: Any):
        self.data_source, self.state = input.data_source, GenerateState(input.args)

    async def __call__(self, input: Any) -> Any:
        return await (self._call_eval(input) if input.evaluation else self._call_train(input))

    async def _call_train(self, input: Any) -> Any:
        return (await generate_rollout_async(self.state, input.rollout_id, self.data_source))[0]

    async def _call_eval(self, input: Any) -> Any:
        return RolloutFnEvalOutput({})


def sft_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> list[list[Sample]]:
    """Demonstrations: a conversation's own answers, with a mask of what the assistant wrote."""
    masks = MultiTurnLossMaskGenerator(args.tokenizer, args.loss_mask_type)
    groups: list[list[Sample]] = data_buffer.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        messages: Any = sample.prompt
        sample.tokens, mask = masks.get_loss_mask(messages, sample.metadata.get("tools"))
        sample.response_length = masks.get_response_lengths([mask])[0]
        sample.loss_mask = mask[len(mask) - sample.response_length:]
        sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
    return groups


async def apply_rollout_sample_hooks(args: Any, value: Any, **named: object) -> Any:
    """A sample, or lists of samples, after the functions of --rollout-sample-hook-path."""
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, one, **named) for one in value]
    for path in args.rollout_sample_hook_path or ():
        value = await hooked(load_function(path), args, value, **named)
    return value


async def hooked(function: Callable[..., Any], args: Any, sample: Any, **named: object) -> Any:
    """What one of them makes of a sample; nothing leaves it as it is."""
    function = noted(function)
    known = inspect.signature(function).parameters
    every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    answer = function(args, sample, **{name: value for name, value in named.items() if every or name in known})
    answer = await answer if inspect.isawaitable(answer) else answer
    if answer is not None and not hasattr(answer, "response_length"):
        raise HookError("the function should return the sample, or nothing", code="sample-hook-return",
                        got=repr(answer)[:100], who="rollout_sample_hook_path", fix="return sample")
    return sample if answer is None else answer
