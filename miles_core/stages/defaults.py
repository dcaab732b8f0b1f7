"""The core's own parts, offered through the same hooks as any plugin's."""

from __future__ import annotations

from miles_core.config.tables import RunConfig
from miles_core.hookspecs import hookimpl


class Core:
    """Defaults of the loop: JSONL prompts, single-turn generation, weighted sum, KL and entropy terms, reductions."""

    def __init__(self, config: RunConfig):
        self.config = config

    @hookimpl(name="jsonl")
    def prompt_source(self, config, tokenizer):
        """Prompts of --prompt-data."""
        from miles_core.stages.prompts import JsonlPrompts, Rows

        rollout = config.rollout
        rows = Rows(
            path=rollout.prompt_data,
            input_key=rollout.input_key,
            label_key=rollout.label_key,
            metadata_key=rollout.metadata_key,
            context=rollout.rollout_max_context_len,
            max_prompt_len=rollout.rollout_max_prompt_len,
            template=(rollout.apply_chat_template_kwargs or {}) if rollout.apply_chat_template else None,
        )
        return JsonlPrompts(rows, tokenizer, shuffle=rollout.rollout_shuffle, seed=rollout.rollout_seed)

    @hookimpl(name="single-turn")
    async def generate(self, prompt, generation):
        """One engine call per answer."""
        from miles_core.stages.rollout import single_turn

        return await single_turn(prompt, generation)

    @hookimpl(name="weighted-sum")
    def combine_rewards(self, sample, weights):
        """Sum of weight x score (--rm-weights)."""
        from miles_core.stages.reward import weighted_sum

        return weighted_sum(sample, weights)

    @hookimpl
    def loss_terms(self, inputs):
        """KL to the reference and entropy; a coefficient of 0 makes each a monitor."""
        from miles_core.stages.loss import approximate_kl

        algorithm, terms = self.config.algorithm, {}
        if inputs.ref_log_probs is not None:
            divergence = approximate_kl(inputs.log_probs, inputs.ref_log_probs, algorithm.kl_loss_type)
            terms["kl_loss"] = (algorithm.kl_loss_coef, divergence)
        if inputs.entropy is not None:
            terms["entropy_loss"] = (-algorithm.entropy_coef, inputs.entropy)
        return terms

    @hookimpl("reduction", name="sample")
    def per_sample(self, samples):
        """Mean over rollouts of their mean over tokens."""
        from miles_core.stages.loss import per_sample

        return per_sample(samples)

    @hookimpl("reduction", name="token")
    def per_token(self, samples):
        """Mean over all trained tokens."""
        from miles_core.stages.loss import per_token

        return per_token(samples)

    @hookimpl(name="in-process")
    def weight_sync(self, config):
        """The engine copies from the trainer's tensors."""
        from miles_core.stages.sync import InProcess

        return InProcess(config.rollout.pause_generation_mode)

    @hookimpl("placement", name="local")
    def apart(self, config):
        """Trainer and engine hold their own."""
        from miles_core.stages.sync import Local

        return Local()

    @hookimpl("placement", name="shared")
    def together(self, config):
        """Trainer and engine take turns."""
        from miles_core.stages.sync import Shared

        return Shared()
