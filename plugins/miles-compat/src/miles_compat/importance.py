"""A correction of importance as Miles calls it, as a factor and a mask for each token.

Miles's function multiplies the policy loss of tokens, which are laid end to end by sample; called with ones it gives
the factors. It sees whole responses: rows that are not trained on hold 0 and have mask 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from miles_core.errors import HookError
from miles_core.stages.loss import TokenWeights

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.stages.loss import LossInputs, Metrics

WHO = "custom_tis_function_path"


def weighted(function: Callable[..., Any], args: Args, given: TokenWeights, inputs: LossInputs) -> TokenWeights:
    """The function's correction on top of what stands already.

    Raises:
        HookError: it does not answer (pg_loss, loss_masks, metrics) of the right sizes, masks that are not 0 or 1, or
            a loss that is not the given one times a factor for each token.
    """
    grid = Grid(inputs)
    trainer = inputs.rows.get("log_probs", inputs.log_probs.detach())
    fixed = {
        "train_log_probs": grid.lists(trainer), "rollout_log_probs": grid.lists(inputs.rollout_log_probs),
        "loss_masks": grid.masks, "total_lengths": [sample.length for sample in inputs.samples],
        "response_lengths": grid.lengths, "max_seq_lens": None,
        "parallel_state": SimpleNamespace(cp_size=1, cp_rank=0, cp_group=None),
    }  # fmt: skip
    with torch.no_grad():
        losses = torch.ones(sum(grid.lengths)), torch.linspace(-1.0, 2.0, sum(grid.lengths))
        answers = [_answer(function(args, pg_loss=loss.clone(), **fixed), grid) for loss in losses]
    (factor, keep, metrics), (other, _, _) = answers
    kept = keep > 0
    if not torch.allclose(other[kept], (factor * losses[1])[kept], rtol=1e-5, atol=1e-6):
        raise HookError("the function does more than multiply the loss of each token",
                        code="importance-function-changes-loss", who=WHO,
                        fix="multiply pg_loss by weights; write the hook policy_loss for another loss")
    more = {name: grid.rows(value) for name, value in metrics.items()}
    return TokenWeights(given.weight * grid.rows(factor).to(given.weight), given.keep & (grid.rows(keep) > 0),
                        {**given.metrics, **more})


class Grid:
    """The response tokens of a micro-batch's samples end to end, and the N trained rows among them."""

    def __init__(self, inputs: LossInputs):
        self.masks = [torch.as_tensor(sample.columns["loss_mask"], dtype=torch.float32) for sample in inputs.samples]
        self.lengths = [len(mask) for mask in self.masks]
        self._where = torch.cat(self.masks).nonzero()[:, 0]

    def lists(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """[N] -> [R] of each sample."""
        whole = rows.new_zeros(sum(self.lengths))
        whole[self._where] = rows.detach()
        return list(whole.split(self.lengths))

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """All response tokens -> [N]."""
        return whole[self._where]

    def flat(self, value: object) -> torch.Tensor | None:
        """All response tokens, of a tensor, a list of tensors or one number; None of anything else."""
        if isinstance(value, list | tuple) and all(isinstance(one, torch.Tensor) for one in value):
            value = torch.cat(list(value)) if value else torch.zeros(0)
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return torch.full((sum(self.lengths),), float(value))
        if not isinstance(value, torch.Tensor) or value.shape != (sum(self.lengths),):
            return None
        return value.detach().to(torch.float32)


def _answer(answer: object, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """(loss, mask, metrics) of all response tokens."""
    if not (isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[2], Mapping)):
        raise HookError("the function should return (pg_loss, loss_masks, metrics)", got=repr(answer)[:100], who=WHO,
                        fix="a tensor, a list of tensors and a dict", code="importance-function-return")
    loss, keep = grid.flat(answer[0]), grid.flat(answer[1])
    metrics = {str(name): grid.flat(value) for name, value in answer[2].items()}
    found: dict[str, torch.Tensor] = {}
    for name, value in {"pg_loss": loss, "loss_masks": keep, **metrics}.items():
        if value is not None:
            found[name] = value
        else:
            raise HookError(f"{name} should have one value for each of {sum(grid.lengths)} response tokens",
                            code="importance-function-length", who=WHO,
                            fix="return what is given, changed; a metric may be one number as well")
    mask = found["loss_masks"]
    if not ((mask == 0) | (mask == 1)).all():
        raise HookError("loss_masks should be 0 or 1", got=f"{float(mask.min()):g} to {float(mask.max()):g}", who=WHO,
                        fix="multiply weights into pg_loss", code="importance-function-mask")
    return found["pg_loss"], mask, {name: found[name] for name in metrics}
