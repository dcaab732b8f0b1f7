"""Data sources of Miles: groups of samples that nothing was drawn for, from the run's own prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_compat.sample import Sample, asked
from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.config import RunConfig
    from miles_core.stages.prompts import PromptSource
    from miles_core.types import Prompt


class DataSource:
    """Base class of data sources; a run asks for get_samples(num_samples) alone."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups."""
        raise NotImplementedError

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""
        raise NotImplementedError

    def save(self, rollout_id: int) -> None:
        """Nothing: the run's checkpoint says how far its prompts are."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing, likewise."""

    def get_buffer_length(self) -> int | None:
        """Groups that were taken back."""
        return None


class RolloutDataSource(DataSource):
    """The prompts of --prompt-data, a group of samples for each.

    Args:
        prompts: where they come from; else they are read anew.
    """

    def __init__(self, args: Args, prompts: PromptSource | None = None):
        self.args = args
        self.metadata: dict[str, Any] = {}
        self.prompts = prompts_of(args) if prompts is None else prompts
        self.of_uid: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self.prompts)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups, of the prompts that come next."""
        groups, siblings = [], self.args.n_samples_per_prompt
        for _ in range(num_samples):
            prompt = self.prompts.next()
            if prompt.token_ids:
                self.of_uid[prompt.uid] = prompt
            groups.append([self._sample(prompt, index, siblings) for index in range(siblings)])
        return groups

    def _sample(self, prompt: Prompt, index: int, siblings: int) -> Sample:
        sample = asked(prompt, index, siblings)
        if prompt.messages is not None and not self.args.apply_chat_template:
            sample.prompt = [dict(message) for message in prompt.messages]
        return sample

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """
        Raises:
            RuntimeError: it has no buffer.
        """
        raise RuntimeError(f"{type(self).__name__} takes nothing back; RolloutDataSourceWithBuffer does")


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same; groups that were taken back come first."""

    def __init__(self, args: Args, prompts: PromptSource | None = None):
        from miles_compat.loading import load_function

        super().__init__(args, prompts)
        self.buffer: list[list[Sample]] = []
        self.buffer_filter: Callable[..., Any] = load_function(args.buffer_filter_path) or pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups: of the buffer, then new ones."""
        found: list[list[Sample]] = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        return [*found, *super().get_samples(num_samples - len(found))]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""
        self.buffer.extend(samples)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Note something."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What was noted."""
        return self.metadata

    def get_buffer_length(self) -> int | None:
        """Groups that were taken back."""
        return len(self.buffer)


def pop_first(args: object, rollout_id: int | None, buffer: list[list[Sample]],
              num_samples: int) -> list[list[Sample]]:
    """The oldest groups of a buffer, out of it."""
    found = buffer[:num_samples]
    del buffer[:num_samples]
    return found


@dataclass
class NoPrompts:
    """What a data source numbers its samples by where a rollout function has the prompts, and the run has none."""

    data: str = ""
    _next: int = 0

    def __len__(self) -> int:
        raise ConfigError("passes over the prompts cannot be counted without a dataset", fix="write --num-rollout",
                          who="--num-epoch, --disable-rollout-global-dataset", code="num-epoch-without-dataset")

    def next(self) -> Prompt:
        """A number without a prompt."""
        from miles_core.types import Prompt

        self._next += 1
        return Prompt(self._next - 1, self._next - 1, "", ())

    def give_back(self, prompts: list[Prompt]) -> None:
        """Nothing: there is no prompt that should come again."""

    def state_dict(self) -> dict[str, Any]:
        """The next number."""
        return {"next": self._next, "again": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self._next = state["next"]


def prompts_of(args: Args) -> PromptSource:
    """The run's prompts, as its own source gives them; none with --disable-rollout-global-dataset."""
    if not args.rollout_global_dataset:
        return NoPrompts()
    from miles_core.stages.defaults import Core

    config: RunConfig = args._config
    return Core(config).prompt_source(config, args.tokenizer, args._made["read"])
