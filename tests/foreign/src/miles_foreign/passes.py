"""A pass of the model over a micro-batch: log-probs of the response tokens, and the loss that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles_core.columns import Align, Columns, grid
from miles_core.errors import NonFiniteError
from miles_core.plugins.resolve import chosen
from miles_core.stages.loss import LossInputs, TokenWeights, reduce

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_core.types import Sample


class Pass:
    """Samples side by side, padded at their ends, and the N rows that predict their response tokens.

    Args:
        samples: of the micro-batch.
    """

    def __init__(self, model: torch.nn.Module, config: RunConfig, columns: Columns, samples: Sequence[Sample]):
        self._config, self._samples = config, samples
        packed = columns.pack(samples)
        where = [np.arange(base + rows.start, base + rows.stop) for base, rows in zip(
            packed.cu_seqlens.tolist(), (grid(Align.RESPONSE, sample) for sample in samples))]
        index = np.concatenate(where)
        self.sample = torch.from_numpy(np.repeat(np.arange(len(samples)), [len(rows) for rows in where]))
        self.rows = {name: torch.from_numpy(values[index]) for name, values in packed.rows.items()}
        targets = torch.from_numpy(packed.rows["tokens"][index + 1].astype(np.int64))
        logits = _logits(model, packed.rows["tokens"], packed.lengths)[torch.from_numpy(index)]
        self._all = torch.log_softmax(logits.float() / (config.rollout.rollout_temperature or 1.0), dim=-1)
        self._log_probs = self._all.gather(1, targets[:, None])[:, 0]

    def log_probs(self) -> list[np.ndarray]:
        """[R] float32 of each sample."""
        lengths = [sample.response_length for sample in self._samples]
        return [part.numpy() for part in self._log_probs.detach().split(lengths)]

    def loss(self, hooks: Any, of_sample: Mapping[int, float]) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's share of the step's loss, and of the step's metrics.

        Args:
            of_sample: weight of one token, by id of the sample: the run's reduction over the whole step.

        Raises:
            NonFiniteError: names the first sample whose loss is not finite.
        """
        name, inputs = chosen(self._config, "policy_loss"), self._inputs()
        policy_loss = hooks.policy_loss[name]
        total, metrics = policy_loss(inputs)
        if hooks.token_weights is not None:
            ones = torch.ones_like(total)
            found = hooks.token_weights(TokenWeights(ones, ones > 0, {}), inputs)
            total = torch.where(found.keep, total * found.weight.detach(), torch.zeros_like(total))
            metrics = {**metrics, **found.metrics}
        metrics = {**metrics, "pg_loss": total}
        for term, (coefficient, values) in (hooks.loss_terms(inputs) if hooks.loss_terms else {}).items():
            metrics[term] = values
            total = total + coefficient * values if coefficient else total
        weights = torch.tensor([of_sample[id(sample)] for sample in self._samples], dtype=torch.float32)[self.sample]
        loss = reduce(total, weights, inputs.mask)
        if not torch.isfinite(loss):
            row = int((~torch.isfinite(total)).nonzero()[0]) if not torch.isfinite(total).all() else 0
            raise NonFiniteError(f"the loss of {self._samples[int(self.sample[row])].name} is not finite",
                                 got=float(loss.detach()), who=f"policy loss {name!r}",
                                 fix="look at the sample's log-probs and reward; the optimizer has not seen it")
        return loss, {key: float(reduce(values.detach(), weights, inputs.mask))
                      for key, values in {**metrics, "loss": total}.items()}

    def _inputs(self) -> LossInputs:
        algorithm, rows = self._config.algorithm, self.rows
        old = rows["rollout_log_probs"] if algorithm.use_rollout_logprobs else rows.get("log_probs")
        entropy = None
        if algorithm.entropy_coef or algorithm.observe_training_entropy:
            entropy = -(self._all.exp() * self._all).sum(-1)
        return LossInputs(
            log_probs=self._log_probs, entropy=entropy,
            old_log_probs=self._log_probs.detach() if old is None else old, rollout_log_probs=rows["rollout_log_probs"],
            ref_log_probs=rows.get("ref_log_probs"), advantages=rows["advantages"], mask=rows["loss_mask"].float(),
            sample=self.sample, segment_sum=self._summed, eps_clip=algorithm.eps_clip,
            eps_clip_high=algorithm.eps_clip_high, eps_clip_c=algorithm.eps_clip_c, rows=rows, samples=self._samples)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [samples, ...]: over the rows of each sample."""
        return values.new_zeros(len(self._samples), *values.shape[1:]).index_add(0, self.sample, values)


def _logits(model: torch.nn.Module, tokens: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """[sum of lengths, vocabulary] of samples that lie end to end."""
    parts = torch.from_numpy(tokens.astype(np.int64)).split(lengths.tolist())
    padded = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    there = torch.arange(padded.shape[1]) < torch.from_numpy(lengths.astype(np.int64))[:, None]
    found: torch.Tensor = model(input_ids=padded, attention_mask=there.long(), use_cache=False).logits
    return found[there]
