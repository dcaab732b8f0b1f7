"""The loss of one micro-batch, in every trainer: the bound hooks' per-token terms, summed with the weights of the whole
step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from miles_core.columns import read_only
from miles_core.config.tables import Perf, RunConfig
from miles_core.errors import NonFiniteError, TrainError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages.loss import LossInputs, Metrics, PolicyLoss, TokenWeights, reduce
from miles_core.stages.step import ScoredRows, TrainerAccess
from miles_core.types import Sample, Status

logger = logging.getLogger(__name__)

Shares = dict[str, torch.Tensor]
"""Metric -> this micro-batch's share, float64: the shares of a step add up to the metric."""


class TrainedRows(Protocol):
    """The N rows of a micro-batch that are trained on.

    Args:
        sample: [N] int64, which of `samples` each belongs to.
        offset: [N] which token of its response each predicts.
    """

    samples: Sequence[Sample]
    sample: torch.Tensor
    offset: Any

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [samples, ...]: sums over the rows of each sample."""


class Forward(ScoredRows, Protocol):
    """What a trainer's forward says with gradient.

    Args:
        has_values: the model has a value head, and no log-probs of its own.
    """

    batch: TrainedRows
    has_values: bool

    def with_entropy(self, entropy: bool, gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log p [N] of the rows' targets and, if asked for, the entropy [N], which may have a gradient."""


