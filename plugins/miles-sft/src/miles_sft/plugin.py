"""The plugin: options and hooks. Rows become tokens in demonstration.py, conversations in conversation.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.stages.rollout import Generation
    from miles_core.types import Batch, Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Where answers are found and what of them is trained on."""

    sft_response_key: str = option("response", "Key of the answer in the row, where the prompt is no conversation.")
    sft_tools_key: str = option(
        "tools", "Key of the tools that a row's conversation may call: schemas for the chat template, or their JSON.")
    sft_append_eos: bool = option(True, "Append the end-of-sequence token to answers that no special token ends.")
    sft_last_turn_only: bool = option(False, "Train on a conversation's last answer only.")
    sft_loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = option(
        "qwen", "How conversations become text: qwen, as the template renders the whole; qwen3, each answer by itself, "
        "so that each keeps its reasoning; qwen3_5, as the whole, without the reasoning that the template leaves out; "
        "distill_qwen, as the whole, and the last answer alone is trained on.",
        flags=("--loss-mask-type",))


class Sft:
    """Supervised fine-tuning: a row's own answer is the one sample of its group; the loss is -log p."""

    provides = ("answers:sft:sft_response_key", "generate:sft:no-engine", "needs-no-log-prob-pass")

    def __init__(self, options: SftOptions, config: RunConfig):
        rollout, replays = config.rollout, config.debug.load_debug_rollout_data
        if config.algorithm.loss_type == "sft_loss" and rollout.generate == "single-turn" and not replays:
            raise ConfigError("every answer of the model would be treated as a demonstration and made more likely",
                              code="sft-loss-on-sampled-answers", got=rollout.generate,
                              who="algorithm.loss_type, rollout.generate",
                              fix="add --generate sft, whose samples are the rows' own answers")
        if rollout.generate == "sft" and rollout.n_samples_per_prompt != 1:
            raise ConfigError("the generator sft makes one sample per row", code="sft-one-sample-per-row",
                              got=rollout.n_samples_per_prompt, who="rollout.n_samples_per_prompt",
                              fix="--n-samples-per-prompt 1")
        self.options, self._config = options, config
        self._tokenizer = None

    @hookimpl(name="sft")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """The row's demonstration as a sample. An eval dataset's prompt is sampled from the engine instead."""
        if prompt.stream != "train":
            from miles_core.stages.rollout import single_turn

            return await single_turn(prompt, generation)
        if generation.samples != 1:
            raise ConfigError("sft makes one sample per row", who="rollout.n_samples_per_prompt",
                              got=generation.samples, code="sft-generator-one-sample", fix="--n-samples-per-prompt 1")
        from miles_sft.demonstration import load_tokenizer, to_sample

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._config)
        return [to_sample(prompt, self._tokenizer, self.options, self._config, generation.engine.version)]

    @hookimpl(name="sft")
    def advantage(self, batch: Batch) -> Sequence[float]:
        """1 for every sample: the log-likelihood's gradient is a policy gradient whose advantages are all 1."""
        return [1.0] * len(batch.samples)

    @hookimpl(name="sft")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """-log p per token; 0 and without gradient where the mask is 0."""
        import torch

        return torch.where(inputs.mask > 0, -inputs.log_probs, torch.zeros_like(inputs.log_probs)), {}
