"""The sizes that every framework is compared on, in one place.

A workload fixes the model, the prompts and the forced response length.  It imports nothing heavy, so that
start-up can be measured from a clean interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One model shape and the number of tokens that an optimizer step has to sample and train on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    prompts_per_step: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int

    @property
    def samples_per_step(self) -> int:
        """Responses that one optimizer step samples and trains on."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def response_tokens_per_step(self) -> int:
        """Response tokens that one optimizer step samples and trains on."""
        return self.samples_per_step * self.response_tokens


WORKLOADS = {
    # Compute-bound on a CPU: matrix products dominate, a framework can only waste or save work.
    "large": Workload(
        hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=768, vocabulary=512,
        prompts_per_step=32, samples_per_prompt=8, prompt_tokens=16, response_tokens=64,
    ),
    # The size of a continuous-integration test: the overhead of the framework shows.
    "small": Workload(
        hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocabulary=512,
        prompts_per_step=4, samples_per_prompt=4, prompt_tokens=16, response_tokens=32,
    ),
}  # fmt: skip

PROMPT_BATCHES = 8
"""Steps' worth of distinct prompts in prompts.jsonl; a longer run starts over."""


THRESHOLD = 0.55
"""Of the verdict: random weights reach it so rarely that about half of the groups are of one mind."""


def reward(response_ids: list[int], vocabulary: int, verdict: bool = False) -> float:
    """A cheap, deterministic reward in [0, 1): the mean token id as a fraction of the vocabulary.

    Args:
        verdict: 1 if that is above THRESHOLD, else 0, as verifiable rewards are; groups may then agree.
    """
    share = sum(response_ids) / (len(response_ids) * vocabulary)
    return float(share > THRESHOLD) if verdict else share
