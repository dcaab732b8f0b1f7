"""What a forward says about the trained rows of a micro-batch: log-probs, entropy, values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_core.config.tables import RunConfig
from miles_core.errors import HookError
from miles_megatron import cpu, logprob
from miles_megatron.microbatch import MicroBatch
from miles_megatron.model_on_rank import ModelOnRank

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after install()


@dataclass(frozen=True, slots=True)
class Temperature:
    """How log-probs are made: the distribution's temperature, how many rows' logits exist at once, whether bf16 logits
    are rounded."""

    value: float
    chunk_size: int | None
    rounded: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Temperature:
        return cls(config.rollout.rollout_temperature or 1.0, config.perf.log_probs_chunk_size,
                   not config.algorithm.fp32_lm_head)


class Scored:
    """See stages.step.ScoredRows. On the last pipeline stage only; each tensor-parallel rank has the same rows.

    Args:
        hidden: [T, 1, H], under sequence parallelism [T / tensor, 1, H].
    """

    def __init__(self, model: ModelOnRank, hidden: torch.Tensor, batch: MicroBatch, temperature: Temperature):
        self.model, self.batch, self.temperature = model, batch, temperature
        self._hidden = _whole(hidden, model)[:, 0].index_select(0, batch.index)

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        return self.batch.rows()

    @property
    def has_values(self) -> bool:
        return self.model.declared.head == "value"

    def log_probs(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is None:
            return self.with_entropy()[0]
        return logprob.log_probs_at(self._hidden, self._policy_head(), tokens, **self._how())

    def with_entropy(self, entropy: bool = False, gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log p [N] of the rows' targets and, if asked for, the entropy [N]."""
        return logprob.token_log_probs(
            self._hidden, self._policy_head(), self.batch.row("targets", torch.int64), entropy=entropy,
            entropy_gradient=gradient, gradients=self.model.head_gradients, **self._how(),
        )  # fmt: skip

    def top_k(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return logprob.top_log_probs(self._hidden, self._policy_head(), k, **self._how())

    def values(self) -> torch.Tensor:
        if not self.has_values:
            raise HookError(f"the model {self.model.name!r} has no values", code="model-without-values",
                            fix='declare it with head="value"')
        return (self._hidden.float() @ self.model.head.float().t())[:, 0]

    def _policy_head(self) -> torch.Tensor:
        if self.model.declared.head != "policy":
            raise HookError(f"the model {self.model.name!r} has no log-probs", code="model-without-log-probs",
                            fix="read values() of it")
        return self.model.head

    def _how(self) -> dict[str, object]:
        group = parallel_state.get_tensor_model_parallel_group()
        return {"temperature": self.temperature.value, "softcap": self.model.spec.logit_softcap,
                "chunk_size": self.temperature.chunk_size, "group": group,
                "rounded": self.temperature.rounded}  # fmt: skip


def _whole(hidden: torch.Tensor, model: ModelOnRank) -> torch.Tensor:
    """All of this rank's rows, from the part that sequence parallelism leaves it.

    Backward, an output layer whose vocabulary is cut gives each rank a share of the gradient, to be summed; a value
    head, which every rank holds whole, gives all of it to each.
    """
    if model.settings.tensor_model_parallel_size == 1:
        return hidden
    shares = model.declared.head == "policy"
    if model.settings.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=shares)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden) if shares else hidden
