"""A sample as Miles's functions know it, made of the core's and read back into it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core import types


class _Status(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """Miles's fields by Miles's names; lists are plain lists, one entry per token.

    Args:
        group_index: number of the prompt in the stream of prompts.
        index: number of the sample in that stream.
        prompt: the rendered text, or chat messages where a data source gives them.
        tokens: [T] prompt and response.
        label: the row's ground truth: text, or what the data hold as an object.
        loss_mask, rollout_log_probs: [R]; no mask trains on every response token.
        remove_sample: train on none of its tokens; it still counts in the group's comparison.
        metadata: what the dataset's row holds and what was added since.
    """

    Status = _Status

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | dict[str, Any] | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout_id: int | None = None
    multimodal_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: object) -> float | dict[str, Any] | None:
        """The reward, a number."""
        return self.reward


def seen(sample: types.Sample, siblings: int) -> Sample:
    """A sample of the core as Miles shows it.

    Args:
        siblings: samples of its group.
    """
    columns, prompt = sample.columns, sample.prompt
    versions = columns["versions"].tolist() if "versions" in columns else []
    return Sample(
        group_index=prompt.uid, index=prompt.uid * siblings + sample.index, prompt=prompt.text,
        tokens=sample.tokens.tolist(), response=sample.text, response_length=sample.response_length,
        label=_label(prompt), reward=sample.reward, loss_mask=_list(columns, "loss_mask"),
        weight_versions=[str(version) for version in dict.fromkeys(versions)],
        rollout_log_probs=_list(columns, "rollout_log_probs"), rollout_routed_experts=columns.get("routed_experts"),
        status=_Status(sample.status.value), metadata={**prompt.metadata, **sample.metadata},
        rollout_id=sample.rollout, remove_sample=sample.metadata.get("remove_sample", False),
    )  # fmt: skip


def asked(prompt: types.Prompt, index: int, siblings: int) -> Sample:
    """A sample that nothing was drawn for yet."""
    return Sample(group_index=prompt.uid, index=prompt.uid * siblings + index, prompt=prompt.text, label=_label(prompt),
                  metadata=dict(prompt.metadata))


def _label(prompt: types.Prompt) -> Any:
    """What stands under the row's label key: text, or an object, which the metadata have beside its text."""
    if (prompt.label or "")[:1] != "{":
        return prompt.label
    objects = (value for value in prompt.metadata.values() if isinstance(value, dict))
    return next((value for value in objects if json.dumps(value) == prompt.label), prompt.label)


@contextmanager
def lent(samples: Sequence[types.Sample], siblings: int | None = None, *, scored: bool = False,
         ) -> Iterator[list[Sample]]:
    """Samples for the time of a call. What it wrote to their metadata stays; `remove_sample` empties the loss mask.

    Args:
        scored: the call is a scorer's, which may not change columns: `remove_sample` waits in the metadata.
    """
    found = [seen(sample, siblings or len(samples)) for sample in samples]
    yield found
    for sample, one in zip(samples, found, strict=True):
        known = {**sample.prompt.metadata, **sample.metadata}
        sample.metadata |= {key: value for key, value in one.metadata.items()
                            if key not in known or known[key] is not value}
        if one.remove_sample and scored:
            sample.metadata["remove_sample"] = True
        elif one.remove_sample:
            sample.columns["loss_mask"] = sample.columns["loss_mask"] * 0


@contextmanager
def groups_lent(groups: Iterable[types.Group]) -> Iterator[list[list[Sample]]]:
    """Whole groups for the time of a call, in their order."""
    groups = list(groups)
    with lent([sample for group in groups for sample in group.samples], _size(groups)) as found:
        rest = iter(found)
        yield [[next(rest) for _ in group.samples] for group in groups]


def _size(groups: Sequence[types.Group]) -> int:
    return max((len(group.samples) for group in groups), default=1)


def _list(columns: dict[str, Any], name: str) -> list[Any] | None:
    return columns[name].tolist() if name in columns else None
