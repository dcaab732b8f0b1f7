"""A conversation as token ids that are only ever appended to.

    prompt | drawn | suffix | drawn | suffix | drawn
    -      | 1     | 0      | 1     | 0      | 1        loss_mask

What the engine drew stays as it was drawn and is never tokenised again; a suffix is text that the model did not write,
such as a tool's answer in the chat template's form. The ids of one turn's request are therefore how those of the next
one begin, and each log-prob and version stays beside the token it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_core.errors import EngineError
from miles_core.stages.rollout import Response
from miles_core.types import IMAGES, Prompt, Sample, Status, images_of


@dataclass(slots=True)
class Transcript:
    """The ids of one conversation, and for those after the prompt who wrote them.

    Args:
        ids: prompt and everything after it.
        prompt_length: how many of the ids are the prompt's.
        mask: [R] 1 for what the engine drew.
        log_probs: [R] of each drawn token; 0 for a suffix.
        versions: [R] weight version of each drawn token; a suffix has that of the token before it.
        figures: sums of the numbers that engine calls reported, and how many reported each.
        begun_mask: loss mask of what was there when it was called back, which need not say who wrote it any more.
        images: beside the row's: how many ids after the prompt came before, and a name in the run's folder of images.
    """

    ids: list[int]
    prompt_length: int
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    images: list[tuple[int, str]] = field(default_factory=list)
    begun_mask: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, prompt_ids: Sequence[int], images: Sequence[str] = ()) -> Transcript:
        """A conversation of which nothing but the prompt is there, and names of images that its row does not have."""
        return cls(list(prompt_ids), len(prompt_ids), images=[(0, name) for name in images])

    @classmethod
    def resume(cls, begun: Sample) -> Transcript:
        """A conversation that was called back, with all that it had."""
        columns = begun.columns
        mask, log_probs, versions = (columns[name].tolist() for name in ("loss_mask", "rollout_log_probs", "versions"))
        return cls(begun.tokens.tolist(), begun.length - begun.response_length,
                   begun.metadata["begun"].get("mask", mask), log_probs, versions,
                   images=[(0, name) for name in images_of(begun)], begun_mask=mask)

    def until(self, length: int) -> Transcript:
        """A copy that ends after so many ids, with the images among them and none of the figures."""
        behind = length - self.prompt_length
        return Transcript(self.ids[:length], self.prompt_length, self.mask[:behind], self.log_probs[:behind],
                          self.versions[:behind], images=[one for one in self.images if one[0] < behind])

    @property
    def last_turn(self) -> list[int]:
        """The drawn ids after the last suffix."""
        drawn = next((i for i, mask in enumerate(reversed(self.mask)) if not mask), len(self.mask))
        return self.ids[len(self.ids) - drawn:]

    @property
    def response_length(self) -> int:
        """R, the ids after the prompt, whoever wrote them."""
        return len(self.mask)

    @property
    def drawn(self) -> int:
        """How many ids the engine drew."""
        return sum(self.mask)

    def append_drawn(self, response: Response) -> None:
        """What an engine answered to exactly the ids so far."""
        self.ids += [int(token) for token in response.output_ids]
        self.mask += [1] * len(response.output_ids)
        self.log_probs += [float(value) for value in response.log_probs]
        self.versions += [int(version) for version in response.versions]
        for name, value in response.figures.items():
            self.figures.setdefault(name, []).append(float(value))

    def append_suffix(self, ids: Sequence[int], images: Sequence[str] = ()) -> None:
        """Text that the model did not write, after a drawn turn, and names of the images that some of the ids are.

        Raises:
            EngineError: nothing was drawn yet, so the ids would belong to the prompt.
        """
        if not self.versions:
            raise EngineError("the engine drew nothing for a tool to answer", code="engine-drew-no-tool-call",
                              fix="begin with the longer prompt")
        self.images += [(len(self.mask), name) for name in images]
        self.ids += [int(token) for token in ids]
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def to_sample(self, prompt: Prompt, index: int, *, status: Status, text: str) -> Sample:
        """The sample of this conversation; what follows the last drawn token is left out, unless it is to go on.

        Its columns are the core's: tokens [T] int32, loss_mask [R] uint8, rollout_log_probs [R] float32, versions [R]
        int32. `metadata["figures"]` holds the means of what the engine calls reported, and "image_files" the names of
        images in suffixes, where there are any.
        """
        ends = status is not Status.ABORTED and self.drawn
        length = len(self.mask) - self.mask[::-1].index(1) if ends else len(self.mask)
        loss_mask = [*self.begun_mask, *self.mask[len(self.begun_mask):]]
        images = [name for place, name in self.images if place < length]
        return Sample(
            prompt=prompt,
            index=index,
            response_length=length,
            text=text,
            status=status,
            metadata={"figures": {name: sum(values) / len(values) for name, values in self.figures.items()},
                      **({IMAGES: images} if images else {})},
            columns={
                "tokens": np.array(self.ids[: self.prompt_length + length], np.int32),
                "loss_mask": np.array(loss_mask[:length], np.uint8),
                "rollout_log_probs": np.array(self.log_probs[:length], np.float32),
                "versions": np.array(self.versions[:length], np.int32),
            },
        )
