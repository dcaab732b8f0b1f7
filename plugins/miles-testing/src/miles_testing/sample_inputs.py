"""Canned calls: for each hook that is called with data, inputs to call it with, and what its answer has to be like."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.plugins.bind import Hooks
from miles_core.types import Batch, Drop, Group, Prompt, Sample, Status

HOOKS = ("reward", "filter_group", "unfinished", "select_from_buffer", "shape_rewards", "generate_request",
         "generate_response", "advantage", "shape_advantages", "policy_loss", "token_weights", "loss_terms",
         "reduction", "begin", "metrics", "samples")  # fmt: skip
"""What is called, in loop order."""

DRAWN = ("tokens", "rollout_log_probs", "versions")
"""Columns that hold what was drawn, which must not change."""


def canned_samples(*, columns: Mapping[str, float] | None = None, metadata: Mapping[str, object] | None = None,
                   row: Mapping[str, object] | None = None, rewards: Mapping[str, float] | None = None) -> list[Sample]:
    """Two prompts with three answers each: of different lengths and rewards, one of them cut off.

    Args:
        columns: further response columns that all of them have, and the value of every row.
        metadata, row: of each sample, of its prompt.
        rewards: that samples bring from their generator, by scorer.
    """
    rows = [(0, "1+3=", "4", [("\\boxed{4}", 1.0), ("It is \\boxed{5}.", 0.0), ("four", 0.25)]),
            (1, "2+5=", "7", [("\\boxed{7}", 1.0), ("7", 1.0), ("The answer is \\boxed{8}", 0.0)])]
    samples = []
    for uid, text, label, answers in rows:
        messages = ({"role": "user", "content": text},)
        prompt = Prompt(uid, uid, text, tuple(text.encode()), label, dict(row or {}), messages)
        for index, (answer, reward) in enumerate(answers):
            one = _sample(prompt, index, answer, reward)
            one.metadata.update(copy.deepcopy(dict(metadata or {})))
            one.columns |= {name: np.full(len(answer), value, np.float32) for name, value in (columns or {}).items()}
            one.rewards |= rewards or {}
            samples.append(one)
    return samples


def _sample(prompt: Prompt, index: int, text: str, reward: float) -> Sample:
    size, draw = len(text), np.random.default_rng(97 * prompt.uid + index)
    columns: dict[str, np.ndarray] = {
        "tokens": np.array([*prompt.token_ids, *text.encode()], np.int32), "loss_mask": np.ones(size, np.uint8),
        "rollout_log_probs": draw.uniform(-2, -0.1, size).astype(np.float32), "versions": np.full(size, 3, np.int32),
        "log_probs": draw.uniform(-2, -0.1, size).astype(np.float32),
        "ref_log_probs": draw.uniform(-2, -0.1, size).astype(np.float32),
        "advantages": np.full(size, reward - 0.5, np.float32),
    }  # fmt: skip
    status = Status.TRUNCATED if index == 2 else Status.COMPLETED
    return Sample(prompt, index, columns, size, text, status, {"canned": reward}, reward=reward)


def empty(sample: Sample) -> Sample:
    """The same sample with an answer of no token."""
    start = len(sample.prompt.token_ids)
    columns = {name: array[:start] if name == "tokens" else array[:0] for name, array in sample.columns.items()}
    return dataclasses.replace(sample, columns=columns, response_length=0, text="")


def grouped(flat: Sequence[Sample]) -> list[Group]:
    """Samples by prompt."""
    prompts = {sample.prompt.uid: sample.prompt for sample in flat}
    return [Group(prompt, [s for s in flat if s.prompt.uid == uid]) for uid, prompt in prompts.items()]


@dataclass(frozen=True)
class SampleInput:
    """One way to call a hook.

    Args:
        kind: "typical", "one" (sample) or "empty".
        arguments: those of the hook, in its order.
    """

    kind: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Inputs:
    """What canned calls are made of.

    Args:
        make: gives the samples, new ones at every call; those of one prompt are a group.
        response: what an engine answered a sample with, for generate_response.
        entropy: whether the run measures it.
    """

    make: Callable[[], list[Sample]] = canned_samples
    response: Callable[[Sample], Any] | None = None
    folder: Path = field(default_factory=Path)
    entropy: bool = False

    def of(self, hook: str) -> Iterator[SampleInput]:
        """New inputs for every way in which a hook is called here."""
        for kind in ("typical", "one", "empty"):
            flat = self.make()
            if kind != "typical":
                flat = flat[:1] if kind == "one" or hook in _EACH else []
            if kind == "empty" and hook in _EACH:
                if not _EACH[hook]:
                    continue
                flat = [empty(flat[0])]
            yield SampleInput(kind, tuple(self._arguments(hook, flat)))

    def _arguments(self, hook: str, flat: list[Sample]) -> list[object]:
        groups = grouped(flat)
        if hook == "reward":
            return [flat[0], flat]
        if hook in ("filter_group", "unfinished"):
            return [_called_back(groups[0]) if hook == "unfinished" else groups[0]]
        if hook in ("select_from_buffer", "shape_rewards"):
            handed = [_called_back(group) for group in groups] if hook == "select_from_buffer" else groups
            return [handed, 4] if hook == "select_from_buffer" else [handed]
        if hook in ("generate_request", "generate_response"):
            request = _request(flat[0])
            return [request, flat[0].prompt] if hook == "generate_request" else [flat[0], self._response(flat[0])]
        if hook in ("advantage", "shape_advantages"):
            return [Batch(4, groups, 3)]
        if hook == "reduction":
            return [flat]
        if hook == "metrics":
            return [4, {"rollout/raw_reward": 0.5} if flat else {}, self.folder]
        if hook == "begin":
            plan = {"name": "canned", "digest": "0", "options": {"rollout.num_rollout": 5}}
            return [plan, "canned", None, self.folder]
        if hook == "samples":
            return [4, None, flat, self.folder]
        inputs = loss_inputs(flat, entropy=self.entropy)
        return [_weights(len(inputs.mask)), inputs] if hook == "token_weights" else [inputs]

    def _response(self, sample: Sample) -> object:
        from miles_core.stages.rollout import Response

        if self.response is not None:
            return self.response(sample)
        drawn = {name: sample.columns[name] for name in ("rollout_log_probs", "versions")}
        return Response(sample.tokens[len(sample.prompt.token_ids):], drawn["rollout_log_probs"], drawn["versions"],
                        "stop", sample.text)


_EACH = {"reward": True, "filter_group": False, "unfinished": False, "generate_request": False,
         "generate_response": False}
"""Hooks that get one sample or group and never none; whether an answer may be of no token."""


def _called_back(group: Group) -> Group:
    return dataclasses.replace(group, samples=[
        dataclasses.replace(sample, status=Status.ABORTED, metadata={"spans": 1}, reward=None, rewards={})
        for sample in group.samples])


def _request(sample: Sample) -> object:
    from miles_core.stages.rollout import Request, SamplingParams

    return Request(f"train-{sample.prompt.uid}-0", sample.prompt.token_ids, SamplingParams(max_new_tokens=8), 1)


def _weights(rows: int) -> object:
    import torch

    from miles_core.stages.loss import TokenWeights

    return TokenWeights(torch.ones(rows), torch.ones(rows, dtype=torch.bool), {})


def loss_inputs(flat: Sequence[Sample], *, entropy: bool = False) -> Any:
    """LossInputs of the response tokens of some samples, the first token of each masked."""
    import torch

    from miles_core.stages.loss import LossInputs

    def rows(name: str) -> torch.Tensor:
        parts = [sample.columns[name] for sample in flat]
        return torch.tensor(np.concatenate(parts) if parts else np.zeros(0), dtype=torch.float32)

    sizes = torch.tensor([sample.response_length for sample in flat], dtype=torch.int64)
    sample = torch.repeat_interleave(torch.arange(len(flat)), sizes)
    mask = rows("loss_mask")
    mask[(sizes.cumsum(0) - sizes)[sizes > 0]] = 0
    old = rows("log_probs")
    return LossInputs(
        log_probs=(old + 0.1 * torch.sin(torch.arange(len(old)))).requires_grad_(), entropy=-old if entropy else None,
        old_log_probs=old, rollout_log_probs=rows("rollout_log_probs"), ref_log_probs=rows("ref_log_probs"),
        advantages=rows("advantages"), mask=mask, sample=sample,
        segment_sum=lambda values: values.new_zeros(len(flat), *values.shape[1:]).index_add(0, sample, values),
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, rows={"log_probs": old, "loss_mask": mask},
        samples=tuple(flat))


def callables(hooks: Hooks, hook: str) -> dict[str, Callable[..., Any]]:
    """Name -> what a role has bound for a hook; for hooks without names, one called like the hook."""
    bound = getattr(hooks, hook)
    if isinstance(bound, dict):
        return bound
    return {hook: bound} if bound else {}


def call(hook: str, bound: Callable[..., Any], arguments: Sequence[object]) -> object:
    """Call it as the core does."""
    if hook == "reward":
        whole = "samples" in inspect.signature(bound).parameters
        result = bound(arguments[1] if whole else arguments[0])
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    return bound(*arguments)


async def _awaited(result: Any) -> object:
    return await result


def problem(hook: str, arguments: Sequence[Any], answer: Any) -> str | None:
    """What is wrong with an answer, in words; None for nothing."""
    if hook in ("begin", "metrics", "samples"):
        return None if answer is None else f"it observes, and returned {type(answer).__name__}"
    if hook == "reward":
        numbers = answer if isinstance(answer, Sequence) else [answer]
        if isinstance(answer, Sequence) and len(answer) != len(arguments[1]):
            return f"{len(answer)} rewards for {len(arguments[1])} samples"
        numbers = [number for one in numbers for number in (one.values() if isinstance(one, Mapping) else [one])
                   if not isinstance(number, str)]  # a dict has texts beside its numbers
        bad = [number for number in numbers if not (hasattr(number, "__float__") and np.isfinite(float(number)))]
        return f"{bad[0]!r} is no finite number" if bad else None
    if hook == "advantage":
        return _misfit(answer, [sample.response_length for sample in arguments[0].samples])
    if hook == "reduction":
        return _misfit(answer, [0] * len(arguments[0]))
    if hook in ("policy_loss", "token_weights", "loss_terms"):
        return _rows(hook, answer, len(arguments[-1].mask))
    wanted = (type(arguments[0]), Drop) if hook == "filter_group" else type(arguments[0])
    return None if isinstance(answer, wanted) else f"a {type(answer).__name__} came back"


def _misfit(values: Any, lengths: Sequence[int]) -> str | None:
    if len(values) != len(lengths):
        return f"{len(values)} values for {len(lengths)} samples"
    for value, length in zip(values, lengths):
        array = np.asarray(value)
        if array.shape not in ((), (length,)) or not np.isfinite(array).all():
            return f"shape {list(array.shape)} for {length} tokens, or not finite"
    return None


def _rows(hook: str, answer: Any, count: int) -> str | None:
    if hook == "policy_loss":
        value, metrics = answer
        parts = {"the loss": value, **metrics}
    elif hook == "token_weights":
        parts = {"weight": answer.weight, "keep": answer.keep, **answer.metrics}
    else:
        parts = {name: term for name, (_, term) in answer.items()}
    wrong = [f"{name} has shape {list(part.shape)} for {count} tokens" for name, part in parts.items()
             if tuple(part.shape) != (count,)]
    return wrong[0] if wrong else None


def frozen(value: object) -> object:
    """A value as plain, comparable data: equal for values that are equal bit for bit, however deep."""
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        plain = value.detach().cpu()
        return "tensor", str(plain.dtype), tuple(plain.shape), plain.double().numpy().tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple((f.name, frozen(getattr(value, f.name))) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return "mapping", tuple(sorted(((repr(key), frozen(item)) for key, item in value.items()), key=lambda x: x[0]))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(frozen(item) for item in value)
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(map(repr, value)))
    if isinstance(value, str | bytes | int | float | bool | None | Enum | Path | np.generic):
        return repr(value)
    return type(value).__name__


def reached(value: object) -> list[Sample]:
    """Every sample in an argument."""
    if isinstance(value, Sample):
        return [value]
    if isinstance(value, Group | Batch):
        return list(value.samples)
    return [sample for item in value for sample in reached(item)] if isinstance(value, list | tuple) else []


def drawn(flat: Sequence[Sample]) -> list[object]:
    """What was drawn and asked, of each sample."""
    return [frozen((sample.prompt, sample.index, {name: sample.columns.get(name) for name in DRAWN}))
            for sample in flat]


class Planted(Exception):
    """The exception that a trap raises."""


class Trap:
    """An argument of which nothing can be seen: whatever is asked of it raises. `sprung` says whether it was."""

    def __init__(self) -> None:
        object.__setattr__(self, "sprung", False)

    def _spring(self, *args: object) -> Any:
        object.__setattr__(self, "sprung", True)
        raise Planted("planted by the conformance kit")

    def __getattribute__(self, name: str) -> Any:
        if name in ("sprung", "_spring", "__class__"):
            return object.__getattribute__(self, name)
        return object.__getattribute__(self, "_spring")()

    __iter__ = __len__ = __getitem__ = __contains__ = __bool__ = __float__ = __setattr__ = _spring
