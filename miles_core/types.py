"""What flows through the loop: Prompt -> Sample -> Group -> Batch.

Per-token and per-sample data live in columns (columns.py), the core's own tokens, mask, log-probs and versions
included, so that a plugin's data takes exactly the path that the core's takes. No torch and no numpy at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from miles_core.waits import Bound

LARGEST_REWARD = 3.4028234663852886e38
"""float32's largest: rewards beyond it have no standard deviation and no gradient."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in --save, or --load, that names the last checkpoint; written last, so what it names is complete."""

IMAGES = "image_files"
"""In the metadata of prompts and samples: names of files in the run's folder of images, the SHA-256 of each."""

LOCK = ".lock"
"""The file in --save that the run which saves there holds."""


class Status(StrEnum):
    """How a sample ended. Only COMPLETED and TRUNCATED samples may be trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        """Whether it is an answer."""
        return self in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, rendered and tokenised.

    Args:
        uid: ordinal in the endless stream of prompts (epoch x rows + position in the epoch's order).
        row: line of the dataset it comes from, counted from 0.
        text: the rendered text that the token ids stand for.
        token_ids: what the engine is given; never tokenised again later.
        label, raw_label: ground truth for scorers as text, of a list or object its JSON; and itself if it is no text.
        metadata: whatever else the dataset's row carries; scorers and generators may read it.
        messages: the conversation before rendering, where the dataset holds one.
        stream: "train", or the name of an eval dataset.
    """

    uid: int
    row: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None
    stream: str = "train"
    raw_label: Any = None


@dataclass(slots=True)
class Sample:
    """One answer to a prompt.

    Args:
        prompt: what was asked.
        index: position in its group, from 0.
        columns: name -> array; "tokens" (prompt + response) is always there. See columns.py for alignments.
        response_length: number of response tokens R, those that a tool wrote included.
        text: the decoded response, with the token that ended it unless --rollout-skip-special-tokens is on.
        rewards: score by scorer name.
        reward: the combined score, None until the reward stage.
        rollout: samples that one execution produced share this number and count as one rollout in denominators;
            by default a sample is its own rollout.
    """

    prompt: Prompt
    index: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    response_length: int = 0
    text: str = ""
    status: Status = Status.PENDING
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    rollout: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        """[T] int32: prompt and response."""
        return self.columns["tokens"]

    @property
    def length(self) -> int:
        """T, the number of tokens of prompt and response."""
        return len(self.columns["tokens"])

    @property
    def name(self) -> str:
        """How messages refer to this sample."""
        return f"{self.prompt.stream} prompt {self.prompt.uid} (row {self.prompt.row}), sample {self.index}"


def images_of(*owners: Prompt | Sample) -> list[str]:
    """Names of their images: a prompt's, then those of later turns, of its sample. A row's own column has none."""
    fields = (one.metadata.get(IMAGES) for one in owners)
    return [name for names in fields if isinstance(names, list | tuple) for name in names if len(str(name)) == 64]


@dataclass(slots=True)
class Group:
    """All answers to one prompt, sampled together; the unit of filters, of the buffer and of group advantages."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def oldest_version(self) -> int:
        """The smallest weight version that any response token of the group was sampled from."""
        return min(int(s.columns["versions"].min()) for s in self.samples if s.response_length)


def rollout_keys(group: Group) -> list[tuple[str, int]]:
    """Which rollout each sample belongs to: a number that it shares with its siblings, or its own position. Siblings
    whose rewards differ, such as several agents, are compared each by itself."""
    rewards: dict[int | None, set[float | None]] = {}
    for sample in group.samples:
        rewards.setdefault(sample.rollout, set()).add(sample.reward)
    return [("rollout", s.rollout) if s.rollout is not None and len(rewards[s.rollout]) == 1 else ("own", i)
            for i, s in enumerate(group.samples)]


@dataclass(slots=True)
class CancelHandle:
    """Cancels one group: knows its requests to the engine.

    Args:
        cancelled: no further request may begin; those in flight were told to end.
        ids: of the requests in flight.
        idle: limits the time without a request.
    """

    cancelled: bool = False
    ids: set[str] = field(default_factory=set)
    idle: Bound | None = None

    def begins(self, id: str) -> None:
        """A request is under way."""
        self.ids.add(id)
        self._bound(None)

    def ends(self, id: str, patience: float) -> None:
        """It is no more; after the last one the group has so many seconds to end or to begin another."""
        self.ids.discard(id)
        if not self.ids:
            self._bound(patience)

    def _bound(self, seconds: float | None) -> None:
        import asyncio  # only now: a plan has no loop, and asyncio costs a tenth of its time

        if self.idle is not None and not self.idle.expired():
            self.idle.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that shall not be trained on, and why.

    Args:
        reason: a word that is counted, such as "reward_std_zero".
        detail: what a person wants to know when nothing but drops is left.
        kind: a finer word that is counted beside the reason, such as "all_right".
    """

    reason: str
    detail: str = ""
    kind: str = ""


@dataclass(slots=True)
class Batch:
    """The groups of one rollout, in the order in which they were started.

    Args:
        rollout_id: 0-based index of the rollout.
        version: weight version that the engine has while this batch is trained on.
    """

    rollout_id: int
    groups: list[Group]
    version: int = 0

    @property
    def samples(self) -> list[Sample]:
        """All samples, group after group."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """Where one node's share of an engine server runs.

    Args:
        engine: which engine, from 0.
        node: index of the node among those of this engine; node 0 answers requests.
        nodes: nodes that this engine spans.
        host: address of the machine, as the others reach it.
        gpus: CUDA device numbers on that machine, in tensor-parallel order; empty on a CPU.
    """

    engine: int = 0
    node: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of a trainer's processes this is.

    Args:
        index: 0 .. size-1.
        size: processes in all.
        local: index among those of its node, which is also the GPU to use.
        rendezvous: where the processes find each other, file://PATH, tcp://HOST:PORT, or env:// for torchrun's; None
            for one process.
        gpu: whether the placement counts on a GPU for it; otherwise it computes on the CPU where it sees none.
    """

    index: int = 0
    size: int = 1
    local: int = 0
    rendezvous: str | None = None
    gpu: bool = False
