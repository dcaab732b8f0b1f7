"""Generators and rollout functions of Miles's own, for functions that call them or name them by path."""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_compat.loading import load_function
from miles_compat.requests import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    create_tool_call_parser,
    engine_url,
    execute_tool_calls,
    update_sample_from_response,
    update_sample_with_tool_responses,
)
from miles_compat.rollout_types import GenerateFnInput, GenerateFnOutput, GenerateState
from miles_compat.sample import Sample
from miles_compat.session import post


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """One answer by one request; a sample that was called back goes on."""
    state = GenerateState(args)
    asked = compute_prompt_ids_from_sample(state, sample)
    ids, params = list(sample.tokens) if sample.response else asked, dict(sampling_params)
    if sample.response:
        params["max_new_tokens"] -= len(ids) - len(asked)
    payload, status = compute_request_payload(args, ids, params)
    if payload is None:
        sample.status, sample.tokens = status, ids
        return sample
    await update_sample_from_response(args, sample, payload, await post(engine_url(args), payload))
    return sample


async def single_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """The same in Miles's newer form."""
    return GenerateFnOutput(await generate(input.args, input.sample, input.sampling_params))


async def multi_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """A conversation with tools: --generate-tool-specs-path and --generate-execute-tool-function-path."""
    args, state, sample = input.args, input.state, input.sample
    specs = load_function(args.generate_tool_specs_path)
    execute = load_function(args.generate_execute_tool_function_path)
    parser = create_tool_call_parser(specs, args.generate_tool_call_parser)
    sample.tokens = compute_prompt_ids_from_sample(state, sample, tools=specs)
    for _ in range(args.generate_max_turns):
        payload, status = compute_request_payload(args, sample.tokens, input.sampling_params)
        if payload is None:
            sample.status = status
            break
        output = await post(engine_url(args), payload)
        await update_sample_from_response(args, sample, payload, output, update_loss_mask=True)
        if output["meta_info"]["finish_reason"]["type"] != "stop":
            break
        _, calls = parser.parse_non_stream(output["text"])
        if not calls:
            break
        update_sample_with_tool_responses(sample, await execute_tool_calls(calls, execute), state.tokenizer)
    return GenerateFnOutput(sample)


async def generate_with_random_osl(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """An answer of 32 to 64 Ki tokens, whatever the model says: a benchmark."""
    params = {**sampling_params, "ignore_eos": True, "max_new_tokens": random.randrange(2**15, 2**16)}
    return await generate(args, sample, params)


def load_generate_function(path: str | None) -> Callable[..., Any] | None:
    """What a path names, to be called with a GenerateFnInput whatever its form."""
    function = load_function(path)
    return None if function is None else _of_input(function)


def _of_input(function: Callable[..., Any]) -> Callable[[GenerateFnInput], Any]:
    async def called(input: GenerateFnInput) -> GenerateFnOutput:
        made: Any = function() if inspect.isclass(function) else function
        names = [*inspect.signature(made).parameters]
        if len(names) < 3 or names[0] == "input":
            answer = await made(input)
        else:
            more = {"evaluation": input.evaluation} if "evaluation" in names else {}
            answer = await made(input.args, input.sample, input.sampling_params, **more)
        return answer if hasattr(answer, "samples") else GenerateFnOutput(answer)
    return called


async def generate_and_rm(state: Any, sample: Any, sampling_params: Mapping[str, Any],
                          evaluation: bool = False) -> Any:
    """An answer and its reward; what has both stays. `state` is a GenerateState, or args."""
    from miles_compat.scorers import async_rm, batched_async_rm

    state = state if hasattr(state, "args") else GenerateState(state)
    args = state.args
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    function = load_generate_function(sample.generate_function_path or args.custom_generate_function_path)
    given = GenerateFnInput(state, sample, copy.deepcopy(dict(sampling_params)), evaluation)
    found = (await (function or single_turn)(given)).samples
    if args.group_rm:
        return found
    if isinstance(found, list):
        unscored = [one for one in found if one.reward is None]
        if not any(one.status == Sample.Status.ABORTED for one in found):
            await batched_async_rm(args, unscored, inplace_set_reward_field=True)
    elif found.reward is None and found.status != Sample.Status.ABORTED:
        found.reward = await async_rm(args, found)
    return found


async def generate_and_rm_group(state: Any, group: Sequence[Any], sampling_params: Mapping[str, Any],
                                evaluation: bool = False, sample_done_callback: Any = None) -> list[Any]:
    """All answers to one prompt, side by side."""
    from miles_compat.scorers import batched_async_rm

    args = getattr(state, "args", state)
    tasks = [asyncio.ensure_future(generate_and_rm(state, sample, sampling_params, evaluation)) for sample in group]
    for task in tasks if sample_done_callback is not None else ():
        task.add_done_callback(lambda _: sample_done_callback())
    try:
        found = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()  # the others, when one failed
    if args.group_rm:
        await batched_async_rm(args, found, inplace_set_reward_field=True)
    return found
