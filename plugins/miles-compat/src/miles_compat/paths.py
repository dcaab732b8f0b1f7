"""From a path on the command line to a function that can be called as Miles calls it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from miles_core.errors import HookError
from miles_core.plugins.load import import_file


@dataclass(frozen=True, slots=True)
class Shape:
    """How a function is called.

    Args:
        text: its signature, for messages.
        positional: how many arguments it is given by position.
        keywords: names of those that it is given by name.
        may_wait: it may be a coroutine function.
        note: what else to say to someone whose function does not fit.
    """

    text: str
    positional: int
    keywords: tuple[str, ...] = ()
    may_wait: bool = False
    note: str = ""


TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
       "parallel_state", "max_seq_lens")

SHAPES = MappingProxyType({
    "custom_megatron_init_path": Shape("init(args)", 1),
    "custom_megatron_before_log_prob_hook_path": Shape("hook(args, model, store_prefix)", 3),
    "custom_megatron_before_train_step_hook_path": Shape(
        "hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)", 6),
    "custom_rm_path": Shape("reward(args, sample) -> float", 2, may_wait=True),
    "buffer_filter_path": Shape("select(args, rollout_id, buffer, num_samples) -> list of groups of the buffer", 4),
    "custom_reward_post_process_path": Shape("post_process(args, samples) -> (raw_rewards, rewards)", 2),
    "custom_advantage_function_path": Shape("advantage(args, rollout_data)", 2),
    "custom_loss_function_path": Shape(
        "loss(args, inputs) -> (loss of each token, metrics)", 2,
        note="; one of (args, batch, logits, sum_of_sample_mean) cannot be called, as the logits of a micro-batch "
        "never exist at once and only the core reduces: `inputs` is miles_core.stages.loss.LossInputs"),
    "custom_tis_function_path": Shape(
        f"tis(args, *, {', '.join(TIS)}) -> (pg_loss, loss_masks, metrics)", 1, TIS),
    "custom_pg_loss_reducer_function_path": Shape(
        "reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (tensor -> number)", 4),
})  # fmt: skip
"""The options that name a function, and how it is called."""


def function_at(option: str, path: str) -> Callable:
    """The function that an option names.

    Args:
        option: a key of SHAPES.
        path: package.module.function, or ./file.py:function relative to the working directory.

    Raises:
        HookError: there is none, or it cannot be called as it would be.
    """
    shape, who = SHAPES[option], f"--{option.replace('_', '-')} {path}"
    module, name = _imported(path, who, shape)
    function = getattr(module, name, None)
    if not callable(function):
        raise HookError("there is no such function", got=repr(function) if hasattr(module, name) else
                        f"{module.__name__ if '.py' not in path else path.rpartition(':')[0]} has no {name!r}",
                        who=who, fix=f"define {shape.text}")
    problem = _misfit(function, shape)
    if problem is not None:
        raise HookError("the function cannot be called as it would be", got=problem, who=who,
                        fix=f"it is called as {shape.text}{shape.note}")
    return function


def _imported(path: str, who: str, shape: Shape) -> tuple[ModuleType, str]:
    where, _, name = path.rpartition(":" if ".py:" in path else ".")
    if not where or not name.isidentifier():
        raise HookError("this is no path of a function", got=path, who=who.partition(" ")[0],
                        fix=f"write package.module.function or ./file.py:function, of {shape.text}")
    try:
        return (import_file(Path(where).resolve()) if ".py:" in path else importlib.import_module(where)), name
    except (Exception, SystemExit) as error:
        raise HookError("the module of the function cannot be imported", got=f"{type(error).__name__}: {error}",
                        who=who, fix="write ./file.py:function for a file, or have PYTHONPATH name the folder of the "
                        f"package; expected is {shape.text}") from error


def _misfit(function: Callable, shape: Shape) -> str | None:
    """Why the function cannot be called, None if it can."""
    if inspect.iscoroutinefunction(function) and not shape.may_wait:
        return "a coroutine function, which nobody awaits here"
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return None
    try:
        signature.bind(*[None] * shape.positional, **dict.fromkeys(shape.keywords))
    except TypeError as error:
        return f"{getattr(function, '__name__', 'function')}{signature}: {error}"
    return None
