"""Loss masks of conversations, as Miles's rollout functions for demonstrations ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Tokens from the first that is trained on to the end."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokens of a conversation, and a mask of those that the assistant wrote.

    Args:
        tokenizer_type: qwen, qwen3, qwen3_5 or distill_qwen, of plugin sft's --loss-mask-type.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen"):
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Tokens from the first that is trained on to the end."""
        return get_response_lengths(loss_masks)

    def get_loss_mask(self, messages: Sequence[Mapping[str, object]],
                      tools: object = None) -> tuple[list[int], list[int]]:
        """(token ids, mask) of a conversation that ends with an answer.

        Raises:
            DataError: a chat template that rewrites earlier turns, or refuses the messages.
        """
        from miles_sft.conversation import encode

        kind = self.tokenizer_type
        found = encode(self.tokenizer, messages, {"tools": tools} if tools else {}, "MultiTurnLossMaskGenerator",
                       last_only=kind == "distill_qwen", alone=kind == "qwen3", shown=kind == "qwen3_5")
        return found.ids, found.mask

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The texts that are trained on."""
        runs: list[list[int]] = []
        before = 0
        for token, kept in zip(token_ids, loss_masks, strict=True):
            if kept and not before:
                runs.append([])
            if kept:
                runs[-1].append(token)
            before = kept
        return [self.tokenizer.decode(run) for run in runs]
