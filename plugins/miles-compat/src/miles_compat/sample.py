"""A sample as Miles's functions know it, made of the core's and read back into it."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from miles_core.errors import HookError

if TYPE_CHECKING:
    import numpy as np

    from miles_core import types


class _Status(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Counts(Counter[str]):
    """Sums of what answers of the engine say of themselves, by SGLang's names; nobody here reads them."""

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """The numbers of one more answer."""
        self.update({name: value for name, value in meta_info.items() if isinstance(value, int)})


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
    label: Any = None
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
    multimodal_train_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    teacher_log_probs: Any = None
    opd_reverse_kl: Any = None
    rollout_indexer_topk: Any = None
    session_id: str | None = None
    custom_rm_path: str | None = None
    routing_key: str | None = None
    adapter: Any = None
    reward_spec: Any = None
    non_generation_time: float = 0.0
    spec_info: Counts = field(default_factory=Counts)
    prefix_cache_info: Counts = field(default_factory=Counts)

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest of weight_versions."""
        return min((int(version) for version in self.weight_versions if str(version).isdigit()), default=None)

    def get_reward_value(self, args: Any) -> Any:
        """The reward; of a dict what --reward-key names."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward

    def update_from_meta_info(self, args: object, meta_info: Mapping[str, Any]) -> None:
        """Note what an answer of /generate says of itself: the weight version, and how it ended."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {"length": _Status.TRUNCATED, "abort": _Status.ABORTED, "stop": _Status.COMPLETED}
        self.status = ends.get(meta_info["finish_reason"]["type"], self.status)

    def append_answer(self, output: Mapping[str, Any], *, mask: bool = False) -> None:
        """Append what /generate drew: its tokens, text and log-probs; with `mask` also ones to the loss mask."""
        pairs = output["meta_info"].get("output_token_logprobs") or []
        self.tokens = [*self.tokens, *(pair[1] for pair in pairs)]
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *(pair[0] for pair in pairs)]
        self.response, self.response_length = self.response + output["text"], self.response_length + len(pairs)
        if mask:
            self.loss_mask = [*(self.loss_mask or ()), *[1] * len(pairs)]

    def append_response_tokens(self, args: object = None, *, tokens: Sequence[int] | None = None,
                               log_probs: Sequence[float] | None = None, trainable: bool = True,
                               meta_info: Mapping[str, Any] | None = None, text: str | None = None,
                               update_terminal_info: bool = True) -> None:
        """Append tokens of the engine, with their log-probs, or of others, which are not trained on.

        Raises:
            ValueError: log-probs for tokens of others, or none for the engine's.
        """
        new = [int(token) for token in tokens or ()]
        if new and (log_probs is not None) != trainable or trainable and new and len(log_probs or ()) != len(new):
            raise ValueError(f"{len(log_probs or ())} log-probs for {len(new)} tokens of "
                             f"{'the engine' if trainable else 'others'}")
        self.loss_mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        known = self.rollout_log_probs
        self.rollout_log_probs = [0.0] * self.response_length if known is None else known
        self.response, self.response_length = self.response + (text or ""), self.response_length + len(new)
        self.tokens += new  # in place: functions keep the lists
        self.loss_mask += [int(trainable)] * len(new)
        self.rollout_log_probs += log_probs if log_probs is not None else [0.0] * len(new)
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Take the last n response tokens away, with everything that is said of them."""
        if n <= 0:
            return
        self.response_length -= n
        for name in ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, values[:-n])
        self.response = tokenizer.decode(self.tokens[len(self.tokens) - self.response_length:])

    def reset_for_retry(self) -> None:
        """Forget what was generated; what was asked stays."""
        fresh, asked = Sample(), {"group_index", "index", "rollout_id", "prompt", "label", "multimodal_inputs",
                                  "metadata", "generate_function_path", "routing_key", "adapter", "reward_spec"}
        for one in fields(self):
            if one.name not in asked:
                setattr(self, one.name, getattr(fresh, one.name))
        self.status = _Status.ABORTED

    def validate(self) -> None:
        """
        Raises:
            ValueError: parts whose lengths do not fit.
        """
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for {self.response_length} response tokens")
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"{self.response_length} response tokens of {len(self.tokens)} in all")

    def to_dict(self) -> dict[str, Any]:
        """All attributes, the status as text."""
        return {**vars(self), "status": self.status.value}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """What to_dict gave, as a sample."""
        names = {one.name for one in fields(Sample)}
        made = Sample(**{key: value for key, value in data.items() if key in names and key != "status"})
        made.status = _Status(data["status"])
        for key in data.keys() - names:
            setattr(made, key, data[key])
        return made


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
        label=label_of(prompt), reward=sample.reward, loss_mask=_list(columns, "loss_mask"),
        weight_versions=[str(version) for version in dict.fromkeys(versions)],
        rollout_log_probs=_list(columns, "rollout_log_probs"), rollout_routed_experts=columns.get("routed_experts"),
        status=_Status(sample.status.value), metadata={**_own(prompt.metadata), **sample.metadata},
        rollout_id=sample.rollout, remove_sample=sample.metadata.get("remove_sample", False),
    )  # fmt: skip


def asked(prompt: types.Prompt, index: int, siblings: int) -> Sample:
    """A sample that nothing was drawn for yet."""
    return Sample(group_index=prompt.uid, index=prompt.uid * siblings + index, prompt=prompt.text,
                  label=label_of(prompt), metadata=_own(prompt.metadata))


def _own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a prompt for one of its samples, which may write into what they hold."""
    return {key: copy.deepcopy(value) if isinstance(value, dict | list) else value for key, value in metadata.items()}


def added(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What a function added to metadata, or changed."""
    def same(one: Any, other: Any) -> bool:
        try:
            return one is other or isinstance(one, dict | list) and bool(one == other)
        except ValueError:  # arrays in it
            return False
    return {key: value for key, value in metadata.items() if key not in known or not same(value, known[key])}


