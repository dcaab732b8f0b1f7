"""Models beside the actor: the reference, a critic, a teacher. Declared by the hook `models`, held by the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the trainer holds beside the actor.

    One of the actor's architecture that does not train is kept as host copies and swapped into the actor's place for
    its passes; any other is built beside it.

    Args:
        source: where its first weights come from: a Hugging Face directory or a checkpoint.
        head: "policy" scores tokens; "value" has a head of one number per position, random where the source has none.
        trainable: it has an optimizer, and checkpoints hold both.
        optimizer: keys of [optimizer] that differ from the actor's.
    """

    source: str
    head: Literal["policy", "value"] = "policy"
    trainable: bool = False
    optimizer: Mapping[str, object] = field(default_factory=dict)
