"""A data source of Miles as a source of prompts."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_compat.paths import located, noted
from miles_compat.sample import labelled
from miles_core.errors import DataError
from miles_core.types import Prompt

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.config import RunConfig

WHO = "data_source_path"


@dataclass
class Source:
    """Prompts of `get_samples(1)`, numbered as they come.

    A resumed run asks a new data source for as many as were handed out before, so it has to give the same ones again:
    what is random in it depends on args.rollout_seed.

    Args:
        inner: the object that the path's class made.
    """

    inner: Any
    config: RunConfig
    tokenizer: Any
    data: str
    _next: int = 0
    _again: deque[Prompt] = field(default_factory=deque)

    def __len__(self) -> int:
        try:
            return len(self.inner)
        except TypeError:
            raise DataError("the data source does not say how many prompts an epoch has",
                            code="data-source-length-unknown", who=WHO,
                            fix="give it __len__, or write --num-rollout in place of --num-epoch") from None

    def next(self) -> Prompt:
        """The next prompt: one that was given back, else a fresh one."""
        return self._again.popleft() if self._again else self._fresh()

    def give_back(self, prompts: list[Prompt]) -> None:
        """Hand these out again before anything else, in this order."""
        self._again.extendleft(reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        """How many were handed out, and which of them come again."""
        return {"next": self._next, "again": [prompt.uid for prompt in self._again], "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw what was handed out before."""
        drawn = {prompt.uid: prompt for prompt in (self._fresh() for _ in range(state["next"]))
                 if prompt.uid in state["again"]}
        self._again = deque(drawn[uid] for uid in state["again"])

    def _fresh(self) -> Prompt:
        """
        Raises:
            DataError: what comes is no group of samples with a prompt.
        """
        uid = self._next
        groups = noted(self.inner.get_samples)(1)
        try:
            sample, = {id(group): group[0] for group in groups}.values()
            text, messages = self._rendered(sample.prompt)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError):
            raise DataError("get_samples(1) should return one group of samples with a prompt", who=WHO,
                            got=repr(groups)[:100], fix="return [[Sample(prompt=..., label=...)]]; a data source that "
                            "ends begins again", code="data-source-return") from None
        self._next += 1
        ids = self.tokenizer(text, add_special_tokens=messages is None)["input_ids"]
        return Prompt(uid, uid, text, tuple(ids), metadata=dict(getattr(sample, "metadata", None) or {}),
                      messages=messages, **labelled(getattr(sample, "label", None)))

    def _rendered(self, prompt: str | Iterable[Mapping[str, Any]]) -> tuple[str, tuple[dict[str, Any], ...] | None]:
        from miles_core.stages.prompts import render

        if isinstance(prompt, str):
            return prompt, None
        messages = [dict(message) for message in prompt]
        template = self.config.rollout.apply_chat_template_kwargs or {}
        return render(self.tokenizer, messages, template, WHO), tuple(messages)


def source_of(kind: Callable[..., Any], args: Args, config: RunConfig, tokenizer: Any, path: str) -> Source:
    """The source that a class, called with args, makes.

    Raises:
        DataError: it makes nothing that has get_samples.
    """
    with located(kind):
        inner = kind(args)
    if not callable(getattr(inner, "get_samples", None)):
        raise DataError("the data source has no get_samples", code="data-source-without-get-samples",
                        got=type(inner).__name__, who=f"{WHO} {path}",
                        fix="define get_samples(num_samples) -> list of groups of samples")
    return Source(inner, config, tokenizer, hashlib.sha256(path.encode()).hexdigest()[:16])
