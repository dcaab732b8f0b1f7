"""From a path on the command line to a function that can be called as Miles calls it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from miles_core.errors import HookError
from miles_core.plugins.load import import_file


@dataclass(frozen=True, slots=True)
class Shape:
    """How a function is called.

    Args:
        text: its signature, for messages.
        positional: how many arguments it is given by position.
        keywords: names of those that it is given by name.
        or_else: another number of arguments by position that it may take.
        may_wait: it may be a coroutine function.
        must_wait: it has to be one.
        made: it is called once, to make an object, as a class is; other classes are made first and then called.
        class_of: a class that does it instead is made with so many arguments.
        note: what else to say to someone whose function does not fit.
    """

    text: str
    positional: int
    keywords: tuple[str, ...] = ()
    or_else: int | None = None
    may_wait: bool = False
    must_wait: bool = False
    made: bool = False
    class_of: int | None = None
    note: str = ""


TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
       "parallel_state", "max_seq_lens")

SHAPES = MappingProxyType({
    "custom_megatron_init_path": Shape("init(args)", 1),
    "custom_megatron_before_log_prob_hook_path": Shape("hook(args, model, store_prefix)", 3),
    "custom_megatron_before_train_step_hook_path": Shape(
        "hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)", 6),
    "data_source_path": Shape("Source(args), a class with get_samples(num_samples) -> list of groups", 1, made=True),
    "custom_generate_function_path": Shape(
        "async generate(args, sample, sampling_params) -> sample, or async generate(input) -> GenerateFnOutput", 3,
        or_else=1, must_wait=True),
    "custom_rm_path": Shape("reward(args, sample) -> float, or reward(args, samples) -> list of floats", 2,
                            may_wait=True),
    "dynamic_sampling_filter_path": Shape("keep(args, samples) -> DynamicFilterOutput or bool", 2),
    "buffer_filter_path": Shape("select(args, rollout_id, buffer, num_samples) -> list of groups of the buffer", 4),
    "rollout_sample_filter_path": Shape("mark(args, data), which sets remove_sample", 2),
    "rollout_all_samples_process_path": Shape("process(args, all_samples, data_source)", 3),
    "custom_reward_post_process_path": Shape("post_process(args, samples) -> (raw_rewards, rewards)", 2),
    "custom_advantage_function_path": Shape("advantage(args, rollout_data)", 2),
    "rollout_data_postprocess_path": Shape(
        "postprocess(args, rollout_id, rollout_data), or postprocess(args)", 3, or_else=1),
    "custom_loss_function_path": Shape(
        "loss(args, inputs) -> (loss of each token, metrics)", 2,
        note="; one of (args, batch, logits, sum_of_sample_mean) cannot be called, as the logits of a micro-batch "
        "never exist at once and only the core reduces: `inputs` is miles_core.stages.loss.LossInputs"),
    "custom_tis_function_path": Shape(
        f"tis(args, *, {', '.join(TIS)}) -> (pg_loss, loss_masks, metrics)", 1, TIS),
    "custom_pg_loss_reducer_function_path": Shape(
        "reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (tensor -> number)", 4),
    "custom_megatron_post_save_hook_path": Shape(
        "post_save(args, rollout_id, checkpoint_dir, hf_checkpoint_dir)", 4),
    "custom_rollout_log_function_path": Shape(
        "log(rollout_id, args, samples, rollout_extra_metrics, rollout_time)", 5),
    "custom_eval_rollout_log_function_path": Shape("log(rollout_id, args, data, extra_metrics)", 4),
    "custom_update_weight_post_write_path": Shape("written(args, folder, servers)", 3),
    "rollout_function_path": Shape(
        "generate_rollout(args, rollout_id, data_buffer, evaluation=False) -> groups of samples, or a class "
        "Fn(input) with __call__(input) -> RolloutFnTrainOutput", 3, ("evaluation",), may_wait=True, class_of=1),
    "eval_function_path": Shape(
        "evaluate(args, rollout_id, data_buffer, evaluation=True) -> figures by dataset, or a class Fn(input) with "
        "__call__(input) -> RolloutFnEvalOutput", 3, ("evaluation",), may_wait=True, class_of=1),
    "custom_agent_function_path": Shape(
        "async agent(base_url, prompt, request_kwargs, metadata) -> dict or None", 0,
        ("base_url", "prompt", "request_kwargs", "metadata"), must_wait=True),
    "session_sample_picker_path": Shape("pick(samples, session_metadata) -> samples", 2, may_wait=True),
    "session_sample_postprocessor_path": Shape("postprocess(samples, session_metadata) -> samples", 2, may_wait=True),
    "generate_execute_tool_function_path": Shape("execute(name, arguments) -> text", 2, may_wait=True),
    "custom_convert_samples_to_train_data_path": Shape("convert(args, samples) -> dict of lists", 2),
    "custom_model_provider_path": Shape("provider(pre_process, post_process, vp_stage=None) -> model", 0,
                                        ("pre_process", "post_process")),
})  # fmt: skip
"""The options that name a function, and how it is called."""


HOOKED = "hook(args, sample) -> sample or None, perhaps async"
"""How the functions of rollout_sample_hook_path are called."""


def function_at(option: str, path: str) -> Callable[..., Any]:
    """The function that an option names.

    Args:
        option: a key of SHAPES.
        path: package.module.function, or ./file.py:function relative to the working directory.

    Raises:
        HookError: there is none, or it cannot be called as it would be.
    """
    shape, who = SHAPES[option], f"--{option.replace('_', '-')} {path}"
    function: Callable[..., Any] = anything_at(path, who, shape.text)
    if not callable(function):
        raise HookError("there is no such function", code="function-missing", got=repr(function), who=who,
                        fix=f"define {shape.text}")
    problem = _misfit(function, shape)
    if problem is not None:
        raise HookError("the function cannot be called as it would be", code="function-signature", got=problem, who=who,
                        fix=f"it is called as {shape.text}{shape.note}")
    return noted(function)


def anything_at(path: str, who: str, wanted: str = "a function") -> Any:
    """What package.module.name, package.module:name or ./file.py:name names.

    Raises:
        HookError: there is no such thing, or its module cannot be imported.
    """
    module, name = _imported(path, who, wanted)
    if not hasattr(module, name):
        raise HookError("there is no such function", code="function-missing", who=who, fix=f"define {wanted}",
                        got=f"{module.__name__ if '.py' not in path else path.rpartition(':')[0]} has no {name!r}")
    return getattr(module, name)


def arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function, or an object that a class makes, is called with.

    Raises:
        ValueError: written in C, without a signature.
    """
    if inspect.isclass(function):
        return list(inspect.signature(function.__call__).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


@functools.cache
def ready(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it is; of a class the one object that is called in its place."""
    kind: Any = function
    return noted(kind()) if inspect.isclass(function) else function


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what it raises says in which of its lines. A class stays as it is.

    Raises:
        HookError: it asked a host of no address, as `args.sglang_router_ip` is one to clients of its own.
    """
    if inspect.isclass(function):
        return function
    call: Any = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(call):
        @functools.wraps(function)
        async def waiting(*given: Any, **named: Any) -> Any:
            with located(function):
                return await function(*given, **named)
        return waiting

    @functools.wraps(function)
    def plain(*given: Any, **named: Any) -> Any:
        with located(function):
            return function(*given, **named)
    return plain


@contextmanager
def located(function: Callable[..., Any]) -> Iterator[None]:
    """For the time of a call: what `noted` says of one."""
    try:
        yield
    except Exception as error:
        module = inspect.getmodule(function)
        own = getattr(module, "__file__", None)
        own = None if module is None or module.__name__.startswith("miles_compat.") else own
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        note = f"in {lines[-1].filename}:{lines[-1].lineno} {lines[-1].name}" if lines else ""
        if isinstance(_first(error), socket.gaierror):
            raise HookError("a function asked a host that has no address", code="engine-address-unknown", who=note,
                            got=f"{type(error).__name__}: {error}", fix="where it is args.sglang_router_ip: only "
                            "miles.utils.http_utils.post knows that one; an agent with a client of its own is a "
                            "function of --custom-agent-function-path, which is given a URL") from error
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _first(error: BaseException) -> BaseException:
    """What an error was raised from, and that from, to the first."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _imported(path: str, who: str, wanted: str) -> tuple[ModuleType, str]:
    from miles_compat import modules

    where, _, name = path.rpartition(":" if ":" in path else ".")
    if not where or not name.isidentifier() or path.endswith(".py"):  # a file, of which no function is named
        raise HookError("this is no path of a function", code="function-path-malformed", got=path,
                        who=who.partition(" ")[0],
                        fix=f"write package.module.function or ./file.py:function, of {wanted}")
    modules.provide()
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # `python train.py` finds what lies beside it, too
    try:
        return (import_file(Path(where).resolve()) if ".py:" in path else importlib.import_module(where)), name
    except (Exception, SystemExit) as error:
        fix = ("write ./file.py:function for a file, or have PYTHONPATH name the folder of the package; expected is "
               f"{wanted}")
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in ("miles", "slime"):
            fix = ("there is no such part of Miles here; a function may import "
                   f"{', '.join(f'miles.{name}' for name in modules.NAMES)}")
        raise HookError("the module of the function cannot be imported", got=f"{type(error).__name__}: {error}",
                        who=who, code="function-import-failed", fix=fix) from error


def _misfit(function: Callable[..., Any], shape: Shape) -> str | None:
    """Why the function cannot be called, None if it can."""
    call = function.__call__ if inspect.isclass(function) else function
    if inspect.isclass(function) and shape.class_of is not None:
        shape = Shape(shape.text, shape.class_of, made=True)
    if shape.made:
        call = function
    if inspect.iscoroutinefunction(call) and not (shape.may_wait or shape.must_wait):
        return "a coroutine function, which nobody awaits here"
    if shape.must_wait and not inspect.iscoroutinefunction(call):
        return "a plain function, and it is awaited"
    try:
        signature = inspect.signature(function) if shape.made else inspect.Signature(arguments(function))
    except ValueError:  # written in C, without one
        return None
    problems = []
    for count in (shape.positional, *filter(None, (shape.or_else,))):
        try:
            signature.bind(*[None] * count, **dict.fromkeys(shape.keywords))
            return None
        except TypeError as error:
            problems.append(f"{getattr(function, '__name__', 'function')}{signature}: {error}")
    return problems[0]
