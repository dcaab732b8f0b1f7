"""A model whose head says one number per position."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from miles_core.errors import CheckpointError
from miles_megatron import cpu, model, weights
from miles_megatron.specs import ModelSpec, Rule, WeightMap

cpu.install()

from megatron.core.transformer.module import MegatronModule  # noqa: E402 - after install()

HEAD = "score.weight"
"""The value head's name on disk: transformers' own for AutoModelForSequenceClassification with one label."""

STD = 0.02
"""Of a fresh head's weights."""


class ValueModel(model.LanguageModel):
    """A language model with `value_head` [1, H] in place of the output layer; every tensor-parallel rank holds it."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = None
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """What every module has; a language model's own would look for the output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def build(config, spec: ModelSpec, vp_stage: int | None = None) -> model.LanguageModel:
    """As `model.build`, with a value head."""
    return model.build(config, dataclasses.replace(spec, tied=False, logit_scale=1.0), vp_stage, ValueModel)


def weight_map(policy: WeightMap) -> WeightMap:
    """The map of the same architecture with a value head."""
    rules = tuple(rule for rule in policy.rules if rule.megatron != "output_layer.weight")
    return dataclasses.replace(policy, rules=(*rules, Rule("value_head.weight", (HEAD,))),
                               ignored=policy.ignored | {"lm_head.weight"}, tied=False)


def load(folder: Path, chunks: Sequence[torch.nn.Module], mapping: WeightMap, *, seed: int, fresh: bool) -> None:
    """Fill the model from a Hugging Face directory.

    Args:
        mapping: of `weight_map`.
        fresh: the folder is a policy's and need not have a head: then it is drawn from N(0, STD^2) by the seed.

    Raises:
        CheckpointError: no head there and none may be made up, or as `weights.load_hf`.
    """
    missing = HEAD not in weights.tensor_files(folder)
    if missing and not fresh:
        raise CheckpointError("the checkpoint has no value head", got=f"no tensor {HEAD}", who=str(folder),
                              fix="name a checkpoint that has one, or leave it out to start from --hf-checkpoint with "
                                  "a new head", code="value-head-missing")
    weights.load_hf(folder, chunks, mapping, but=frozenset({"value_head.weight"}) if missing else frozenset())
    if missing and chunks[-1].post_process:
        head = chunks[-1].value_head.weight
        with torch.no_grad():
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)) * STD)
