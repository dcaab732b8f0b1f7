"""What a forward says about the trained rows of a micro-batch: log-probs, entropy, the likeliest tokens.

The head is the architecture's own code, so scales, caps and biases of logits are what they are in transformers. It gets
some rows at a time, and backward makes their logits again: those of a whole batch never exist.

On a GPU in 16 bits log-probs and gradients come from the logits by the kernels of Megatron's trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from miles_core.errors import HookError
from miles_fsdp.microbatch import MicroBatch


@dataclass(frozen=True, slots=True)
class Temperature:
    """Of the distribution, and how many rows' logits exist at once.

    Args:
        as_sampled: by a server's order of operations.
    """

    value: float
    chunk_size: int
    as_sampled: bool = False


class Scored:
    """See miles_core.stages.step.ScoredRows. Usable inside the module's forward only: there its head is whole.

    Args:
        hidden: [N, H] of the trained rows that are this rank's; what comes out is of all.
        head: [n, H] -> [n, V] logits.
        value_head: [1, H], of a model that has values and no logits.
    """

    def __init__(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], batch: MicroBatch,
                 temperature: Temperature, value_head: torch.Tensor | None = None):
        self.hidden, self.batch, self.value_head = hidden, batch, value_head
        self._head, self._temperature = head, temperature

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        return self.batch.rows()

    @property
    def has_values(self) -> bool:
        return self.value_head is not None

    def log_probs(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is None:
            return self.with_entropy()[0]
        with torch.no_grad():
            tokens = tokens[self.batch.mine]
            return self._whole(torch.cat([self._normalised(self._head(self.hidden[here])).gather(1, tokens[here])
                                          for here in self._chunks()]))

    def with_entropy(self, entropy: bool = False, gradient: bool = False,
                     ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log p [N] of the rows' targets and, if asked for, the entropy [N], which may have a gradient."""
        def scored(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._head(hidden)
            if by_kernels(logits):
                sampled = None
                if self._temperature.as_sampled:
                    sampled = self._normalised(logits.detach()).gather(1, targets[:, None])[:, 0]
                pair = cast("Any", LogProbs).apply(logits, targets, self._temperature.value, entropy, gradient, sampled)
                return cast("tuple[torch.Tensor, torch.Tensor]", pair)
            log_p = self._normalised(logits)
            wide = log_p if gradient else log_p.detach()
            spread = -torch.linalg.vecdot(wide.exp(), wide) if entropy else log_p.new_zeros(0)
            return log_p.gather(1, targets[:, None])[:, 0], spread

        parts, targets = [], self.batch.targets[self.batch.mine]
        for here in self._chunks():
            pair = self.hidden[here], targets[here]
            parts.append(checkpoint(scored, *pair, use_reentrant=False, preserve_rng_state=False)
                         if torch.is_grad_enabled() else scored(*pair))
        log_probs, spread = (torch.cat(each) for each in zip(*parts, strict=True))
        return self._whole(log_probs), self._whole(spread) if entropy else None

    @torch.no_grad()
    def top_k(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        best = [self._normalised(self._head(self.hidden[here])).topk(k, 1) for here in self._chunks()]
        indices, values = (torch.cat(each) for each in zip(*((one.indices, one.values) for one in best), strict=True))
        return self._whole(indices), self._whole(values)

    def values(self) -> torch.Tensor:
        """
        Raises:
            HookError: the model has none.
        """
        if self.value_head is None:
            raise HookError("the model has no values", code="fsdp-without-values", who="--trainer fsdp",
                            fix='declare it with head="value"')
        return self._whole((self.hidden.float() @ self.value_head.float().t())[:, 0])

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        return self.batch.context.whole(own, self.batch.counts)

    def _normalised(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V] log-probs in float32, which logits in 16 bits become without a copy in float32 of their own."""
        temperature = self._temperature.value
        if self._temperature.as_sampled:  # a number of the host's would become a factor
            divisor = torch.full((1,), temperature, device=logits.device)
            return torch.log_softmax(logits.float() / divisor, 1)
        if temperature != 1:
            logits = logits.float() / temperature
        return torch.log_softmax(logits, 1, dtype=torch.float32)

    def _chunks(self) -> Iterator[slice]:
        """At least one, so that a micro-batch without trained rows has a gradient of zero."""
        rows, size = max(1, len(self.hidden)), self._temperature.chunk_size
        size = size if size > 0 else rows
        return (slice(begin, begin + size) for begin in range(0, rows, size))


def by_kernels(logits: torch.Tensor) -> bool:
    """Whether log-probs come from logits by Triton's kernels."""
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16) and find_spec("triton") is not None


class LogProbs(torch.autograd.Function):
    """(log-probs [n], entropy [n] or [0]) of targets [n], from logits [n, V].

    Log-probs [n] as a server has `sampled` by are the result where there are any; their gradient is the kernels' own.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool,
                gradient: bool, sampled: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        from miles_local.logits import score

        log_probs, spread, normaliser = score(logits, targets, temperature, entropy)
        wide = log_probs.new_empty(0) if spread is None else spread
        ctx.save_for_backward(logits, targets, normaliser, wide)
        ctx.temperature, ctx.gradient = temperature, entropy and gradient
        if not ctx.gradient:
            ctx.mark_non_differentiable(wide)
        return log_probs if sampled is None else sampled.clone(), wide

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from miles_local.logits import differentiate

        logits, targets, normaliser, wide = ctx.saved_tensors
        of_entropy = gradients[1] if ctx.gradient else None  # the head may have kept its result: a copy is written over
        made = differentiate(logits.clone(), targets, normaliser, wide, gradients[0], of_entropy, ctx.temperature)
        return made, None, None, None, None, None