def mask_of(values: Any, size: int) -> np.ndarray | None:
    """[size] uint8 loss mask of a list or a tensor; None if it has not one 0 or 1 for each response token."""
    import numpy as np

    try:
        mask = np.array(values.tolist() if hasattr(values, "tolist") else list(values))
    except (TypeError, ValueError):  # of several lengths
        return None
    fits = mask.shape == (size,) and (size == 0 or mask.dtype.kind in "biuf" and bool(np.isin(mask, (0, 1)).all()))
    return mask.astype(np.uint8) if fits else None


def runs_of(mask: np.ndarray) -> list[list[int]]:
    """[start, stop] of each run of tokens that are trained on."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    return edges.reshape(-1, 2).tolist()


def label_of(prompt: types.Prompt) -> Any:
    """What stands under the row's label key."""
    return prompt.label if prompt.raw_label is None else prompt.raw_label


def labelled(value: Any) -> dict[str, Any]:
    """A label as prompts of the core have it."""
    whole = isinstance(value, dict | list)
    return {"label": json.dumps(value) if whole else None if value is None else str(value),
            "raw_label": value if whole or isinstance(value, int | float) else None}


@contextmanager
def lent(samples: Sequence[types.Sample], siblings: int | None = None, *, scored: bool = False, who: str = "compat",
         ) -> Iterator[list[Sample]]:
    """Samples for the time of a call. What it wrote to their metadata stays, and so do rewards and loss masks;
    `remove_sample` empties the mask.

    Args:
        scored: the call is a scorer's, which answers with rewards and may not change columns: `remove_sample` waits in
            the metadata.

    Raises:
        HookError: the call changed what was sampled, or which samples the group has.
    """
    found = [seen(sample, siblings or len(samples)) for sample in samples]
    before = [{name: _frozen(getattr(one, name)) for name in KEPT} for one in found]
    shown = list(found)
    yield shown
    if {*map(id, shown)} != {*map(id, found)}:
        raise HookError("the function takes samples out of what it is given", code="function-changes-groups", who=who,
                        got=f"{len(shown)} of {len(found)}", fix="set sample.remove_sample on those not to train on")
    for sample, one, old in zip(samples, found, before, strict=True):
        changed = [name for name in KEPT if getattr(one, name) != old[name]]
        if scored:
            changed = [name for name in changed if name != "reward"]  # what it returns is the reward
        if set(changed) - {"reward", "loss_mask"} or scored and changed:
            raise HookError(f"the function changes what was sampled of {sample.name}", who=who, got=", ".join(changed),
                            code="function-changes-sample",
                            fix="set sample.remove_sample to train on none of it; tokens are the generate function's")
        _take(sample, one, changed, who)
        sample.metadata |= added(one.metadata, {**sample.prompt.metadata, **sample.metadata})
        if one.remove_sample and scored:
            sample.metadata["remove_sample"] = True
        elif one.remove_sample:
            sample.columns["loss_mask"] = sample.columns["loss_mask"] * 0


KEPT = ("tokens", "response_length", "rollout_log_probs", "status", "loss_mask", "reward")
"""What a function that looks at samples might change of them; text is for people and scorers alone."""


def _frozen(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _take(sample: types.Sample, one: Sample, changed: Sequence[str], who: str) -> None:
    if "reward" in changed:
        sample.reward = number_of(one.reward, sample, who)
    if "loss_mask" in changed:
        sample.columns["loss_mask"] = narrowed(sample, one.loss_mask, who)


def number_of(value: Any, sample: types.Sample, who: str) -> float:
    """A reward that a function gave.

    Raises:
        HookError: it is no finite number.
    """
    with suppress(TypeError, ValueError, RuntimeError):
        if math.isfinite(number := float(value)):
            return number
    raise HookError(f"the function gives {sample.name} a reward that is no finite number", got=repr(value)[:100],
                    who=who, fix="give each sample a float", code="function-reward")


def narrowed(sample: types.Sample, values: Any, who: str) -> np.ndarray:
    """A loss mask that trains on some of the tokens that were trained on.

    Raises:
        HookError: it has not one 0 or 1 for each response token, or trains on others, whose log-probs are not known.
    """
    mask, before = mask_of(values, sample.response_length), sample.columns["loss_mask"]
    if mask is None:
        raise HookError(f"the loss mask of {sample.name} does not fit its response", code="function-loss-mask", who=who,
                        got=f"{repr(values)[:80]} for {sample.response_length} tokens",
                        fix="a 0 or a 1 for each response token")
    if (mask > before).any():
        raise HookError(f"the loss mask of {sample.name} has tokens that were masked when they were sampled", who=who,
                        got=f"{int((mask > before).sum())} of them", code="loss-mask-trains-more",
                        fix="have the generate function give tokens of the engine the loss mask 1; of those of others "
                        "no log-probs are known")
    return mask


@contextmanager
def groups_lent(groups: Iterable[types.Group], who: str = "compat") -> Iterator[list[list[Sample]]]:
    """Whole groups for the time of a call, in their order."""
    groups = list(groups)
    with lent([sample for group in groups for sample in group.samples], _size(groups), who=who) as found:
        rest = iter(list(found))
        shown = [[next(rest) for _ in group.samples] for group in groups]
        yield shown
        found[:] = [one for group in shown for one in group]


def _size(groups: Sequence[types.Group]) -> int:
    return max((len(group.samples) for group in groups), default=1)


def _list(columns: dict[str, Any], name: str) -> list[Any] | None:
    return columns[name].tolist() if name in columns else None
