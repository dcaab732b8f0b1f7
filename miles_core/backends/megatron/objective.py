"""The loss of one micro-batch: the bound hooks' per-token terms, summed with the weights of the whole step."""

from __future__ import annotations

import torch

from miles_core.backends.megatron.logprob import token_log_probs
from miles_core.backends.megatron.microbatch import MicroBatch
from miles_core.config.tables import Algorithm, RunConfig
from miles_core.errors import NonFiniteError, TrainError
from miles_core.plugins.bind import Hooks
from miles_core.stages import loss
from miles_core.stages.loss import LossInputs


class Objective:
    """policy_loss + loss_terms of a run, reduced.

    Args:
        name: the policy loss chosen by the plan.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, name: str):
        self.algorithm: Algorithm = config.algorithm
        self.temperature = config.rollout.rollout_temperature or 1.0
        self.chunk = config.perf.log_probs_chunk_size
        self.entropy = self.algorithm.entropy_coef != 0 or self.algorithm.observe_training_entropy
        self._policy_loss, self._terms, self._name = hooks.policy_loss[name], hooks.loss_terms, name

    def log_probs(self, hidden: torch.Tensor, weight: torch.Tensor, batch: MicroBatch, *, entropy: bool = False):
        """[T, 1, H] hidden states -> log-probs [N] (and entropy [N] or None) of the trained rows."""
        return token_log_probs(
            hidden[:, 0].index_select(0, batch.index), weight, batch.row("targets", torch.int64),
            temperature=self.temperature, chunk_size=self.chunk, entropy=entropy,
            entropy_gradient=entropy and self.algorithm.entropy_coef != 0,
        )  # fmt: skip

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, batch: MicroBatch,
                 token_weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the step's loss and of its metrics.

        Args:
            token_weights: [N] of the run's reduction.

        Raises:
            NonFiniteError: names the first sample whose loss is not finite.
            TrainError: the policy loss is not one value per token, or has no gradient.
        """
        inputs = self._inputs(hidden, weight, batch)
        per_token, metrics = self._policy_loss(inputs)
        if per_token.shape != inputs.log_probs.shape:  # a scalar would be broadcast, and train on something else
            raise TrainError("the loss should have one value for each token", who=f"policy loss {self._name!r}",
                             got=f"shape {list(per_token.shape)}",
                             fix=f"return shape {list(inputs.log_probs.shape)}; the core reduces")
        total, share = per_token, {"pg_loss": per_token, **metrics}
        for name, (coefficient, term) in (self._terms(inputs) if self._terms else {}).items():
            share[name] = term
            if coefficient:
                total = total + coefficient * term
        value = loss.reduce(total, token_weights, inputs.mask)
        if not torch.isfinite(value):
            raise self._not_finite(total, batch)
        if not value.requires_grad:
            raise TrainError("the loss has no gradient", who=f"policy loss {self._name!r}",
                             fix="compute it from inputs.log_probs, without detach()")
        share["loss"] = total
        share["train_rollout_logprob_abs_diff"] = (inputs.log_probs - inputs.rollout_log_probs).abs()
        summed = {key: loss.reduce(term.detach().to(torch.float64), token_weights, inputs.mask)
                  for key, term in share.items()}
        return value, summed

    def _inputs(self, hidden: torch.Tensor, weight: torch.Tensor, batch: MicroBatch) -> LossInputs:
        log_probs, entropy = self.log_probs(hidden, weight, batch, entropy=self.entropy)
        rows = batch.rows()
        if self.algorithm.use_rollout_logprobs:
            old = rows["rollout_log_probs"]
        else:
            old = rows.get("log_probs", log_probs.detach())
        return LossInputs(
            log_probs=log_probs, entropy=entropy, old_log_probs=old.to(log_probs.dtype),
            rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=rows.get("ref_log_probs"),
            advantages=rows["advantages"].to(log_probs.dtype), mask=rows["loss_mask"].to(log_probs.dtype),
            sample=batch.sample, segment_sum=batch.segment_sum, eps_clip=self.algorithm.eps_clip,
            eps_clip_high=self.algorithm.eps_clip_high, eps_clip_c=self.algorithm.eps_clip_c, rows=rows,
        )  # fmt: skip

    def _not_finite(self, total: torch.Tensor, batch: MicroBatch) -> NonFiniteError:
        row = int((~torch.isfinite(total)).nonzero()[0]) if not torch.isfinite(total).all() else 0
        sample = batch.samples[int(batch.sample[row])]
        return NonFiniteError(
            f"the loss of {sample.name} is not finite", got=f"{float(total.detach()[row])} at its trained token {row}",
            who=f"policy loss {self._name!r}",
            fix="look at the sample's log-probs and reward; the optimizer has not seen it, so the last checkpoint is "
            "good",
        )
