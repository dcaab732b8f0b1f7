"""The loss of one micro-batch: the bound hooks' per-token terms, summed with the weights of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_core.config.tables import Algorithm, RunConfig
from miles_core.errors import NonFiniteError, TrainError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages import loss
from miles_core.stages.loss import LossInputs, PolicyLoss, TokenWeights
from miles_core.types import Sample
from miles_megatron.forward_backward import ColumnScatter
from miles_megatron.microbatch import MicroBatch
from miles_megatron.scored import Scored

Shares = dict[str, torch.Tensor]
"""Metric -> this micro-batch's share, float64: the shares of a step add up to the metric."""


class Objective:
    """The objective of one model's optimizer step.

    Args:
        policy_loss: of the actor's objective the run's own by default, with its terms and token weights; another
            model's loss stands alone.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, policy_loss: PolicyLoss | None = None):
        self.algorithm: Algorithm = config.algorithm
        self.entropy = self.algorithm.entropy_coef != 0 or self.algorithm.observe_training_entropy
        self.actor = policy_loss is None
        self._name = chosen(config, "policy_loss") if self.actor else getattr(policy_loss, "__name__", "loss")
        self._policy_loss = hooks.policy_loss[self._name] if self.actor else policy_loss
        self._terms = hooks.loss_terms if self.actor else None
        self._token_weights = hooks.token_weights if self.actor else None
        self.scores: ColumnScatter | None = None
        """Takes the log-probs of the step where no pass has filled their column."""
        self._unchecked: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[Sample]]] = []

    def __call__(self, scored: Scored, batch: MicroBatch, token_weights: torch.Tensor) -> tuple[torch.Tensor, Shares]:
        """The micro-batch's share of the step's loss and of its metrics.

        Args:
            token_weights: [N] of the run's reduction.

        Raises:
            TrainError: the policy loss is not one value per token, or has no gradient.
        """
        inputs = self._inputs(scored, batch)
        total, share = self._per_token(inputs)
        value = loss.reduce(total, token_weights, inputs.mask)
        self._unchecked.append((value.detach(), total.detach(), batch.sample, batch.offset, batch.samples))
        if not value.requires_grad:
            raise TrainError("the loss has no gradient", who=f"policy loss {self._name!r}",
                             fix="compute it from inputs.log_probs, without detach()", code="loss-without-gradient")
        if self.scores is not None:
            self.scores.put(batch, {"log_probs": inputs.log_probs})
        if self.actor:
            # The trainer before its first step, where it was asked: later steps would measure what was learnt as well.
            trainer = inputs.rows.get("log_probs", inputs.log_probs)
            share["train_rollout_logprob_abs_diff"] = (trainer - inputs.rollout_log_probs).abs()
        return value, {key: loss.reduce(term.detach().to(torch.float64), token_weights, inputs.mask)
                       for key, term in share.items()}

    def check_finite(self) -> None:
        """Look at the losses of the micro-batches since the last call; between two of them it would stop the device.

        Raises:
            NonFiniteError: names the first sample whose loss is not finite.
        """
        unchecked, self._unchecked = self._unchecked, []
        if unchecked and not bool(torch.stack([value for value, *_ in unchecked]).isfinite().all()):
            raise next(self._not_finite(*rows) for value, *rows in unchecked if not value.isfinite())

    def silent_at_zero(self) -> bool:
        """Whether tokens with advantage 0 add nothing to loss and gradient and no term is watched on them.

        Asked of the objective itself, with made-up tokens; one that cannot answer is not silent.
        """
        draw = torch.Generator().manual_seed(0)
        log_probs, old, rollout = (-torch.rand(3, 16, generator=draw, dtype=torch.float64) * 5).unbind()
        log_probs.requires_grad_(True)
        sample = torch.arange(16) // 4
        inputs = LossInputs(
            log_probs=log_probs, entropy=None, old_log_probs=old, rollout_log_probs=rollout, ref_log_probs=None,
            advantages=torch.zeros_like(old), mask=torch.ones_like(old), sample=sample,
            segment_sum=lambda values: values.new_zeros(4, *values.shape[1:]).index_add(0, sample, values),
            eps_clip=self.algorithm.eps_clip, eps_clip_high=self.algorithm.eps_clip_high,
            eps_clip_c=self.algorithm.eps_clip_c, rows={},
        )  # fmt: skip
        try:
            total, share = self._per_token(inputs)
            gradient = torch.autograd.grad(total.sum(), log_probs)[0] if total.requires_grad else torch.zeros(1)
        except Exception:  # noqa: BLE001 - it looks at more than was made up
            return False
        watched = self.entropy or self.algorithm.use_kl_loss or (self._terms and self._terms(inputs))
        return not (watched or total.any() or gradient.any())

    def _per_token(self, inputs: LossInputs) -> tuple[torch.Tensor, loss.Metrics]:
        """[N] of the whole objective, and metrics."""
        per_token, metrics = self._policy_loss(inputs)
        if per_token.shape != inputs.mask.shape:  # a scalar would be broadcast, and train on something else
            raise TrainError("the loss should have one value for each token", who=f"policy loss {self._name!r}",
                             got=f"shape {list(per_token.shape)}", code="loss-not-per-token",
                             fix=f"return shape {list(inputs.mask.shape)}; the core reduces")
        per_token, more = self._weighted(per_token, inputs)
        total, share = per_token, {**({"pg_loss": per_token} if self.actor else {}), **metrics, **more}
        for name, (coefficient, term) in (self._terms(inputs) if self._terms else {}).items():
            share[name] = term
            if coefficient:
                total = total + coefficient * term
        return total, {**share, "loss": total}

    def _weighted(self, per_token: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, loss.Metrics]:
        """The policy loss with the factors and the mask of the token_weights hooks."""
        if self._token_weights is None:
            return per_token, {}
        ones = torch.ones_like(per_token)
        weights = self._token_weights(TokenWeights(ones, ones > 0, {}), inputs)
        weighted = torch.where(weights.keep, per_token * weights.weight.detach(), torch.zeros_like(per_token))
        return weighted, weights.metrics

    def _inputs(self, scored: Scored, batch: MicroBatch) -> LossInputs:
        rows = batch.rows()
        values = entropy = None
        if scored.model.declared.head == "value":
            values = scored.values()
            log_probs = rows.get("log_probs", rows["rollout_log_probs"])
        else:
            log_probs, entropy = scored.with_entropy(self.entropy, self.entropy and self.algorithm.entropy_coef != 0)
        old = rows["rollout_log_probs"] if self.algorithm.use_rollout_logprobs else rows.get("log_probs")
        wide = values if values is not None else log_probs
        return LossInputs(
            log_probs=log_probs, entropy=entropy, old_log_probs=(log_probs.detach() if old is None else old).to(wide),
            rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=rows.get("ref_log_probs"),
            advantages=rows["advantages"].to(wide), mask=rows["loss_mask"].to(wide.dtype),
            sample=batch.sample, segment_sum=batch.segment_sum, eps_clip=self.algorithm.eps_clip,
            eps_clip_high=self.algorithm.eps_clip_high, eps_clip_c=self.algorithm.eps_clip_c, rows=rows,
            values=values, samples=batch.samples,
        )  # fmt: skip

    def _not_finite(self, total: torch.Tensor, sample_of: torch.Tensor, offset: torch.Tensor,
                    samples: Sequence[Sample]) -> NonFiniteError:
        row = int((~torch.isfinite(total)).nonzero()[0]) if not torch.isfinite(total).all() else 0
        sample = samples[int(sample_of[row])]
        return NonFiniteError(
            f"the loss of {sample.name} is not finite",
            got=f"{float(total.detach()[row])} at token {int(offset[row])} of its response",
            who=f"policy loss {self._name!r}",
            fix="look at the sample's log-probs and reward; the optimizer has not seen it, so the last checkpoint is "
            "good",
            code="loss-not-finite",
        )
