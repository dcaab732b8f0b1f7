"""Losses of routers are means over a step's tokens, whatever its micro-batches and its layout: padding is learnt from
nowhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from miles_megatron import cpu
from miles_megatron.testing.demo import VOCAB, trainer_plan
from miles_megatron.testing.muon import EXPERTS, SIZES
from miles_megatron.testing.ranks import batches, distance

pytestmark = pytest.mark.xdist_group("ranks")

STILL = ("--no-bf16", "--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0, "--no-use-dynamic-batch-size")
AUX, Z = 0.5, 0.1
LOSSES = ("--moe-aux-loss-coeff", AUX, "--moe-z-loss-coeff", Z)
LAYOUTS = {"tp2-sp": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
           "cp2-ep2": ("--context-parallel-size", 2, "--expert-model-parallel-size", 2), "dp2": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, norm_topk_prob=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    folder = tmp_path_factory.mktemp("router")
    model.save_pretrained(folder)
    return folder


def of_losses(ranks, folder, batch, samples, *flags):
    """What the losses add to the gradient, with so many samples in a micro-batch."""
    flags = (*STILL, "--micro-batch-size", samples, "--actor-num-gpus-per-node", ranks.size, *flags)
    with_them, without = (ranks.gradients(trainer_plan(folder, *flags, *more), batch)[1] for more in (LOSSES, ()))
    return {name: gradient - without[name] for name, gradient in with_them.items()}


@pytest.fixture(scope="module")
def batch():
    [batch] = batches(1, vocab=VOCAB)
    return batch


@pytest.mark.full  # of the gate's seconds most would go to starting the rank
@pytest.mark.parametrize("samples", [1, 4])
def test_they_are_those_of_the_papers(folder, one, batch, samples):
    """Switch Transformers (arXiv:2101.03961, eq. 4) of each micro-batch, and ST-MoE (arXiv:2202.08906, eq. 5)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    total, everything = 0, batch.samples
    for i in range(0, len(everything), samples):
        logits = [model(torch.from_numpy(sample.tokens).long()[None], output_router_logits=True).router_logits
                  for sample in everything[i : i + samples]]
        for layer in map(torch.cat, zip(*logits, strict=True)):
            probabilities, tokens = layer.softmax(-1), len(layer)
            chosen = torch.zeros_like(layer).scatter(1, layer.topk(2).indices, 1.0)
            balance = 4 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
            total = total + AUX * balance * tokens + Z * layer.logsumexp(-1).square().sum()
    (total / sum(sample.length for sample in everything)).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if "gate.weight" in name}
    assert distance(of_losses(one, folder, batch, samples), expected) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_them(folder, one, two, batch, layout):
    """Samples of unequal lengths, so that layouts have unequal padding."""
    expected = of_losses(one, folder, batch, 1)
    assert distance(of_losses(two, folder, batch, 1, *LAYOUTS[layout]), expected) < 1e-5


def test_a_second_model_of_a_process_may_have_more_layers():
    """Megatron keeps a table of the losses of layers, which had as many rows as the first model."""
    cpu.install()
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
    from miles_megatron.model_on_rank import ModelOnRank

    settings = SimpleNamespace(moe_aux_loss_coeff=0.5, moe_z_loss_coeff=None)
    for layers in (1, 3):
        with ModelOnRank.router_losses(SimpleNamespace(settings=settings), tokens=10):
            assert settings.moe_aux_loss_coeff == 0.05
            save_to_aux_losses_tracker("load_balancing_loss", torch.ones(()), layers, layers)
    assert settings.moe_aux_loss_coeff == 0.5
