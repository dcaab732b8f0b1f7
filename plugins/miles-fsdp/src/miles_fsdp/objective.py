"""The loss of a micro-batch: the bound hooks' terms for each token, summed with the weights of the whole step."""

from __future__ import annotations

import torch

from miles_core.config.tables import RunConfig
from miles_core.errors import NonFiniteError, TrainError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages.loss import LossInputs, Metrics, PolicyLoss, TokenWeights, reduce
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.scored import Scored

Shares = dict[str, torch.Tensor]
"""Metric -> this micro-batch's share, float64: the shares of a step add up to the metric."""


class Objective:
    """What an optimizer step makes smaller.

    Args:
        policy_loss: stands alone where it is given; by default the run's, with its terms and token weights.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, policy_loss: PolicyLoss | None = None):
        self._algorithm, self._whole = config.algorithm, (whole := policy_loss is None)
        self._name = chosen(config, "policy_loss") if whole else getattr(policy_loss, "__name__", "loss")
        self._policy_loss: PolicyLoss = policy_loss or hooks.policy_loss[self._name]
        self._terms = hooks.loss_terms if whole else None
        self._token_weights = hooks.token_weights if whole else None
        self._unchecked: list[tuple[torch.Tensor, torch.Tensor, MicroBatch]] = []
        self._entropy = self._algorithm.entropy_coef != 0 or self._algorithm.observe_training_entropy

    def __call__(self, scored: Scored, token_weights: torch.Tensor) -> tuple[torch.Tensor, Shares, torch.Tensor]:
        """The micro-batch's share of the step's loss, of its metrics, and the log-probs [N] without gradient.

        Args:
            token_weights: [N] of the run's reduction.

        Raises:
            TrainError: the policy loss is not one value for each token, or has no gradient.
        """
        inputs = self._inputs(scored)
        total, share = self._per_token(inputs)
        loss = reduce(total, token_weights, inputs.mask)
        if not loss.requires_grad:
            raise TrainError("the loss has no gradient", who=f"policy loss {self._name!r}",
                             fix="compute it from inputs.log_probs, without detach()", code="fsdp-loss-no-gradient")
        self._unchecked.append((loss.detach(), total.detach(), scored.batch))
        if self._whole:
            # The trainer before its first step, where it was asked: later steps would measure what was learnt as well.
            ours = inputs.rows.get("log_probs", inputs.log_probs)
            share["train_rollout_logprob_abs_diff"] = (ours - inputs.rollout_log_probs).abs()
        shares = {name: reduce(values.detach().double(), token_weights, inputs.mask) for name, values in share.items()}
        return loss, shares, inputs.log_probs.detach()

    def check_finite(self) -> None:
        """Look at the losses of the micro-batches since the last call; between two of them it would stop the device.

        Raises:
            NonFiniteError: names the first sample whose loss is not finite.
        """
        unchecked, self._unchecked = self._unchecked, []
        if unchecked and not all(torch.stack([loss for loss, *_ in unchecked]).isfinite().tolist()):
            raise next(self._not_finite(total, batch) for loss, total, batch in unchecked if not loss.isfinite())

    def _per_token(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """[N] of the whole objective, and metrics."""
        total, metrics = self._policy_loss(inputs)
        if total.shape != inputs.mask.shape:  # a scalar would be broadcast, and train on something else
            raise TrainError("the loss should have one value for each token", who=f"policy loss {self._name!r}",
                             got=f"shape {list(total.shape)}", code="fsdp-loss-shape",
                             fix=f"return shape {list(inputs.mask.shape)}; the core reduces")
        if self._token_weights is not None:
            ones = torch.ones_like(total)
            weights = self._token_weights(TokenWeights(ones, ones > 0, {}), inputs)
            total = torch.where(weights.keep, total * weights.weight.detach(), torch.zeros_like(total))
            metrics = {**metrics, **weights.metrics}
        metrics = {"pg_loss": total, **metrics} if self._whole else dict(metrics)
        for name, (coefficient, term) in (self._terms(inputs) if self._terms else {}).items():
            metrics[name] = term
            total = total + coefficient * term if coefficient else total
        return total, {**metrics, "loss": total}

    def _inputs(self, scored: Scored) -> LossInputs:
        algorithm, rows, batch = self._algorithm, scored.rows, scored.batch
        values = entropy = None
        if scored.value_head is None:
            log_probs, entropy = scored.with_entropy(self._entropy, algorithm.entropy_coef != 0)
        else:
            values, log_probs = scored.values(), rows.get("log_probs", rows["rollout_log_probs"])
        old = rows["rollout_log_probs"] if algorithm.use_rollout_logprobs else rows.get("log_probs")
        return LossInputs(
            log_probs=log_probs, entropy=entropy, old_log_probs=log_probs.detach() if old is None else old,
            rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=rows.get("ref_log_probs"),
            advantages=rows["advantages"], mask=rows["loss_mask"].float(), sample=batch.sample,
            segment_sum=batch.segment_sum, eps_clip=algorithm.eps_clip, eps_clip_high=algorithm.eps_clip_high,
            eps_clip_c=algorithm.eps_clip_c, rows=rows, values=values,
            samples=batch.samples)

    def _not_finite(self, total: torch.Tensor, batch: MicroBatch) -> NonFiniteError:
        odd = (~torch.isfinite(total)).nonzero()
        row = int(odd[0]) if len(odd) else 0
        sample = batch.samples[int(batch.sample[row])]
        return NonFiniteError(
            f"the loss of {sample.name} is not finite", code="fsdp-loss-not-finite",
            got=f"{float(total[row])} at token {int(batch.offset[row])} of its response",
            who=f"policy loss {self._name!r}", fix="look at the sample's log-probs and reward; the optimizer has not "
            "seen it, so the last checkpoint is good")
