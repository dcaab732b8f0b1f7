"""The core's own parts, offered through the same hooks as any plugin's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.config.tables import RunConfig
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch

    from miles_core.stages.gradients import Gradients
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.stages.placement import Placement
    from miles_core.stages.prompts import PromptSource, Records
    from miles_core.stages.rollout import Generation
    from miles_core.stages.sync import WeightSync
    from miles_core.types import Prompt, Sample


class Core:
    """Defaults of the loop: prompts, single-turn generation, weighted sum, clipped surrogate, KL, reductions."""

    provides = ("resumes:single-turn", "weight_sync:in-process:tensors", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.config = config

    @hookimpl("read_rows", name="jsonl")
    def jsonl(self, path: str, most: int | None) -> Records:
        """JSONL, one object a line."""
        from miles_core.stages.prompts import JsonlRecords

        return JsonlRecords(path, most)

    @hookimpl(name="rows")
    def prompt_source(self, config: RunConfig, tokenizer: Any, read: Callable[[str], Records]) -> PromptSource:
        """Prompts of --prompt-data."""
        from miles_core.stages.prompts import RowPrompts, rows_of

        rollout, rows = config.rollout, rows_of(config)
        return RowPrompts(rows, read(rows.path), tokenizer, shuffle=rollout.rollout_shuffle, seed=rollout.rollout_seed)

    @hookimpl(name="single-turn")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """One engine call per answer."""
        from miles_core.stages.rollout import single_turn

        return await single_turn(prompt, generation)

    @hookimpl(name="weighted-sum")
    def combine_rewards(self, sample: Sample, weights: dict[str, float]) -> float:
        """Sum of weight x score (--rm-weights)."""
        from miles_core.stages.reward import weighted_sum

        return weighted_sum(sample, weights)

    @hookimpl("policy_loss", name="clip")
    def clipped_surrogate(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """The clipped surrogate of PPO, for estimators without a policy loss of their own."""
        from miles_core.stages.loss import clipped_surrogate

        return clipped_surrogate(inputs)

    @hookimpl
    def loss_terms(self, inputs: LossInputs) -> dict[str, tuple[float, torch.Tensor]]:
        """KL to the reference and entropy; a coefficient of 0 makes each a monitor."""
        from miles_core.kl import approximate_kl
        from miles_core.stages.loss import at_trained, bounded_exp, log_ratio

        algorithm, terms = self.config.algorithm, {}
        if inputs.ref_log_probs is not None:
            ratio = bounded_exp(log_ratio(inputs)) if algorithm.use_unbiased_kl else None
            policy, reference = at_trained(inputs, inputs.log_probs), at_trained(inputs, inputs.ref_log_probs)
            terms["kl_loss"] = (algorithm.kl_loss_coef,
                                approximate_kl(policy, reference, algorithm.kl_loss_type, ratio))
        if inputs.entropy is not None:
            terms["entropy_loss"] = (-algorithm.entropy_coef, inputs.entropy)
        return terms

    @hookimpl("reduction", name="sample")
    def per_sample(self, samples: Sequence[Sample]) -> np.ndarray:
        """Mean over rollouts of their mean over tokens."""
        from miles_core.stages.loss import per_sample

        return per_sample(samples)

    @hookimpl("reduction", name="token")
    def per_token(self, samples: Sequence[Sample]) -> np.ndarray:
        """Mean over all trained tokens."""
        from miles_core.stages.loss import per_token

        return per_token(samples)

    @hookimpl("reduction", name="constant")
    def per_constant(self, samples: Sequence[Sample]) -> np.ndarray:
        """Sum over tokens / (rollouts x reduction_constant), Dr. GRPO's."""
        from miles_core.stages.loss import per_constant

        constant = self.config.algorithm.reduction_constant or self.config.rollout.rollout_max_response_len
        return per_constant(samples, constant)

    @hookimpl("clip_gradients", name="norm")
    def clip_by_norm(self, gradients: Gradients) -> float:
        """To a global norm of at most --clip-grad."""
        return gradients.clip_by_norm()

    @hookimpl(name="in-process")
    def weight_sync(self, config: RunConfig) -> WeightSync:
        """The engine copies from the trainer's tensors."""
        from miles_core.stages.sync import InProcess

        return InProcess(config.rollout.pause_generation_mode)

    @hookimpl("placement", name="local")
    def this_machine(self, config: RunConfig) -> Placement:
        """Processes of this machine."""
        from miles_core.stages.placement import Local

        return Local(config)
