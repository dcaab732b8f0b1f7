"""The hook that shows images of later turns, beside those of the trainer fsdp, which a plan without it knows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_fsdp.hookspecs import forward_inputs as forward_inputs

from miles_core.hookspecs import hookspec

if TYPE_CHECKING:
    from miles_core.types import Drop, Prompt


@hookspec("chain", role="rollout", per="turn")
def show_images(prompt: Prompt, images: Sequence[object]) -> Prompt | Drop:
    """2: a generator's question: the token ids of `prompt.text`, which a template has rendered anew: the whole prompt,
    or what a turn adds. It shows the images that `prompt.metadata["image_files"]` names and then `images`, files'
    bytes or base64, each where the template has written the model's token for it. The answer's metadata names all."""


@hookspec("chain", role="rollout", per="sample")
def fill_images(messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    """2: a prompt's messages for a program outside of the run: parts of type "image" are OpenAI's, with the files."""
