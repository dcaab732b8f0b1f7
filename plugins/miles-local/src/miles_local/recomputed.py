"""Decoding without keys and values: what the cache keeps of a row are its tokens, and a step computes them all again.

For architectures whose past transformers keeps in a cache of their own kind: compressed keys, keys of an indexer,
layers with keys and a state. Padding lies to the right, where nothing before it looks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from miles_local.cache import Cache, Prefill
from miles_local.routing import chosen_experts, stacked

TOKENS = 4096
"""Padded tokens that one forward computes, unless a single sequence is longer."""


class Recomputing:
    """A prefill and a step that give a module whole sequences; see ModuleDecoder for the arguments."""

    device: torch.device
    shape: Any

    def _first(self, weights: PreTrainedModel, sequences: list[tuple[int, ...]], trace: bool) -> Prefill:
        last = torch.tensor([len(ids) - 1 for ids in sequences])
        tokens = torch.zeros(len(sequences), int(last.max()) + 1, dtype=torch.int64)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
        tokens = tokens.to(self.device)
        logits, routing = self._whole_rows(weights, tokens, last, trace)
        return Prefill(logits, k=[tokens[:, None, :, None]], routing=routing)

    def _again(self, weights: PreTrainedModel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor,
               trace: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = torch.arange(len(tokens))
        known = cache.k[0][: len(tokens), 0, :, 0]
        known[rows, positions] = tokens.to(self.device)
        logits, routing = self._whole_rows(weights, known[:, : int(positions.max()) + 1], positions, trace)
        return logits, None if routing is None else routing[rows, positions]

    def _whole_rows(self, weights: PreTrainedModel, tokens: torch.Tensor, last: torch.Tensor,
                    trace: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [R, V] float32 after the tokens at `last` [R] of tokens [R, W], and with `trace` routes of all."""
        many = max(1, TOKENS // tokens.shape[1])
        logits, routes = [], []
        for rows, ends in zip(tokens.split(many), last.split(many), strict=True):
            def only(_head: Any, given: tuple[torch.Tensor], ends: torch.Tensor = ends) -> torch.Tensor:
                return given[0][torch.arange(len(ends)), ends][:, None]

            handle = weights.get_output_embeddings().register_forward_pre_hook(only)
            try:
                with chosen_experts(weights, trace) as experts:
                    logits.append(weights(input_ids=rows, use_cache=False).logits[:, -1].float())
            finally:
                handle.remove()
            if trace:
                routes.append(stacked(experts, rows.numel(), self.shape).view(*rows.shape, self.shape.layers, -1))
        return torch.cat(logits), torch.cat(routes) if trace else None
