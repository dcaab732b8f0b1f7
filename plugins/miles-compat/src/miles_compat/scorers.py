"""Scorers of the installed plugins under the names that functions of Miles import from its rm_hub."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_compat.loading import load_function
from miles_compat.sample import Sample, labelled
from miles_core.errors import ConfigError


async def async_rm(args: Any, sample: Sample, **named: object) -> Any:
    """A sample's reward by --custom-rm-path, or by the scorer that its metadata or --rm-type names."""
    if args.custom_rm_path is not None:
        return await _awaited(load_function(args.custom_rm_path)(args, sample, **named))
    name = (sample.metadata or {}).get("rm_type") or args.rm_type
    return await scored(args, name, sample)


async def batched_async_rm(args: Any, samples: Sequence[Sample], inplace_set_reward_field: bool = False,
                           **named: object) -> list[Any] | None:
    """Rewards of several samples, or None where they are written into them."""
    if args.custom_rm_path is not None:
        rewards = list(await _awaited(load_function(args.custom_rm_path)(args, list(samples), **named)))
    else:
        rewards = list(await asyncio.gather(*(async_rm(args, sample, **named) for sample in samples)))
    if not inplace_set_reward_field:
        return rewards
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return None


async def scored(args: Any, name: str | None, sample: Sample) -> Any:
    """What an installed scorer gives a sample.

    Raises:
        ConfigError: there is none of that name.
    """
    scorer = _scorer(args, name) if name else None
    if scorer is None:
        raise ConfigError("no installed plugin has this scorer", got=name, who="--rm-type",
                          fix="name one that `miles plugins` lists", code="compat-scorer-unknown")
    given = _core(sample)
    whole = "samples" in inspect.signature(scorer).parameters
    if inspect.iscoroutinefunction(scorer):
        answer = await scorer([given] if whole else given)
    else:
        from miles_core.hosts import in_daemon_thread

        answer = await in_daemon_thread(lambda: scorer([given] if whole else given))
    return answer[0] if whole else answer


def _scorer(args: Any, name: str) -> Callable[..., Any] | None:
    """The method of a plugin with the run's options, or its defaults."""
    from miles_core.plugins.load import load, options_class
    from miles_core.plugins.manifest import of_package
    from miles_core.plugins.scan import installed

    for one in installed():
        manifest = of_package(one.entry, one.name)
        offer = next((offer for offer in manifest.offers if (offer.hook, offer.name) == ("reward", name)), None)
        if offer is None:
            continue
        if one.name not in args._made:
            kind, config = load(manifest), args._config
            given, options = {"config": config}, options_class(kind)
            if options is not None:
                given["options"] = options(**config.options.get(one.name, {}))
            wanted = inspect.signature(kind).parameters
            args._made[one.name] = kind(**{word: value for word, value in given.items() if word in wanted})
        method: Callable[..., Any] = getattr(args._made[one.name], offer.method)
        return method
    return None


def _core(sample: Sample) -> Any:
    """The core's sample of one that no group has yet."""
    import numpy as np

    from miles_core.types import Prompt, Status
    from miles_core.types import Sample as CoreSample

    text = sample.prompt if isinstance(sample.prompt, str) else ""
    prompt = Prompt(sample.group_index or 0, sample.group_index or 0, text, (), metadata=dict(sample.metadata or {}),
                    **labelled(sample.label))
    return CoreSample(prompt, sample.index or 0, {"tokens": np.array(sample.tokens, np.int32)}, sample.response_length,
                      sample.response, Status(getattr(sample.status, "value", sample.status)))


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False,
                  pause_tokens_index: object = None) -> dict[str, Any]:
    """DAPO's verdict: `score`, 1 or -1, `acc`, and `pred`; strict of the last box alone, letter by letter.

    Raises:
        ValueError: the label is no number, and the verdict is not strict.
    """
    from miles_rewards.boxes import last_box
    from miles_rewards.dapo import dapo

    if strict_box_verify:
        found = last_box(solution_str[-100:])
        right = found is not None and found == str(ground_truth)
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": found}
    return dict(dapo(solution_str, str(ground_truth)))


def extract_answer(text: str) -> str | None:
    """What the last box of a text holds."""
    from miles_rewards.boxes import last_box

    return last_box(text)


def grade_answer_verl(solution: str | None, label: object) -> bool:
    """Whether the answer in the last box, or the text where it has none, equals the label."""
    from miles_rewards.boxes import last_box

    return _equal((last_box(solution) or solution) if solution else None, label)


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    """1 when the last box after the thinking equals the label."""
    from miles_rewards.boxes import last_box
    from miles_rewards.deepscaler import after_thinking

    solution = after_thinking(response)
    return int(_equal(last_box(solution) if solution else None, label))


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) of the tokens of two texts."""
    from collections import Counter

    from miles_rewards.f1 import f1, tokens

    mine, wanted = tokens(prediction), tokens(ground_truth)
    value, common = f1(prediction, ground_truth), sum((Counter(mine) & Counter(wanted)).values())
    return (value, common / len(mine), common / len(wanted)) if value else (0.0, 0.0, 0.0)


def compute_gpqa_reward(response: str, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 when the response chooses the right letter, or holds the right answer's text."""
    from miles_rewards.gpqa import gpqa

    return gpqa(response, label, metadata or {})


def _equal(answer: str | None, label: object) -> bool:
    from miles_rewards.symbolic import equal

    if answer is None or label is None:
        return False
    labels = label if isinstance(label, list) else [label]
    return any(equal(answer, extract_answer(str(one)) or str(one)) for one in labels)
