"""The trainer's loss and gradients against float64, and against themselves under any packing.

The reference is transformers' own model run in float64 throughout, one sample at a time, with the objective written
down token by token in Python; it shares no line with the trainer. Errors of a gradient are max |g - g64| / max |g64|
per parameter.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from miles_core.build import trainer_part, with_context
from miles_core.columns import Columns
from miles_core.config.load import with_values
from miles_core.plugins import bind
from miles_core.plugins.plan import prepare
from miles_core.stages.loss import approximate_kl
from miles_core.types import Batch, Group, Prompt, Sample, Status

# Reached in fp32 by the tiny models of conftest.py; the figures are printed and recorded by every run of these tests.
LOSS, GRADIENT = 1e-6, 1e-6
SPLIT = 1e-6

OBJECTIVES = {
    "plain": {},
    "dual-clip, KL and entropy": {
        "eps_clip_c": 1.5, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01},
    "token mean, k2": {"reduction": "token", "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"},
}  # fmt: skip


class InFloat64(TorchFunctionMode):
    """Transformers computes norms, rope, softmax and router in fp32 whatever the model's dtype; here in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 or x is torch.float else x  # noqa: E731
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def make_batch() -> Batch:
    """Ten samples of unequal lengths in three groups: masks with holes, siblings, advantages of both signs and zero."""
    draw = np.random.default_rng(7)
    groups, shapes = [], [[(5, 9), (5, 1), (5, 30)], [(11, 17), (11, 40), (11, 3), (11, 8)], [(3, 21), (3, 12), (3, 60)]]
    for uid, sizes in enumerate(shapes):
        ids = draw.integers(0, 256, sizes[0][0]).astype(np.int32)
        prompt = Prompt(uid, uid, "", tuple(ids.tolist()))
        group = Group(prompt, [])
        for index, (_, length) in enumerate(sizes):
            mask = (draw.random(length) < 0.75).astype(np.uint8)
            mask[-1] = 1
            log_probs = draw.uniform(-7, -4.5, length).astype(np.float32)
            columns = {
                "tokens": np.concatenate([ids, draw.integers(0, 256, length)]).astype(np.int32), "loss_mask": mask,
                "versions": np.ones(length, np.int32), "rollout_log_probs": log_probs, "log_probs": log_probs.copy(),
                "ref_log_probs": (log_probs + draw.normal(0, 0.3, length)).astype(np.float32),
                "advantages": draw.normal(0, 1, length).astype(np.float32) * (index != 1),
            }  # fmt: skip
            rollout = 77 if uid == 1 and index in (1, 2) else None
            group.samples.append(Sample(prompt, index, columns, length, "", Status.COMPLETED, rollout=rollout))
        groups.append(group)
    return Batch(0, groups, 1)


def kl_by_hand(d: torch.Tensor, kind: str) -> torch.Tensor:
    """One token's estimate, from the formulas of http://joschu.net/blog/kl-approx.html."""
    if kind == "k1":
        return d
    if kind == "k2":
        return d**2 / 2
    return torch.exp(-d) - 1 + d


def token_loss(log_prob, entropy, sample, j, a) -> torch.Tensor:
    """The objective of one token by cases."""
    advantage = float(sample.columns["advantages"][j])
    ratio = torch.exp(log_prob - float(sample.columns["log_probs"][j]))
    bounded = min(max(ratio.item(), 1 - a.eps_clip), 1 + a.eps_clip_high)
    if -bounded * advantage > -ratio.item() * advantage:
        loss = torch.tensor(-bounded * advantage, dtype=torch.float64)
    else:
        loss = -ratio * advantage
    if a.eps_clip_c is not None and advantage < 0 and loss.item() > -a.eps_clip_c * advantage:
        loss = torch.tensor(-a.eps_clip_c * advantage, dtype=torch.float64)
    if a.use_kl_loss:
        loss = loss + a.kl_loss_coef * kl_by_hand(log_prob - float(sample.columns["ref_log_probs"][j]), a.kl_loss_type)
    return loss - a.entropy_coef * entropy


def in_float64(folder, batch: Batch, algorithm) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole step by Hugging Face name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 experts_implementation="eager").double()
    samples, total = batch.samples, 0.0
    counts = {}
    for i, sample in enumerate(samples):
        key = sample.rollout if sample.rollout is not None else -1 - i
        counts[key] = counts.get(key, 0) + int(sample.columns["loss_mask"].sum())
    with InFloat64():
        for i, sample in enumerate(samples):
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0]
            assert logits.dtype == torch.float64
            loss = torch.zeros((), dtype=torch.float64)
            for j in np.flatnonzero(sample.columns["loss_mask"]):
                place = sample.length - sample.response_length + int(j)
                all_log_probs = torch.log_softmax(logits[place - 1], -1)
                entropy = -(all_log_probs.exp() * all_log_probs).sum()
                loss = loss + token_loss(all_log_probs[int(sample.tokens[place])], entropy, sample, j, algorithm)
            if algorithm.reduction == "token":
                loss = loss / sum(counts.values())
            else:
                loss = loss / counts[sample.rollout if sample.rollout is not None else -1 - i] / len(counts)
            loss.backward()
            total += loss.item()
    return total, dict(on_disk(model))


def on_disk(model):
    """(name on disk, gradient): transformers fuses the experts' matrices in memory."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                for part, half in zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), half
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), grad
        else:
            yield name, parameter.grad


class Bench:
    """One real trainer whose step leaves the weights as they are; its objective and packing can be changed."""

    def __init__(self, plan):
        self.selected, self.config = plan.selected, with_context(plan.config)
        self.trainer = trainer_part(self.selected, self.config)
        self.trainer.load()
        self.models = self.trainer.models

    def configure(self, algorithm=None, perf=None) -> None:
        """Another trainer over the same models."""
        config = with_values(self.config, "test", **{f"algorithm__{k}": v for k, v in (algorithm or {}).items()},
                             **{f"perf__{k}": v for k, v in (perf or {}).items()})
        self.trainer = type(self.trainer)(config, bind.bind(self.selected, config, "trainer"), Columns())
        self.trainer.models = self.models

    def step(self, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics and gradients of one optimizer step by Hugging Face name."""
        batch = dataclasses.replace(batch)
        self.trainer.take_batch(batch)
        metrics = self.trainer.step(0)
        self.trainer.end_batch()
        with torch.no_grad():
            parameters = list(self.models.model.parameters())
            kept = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
            found = {name: tensor.clone() for name, tensor in self.trainer.weights()}
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        return metrics, found