class Objective:
    """The objective of one model's optimizer step.

    Args:
        policy_loss: of the actor's objective the run's own by default, with its terms and token weights; another
            model's loss stands alone.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, policy_loss: PolicyLoss | None = None):
        self.actor = policy_loss is None
        self.algorithm = config.algorithm
        self._entropy = self.algorithm.entropy_coef != 0 or self.algorithm.observe_training_entropy
        self._name = chosen(config, "policy_loss") if self.actor else getattr(policy_loss, "__name__", "loss")
        self._policy_loss: PolicyLoss = policy_loss or hooks.policy_loss[self._name]
        self._terms = hooks.loss_terms if self.actor else None
        self._token_weights = hooks.token_weights if self.actor else None
        self._unchecked: list[tuple[torch.Tensor, torch.Tensor, TrainedRows]] = []

    def __call__(self, scored: Forward, token_weights: torch.Tensor) -> tuple[torch.Tensor, Shares, torch.Tensor]:
        """The micro-batch's share of the step's loss, of its metrics, and the log-probs [N] without gradient.

        Args:
            token_weights: [N] of the run's reduction.

        Raises:
            TrainError: the policy loss, a term or a metric is not one value for each token, or nothing has a gradient.
        """
        inputs = self._inputs(scored)
        total, share = self._per_token(inputs)
        loss = reduce(total, token_weights, inputs.mask)
        if not loss.requires_grad:
            raise TrainError("the loss has no gradient", who=f"policy loss {self._name!r}",
                             fix="compute it from inputs.log_probs, without detach()", code="loss-without-gradient")
        self._unchecked.append((loss.detach(), total.detach(), scored.batch))
        if self.actor and any(one.columns["rollout_log_probs"].any() for one in scored.batch.samples):  # else not drawn
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

    def leaves_out(self, asked: bool, *, elsewhere: bool = False) -> bool:
        """Whether samples without advantage stay out of a step (--skip-zero-advantages); warns if they cannot.

        Args:
            elsewhere: the model learns from all tokens by what is no part of the objective.
        """
        silent = asked and not elsewhere and self.silent_at_zero()
        if asked and not silent:
            logger.warning("skip_zero_advantages has no effect: tokens without advantage are learnt from as well")
        return silent

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
            segment_sum=lambda values: values.new_zeros(4, *values.shape[1:]).index_add(0, sample, values), rows={},
            **self._clips())  # fmt: skip
        try:
            total, _ = self._per_token(inputs)
            gradient = torch.autograd.grad(total.sum(), log_probs)[0] if total.requires_grad else torch.zeros(1)
        except Exception:  # noqa: BLE001 - it looks at more than was made up
            return False
        watched = self._entropy or self.algorithm.use_kl_loss or (self._terms and self._terms(inputs))
        return not (watched or total.any() or gradient.any())

    def _per_token(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """[N] of the whole objective, and metrics."""
        answer, who = self._policy_loss(inputs), f"policy loss {self._name!r}"
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise TrainError("it should return a loss and its metrics", who=who, got=type(answer).__name__,
                             code="policy-loss-not-a-pair", fix="return (loss, {}), or metrics by name in the dict")
        total, metrics = answer[0], dict(answer[1])
        _demand_rows(total, inputs, who)
        for name, values in metrics.items():
            _demand_rows(values, inputs, f"{who}, metric {name!r}")
        if self._token_weights is not None:
            ones = torch.ones_like(total)
            weights = self._token_weights(TokenWeights(ones, ones > 0, {}), inputs)
            total = torch.where(weights.keep, total * weights.weight.detach(), torch.zeros_like(total))
            _demand_rows(total, inputs, f"{who}, with its token weights")
            metrics |= weights.metrics
        if self.actor:
            metrics = {"pg_loss": total, **metrics}
        for name, (coefficient, term) in (self._terms(inputs) if self._terms else {}).items():
            _demand_rows(term, inputs, f"loss term {name!r}")
            metrics[name] = term
            total = total + coefficient * term if coefficient else total
        return total, {**metrics, "loss": total}

    def _inputs(self, scored: Forward) -> LossInputs:
        rows, batch, values, entropy = scored.rows, scored.batch, None, None
        if scored.has_values:
            wide = values = scored.values()
            log_probs = rows.get("log_probs", rows["rollout_log_probs"])
        else:
            log_probs, entropy = scored.with_entropy(self._entropy, self.algorithm.entropy_coef != 0)
            wide = log_probs
        old = rows["rollout_log_probs"] if self.algorithm.use_rollout_logprobs else rows.get("log_probs")
        return LossInputs(
            log_probs=log_probs, entropy=entropy, old_log_probs=(log_probs.detach() if old is None else old).to(wide),
            rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=rows.get("ref_log_probs"),
            advantages=rows["advantages"].to(wide), mask=rows["loss_mask"].to(wide.dtype), sample=batch.sample,
            segment_sum=batch.segment_sum, rows=dict(rows), values=values, samples=batch.samples,
            **self._clips())  # fmt: skip

    def _clips(self) -> dict[str, Any]:
        return {name: getattr(self.algorithm, name) for name in ("eps_clip", "eps_clip_high", "eps_clip_c")}

    def _not_finite(self, total: torch.Tensor, batch: TrainedRows) -> NonFiniteError:
        odd = (~torch.isfinite(total)).nonzero()
        row = int(odd[0]) if len(odd) else 0
        return NonFiniteError(
            f"the loss of {batch.samples[int(batch.sample[row])].name} is not finite", code="loss-not-finite",
            got=f"{float(total[row])} at token {int(batch.offset[row])} of its response",
            who=f"policy loss {self._name!r}", fix="look at the sample's log-probs and reward; the optimizer has not "
            "seen it, so the last checkpoint is good")


def _demand_rows(values: object, inputs: LossInputs, who: str) -> None:
    """Raises TrainError unless they are [N]: a scalar would be broadcast, and train on something else."""
    shape = values.shape if isinstance(values, torch.Tensor) else None
    if shape != inputs.mask.shape:
        raise TrainError("it should have one value for each token", who=who, code="loss-not-per-token",
                         got=type(values).__name__ if shape is None else f"shape {list(shape)}",
                         fix=f"return shape {list(inputs.mask.shape)}; the core reduces")


def sample_weights(config: RunConfig, hooks: Hooks, samples: Sequence[Sample]) -> np.ndarray:
    """[samples] float64: the weight of one token of each, by the run's reduction.

    Raises:
        TrainError: it returned something else.
    """
    reduction = hooks.reduction[chosen(config, "reduction")]
    with read_only(samples, who := getattr(reduction, "who", "reduction")):
        answer = reduction(samples)
    try:
        weights = np.asarray(answer, np.float64)
    except (TypeError, ValueError):  # no numbers
        weights = np.asarray(None, np.float64)
    if weights.shape != (len(samples),) or not np.isfinite(weights).all():
        raise TrainError("it should return one finite number for each sample", code="reduction-not-per-sample", who=who,
                         got=f"{type(answer).__name__} {weights.shape} for {len(samples)} samples",
                         fix="return an array of shape [samples], in their order")
    return weights


class ActorStep:
    """The actor's optimizer step within the hook `train_step`, which may leave it out; warns at the run's last step if
    there has been none."""

    def __init__(self, config: RunConfig, hooks: Hooks):
        self._rollout, self._around, self._made = config.rollout, hooks.train_step, False

    def __call__(self, train: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        def proceed() -> dict[str, float]:
            self._made = True
            return train()

        metrics = proceed() if self._around is None else self._around(proceed, access)
        last = (self._rollout.num_rollout, self._rollout.num_steps_per_rollout)
        if not self._made and access.index is not None and (access.batch.rollout_id + 1, access.index + 1) == last:
            logger.warning("the actor has made no step since the start: no hook train_step called proceed()")
        return metrics


def with_advantage(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that can have a gradient, in their order, at least one.

    Their weights are fixed by the whole step, so nothing else changes (--skip-zero-advantages).
    """
    return [one for one in samples if (one.columns["advantages"] * one.columns["loss_mask"]).any()] or [*samples[:1]]


def with_fillers(samples: Sequence[Sample], perf: Perf, at_once: int) -> list[Sample]:
    """With as many fillers as micro-batches of a fixed number of samples want where some were left out.

    Args:
        at_once: micro-batches, of which the ranks run a multiple.
    """
    multiple = 1 if perf.use_dynamic_batch_size else at_once * perf.micro_batch_size
    return [*samples, *[_filler(samples)] * (-len(samples) % multiple)]


def _filler(samples: Sequence[Sample]) -> Sample:
    """The shortest sample without a token to train on, which no step's weights know; it is ABORTED, as none is that is
    trained on."""
    shortest = min(samples, key=lambda sample: sample.length)
    nothing = np.zeros_like(shortest.columns["loss_mask"])
    return replace(shortest, status=Status.ABORTED, columns={**shortest.columns, "loss_mask": nothing})


def in_micro_batches(samples: Sequence[Sample], indices: Sequence[Sequence[int]]) -> list[list[Sample]]:
    """A rank's micro-batches as packing.schedule has them: the index after the last is a filler."""
    if any(len(samples) in part for part in indices):
        samples = [*samples, _filler(samples)]
    return [[samples[i] for i in part] for part in indices]
