"""Images of a conversation, in a prompt or in what a turn adds: a plugin shows them to the model, or nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from miles_core.errors import ConfigError
from miles_core.stages.rollout import Generation, Request, SamplingParams
from miles_core.types import IMAGES, Drop, Prompt, images_of


def shows(generation: Generation) -> bool:
    """Whether a plugin of the run shows images."""
    return hasattr(generation.hooks, "show_images")


def shown(prompt: Prompt, images: Sequence[object], generation: Generation) -> Prompt | Drop:
    """The prompt, or what a turn adds to it, with the tokens of its images; see the hook show_images.

    Raises:
        ConfigError: there are images, and no plugin of the run shows any.
    """
    if shows(generation):
        return cast("Prompt | Drop", generation.hooks.show_images(prompt, images))
    if images:
        raise ConfigError("a tool returned an image, which no plugin of the run shows to the model",
                          code="tool-image-unseen", who=f"{prompt.stream} row {prompt.row}",
                          fix="--plugin vision with a model that reads images, or let the tool return text")
    return prompt


def filled(messages: Sequence[dict[str, Any]], prompt: Prompt, generation: Generation) -> list[dict[str, Any]]:
    """A prompt's messages for a program outside of the run; see the hook fill_images."""
    fill = getattr(generation.hooks, "fill_images", None)
    return list(messages if fill is None else fill(messages, prompt))


def behind(prompt: Prompt, names: Sequence[str]) -> Prompt:
    """The prompt with further images behind its own."""
    if not names:
        return prompt
    return replace(prompt, metadata={**prompt.metadata, IMAGES: [*images_of(prompt), *names]})


def closed(drawn: int, request: Request, sampling: SamplingParams) -> bool:
    """Whether nothing may follow an answer that ends with this token.

    What a plugin lets an answer end with, beside the run's own, would stand for something in a prompt: an image.
    """
    return drawn in set(request.sampling.stop_token_ids) - set(sampling.stop_token_ids)
