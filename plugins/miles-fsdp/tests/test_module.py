"""Packed samples do not see one another, logits are made in parts, and a schedule is Megatron's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.models import _two_samples
from miles_fsdp.module import CausalModule, keep_apart
from miles_fsdp.optimizer import Schedule
from miles_fsdp.scored import Scored, Temperature
from miles_testing.sample_inputs import canned_samples

from miles_core.columns import Columns

COLUMNS, CPU = Columns(), torch.device("cpu")
SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)


class Alone:
    """The ranks of a trainer of one, without a process group."""

    device = CPU

    def gathered(self, value):
        return [value]


def module(kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **more})).eval()
    return CausalModule(model, Temperature(0.7, 4))


def log_probs(module, samples):
    batch = MicroBatch(COLUMNS, samples, CPU)
    with torch.no_grad():
        found = module(batch, lambda scored: scored.log_probs())
    return [found[batch.sample == index] for index in range(len(samples))]


def asked(module):
    keep_apart(module, MicroBatch(COLUMNS, _two_samples(COLUMNS, module.reach), CPU), Alone())
    return module


@pytest.mark.parametrize(("kind", "more", "packs"), [
    ("qwen3", {"head_dim": 8}, True), ("cohere2", {"sliding_window": 4, "head_dim": 8}, True),
    ("bloom", {"n_head": 4, "n_layer": 2}, False), ("mamba", {"state_size": 4}, False),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, None),
])  # fmt: skip
def test_a_sample_scores_the_same_alone_and_beside_others(kind, more, packs):
    """Packed where attention masks it, padded where it does not, or where positions cannot be given."""
    ours, samples = asked(module(kind, **more)), canned_samples()
    assert packs is None or ours.packs is packs
    for together, (alone,) in zip(log_probs(ours, samples), (log_probs(ours, [one]) for one in samples), strict=True):
        torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)


def test_keys_that_are_means_of_many_tokens_are_found():
    """DeepSeek-V4's of 128, in a model without layers that reach less far."""
    kind = "heavily_compressed_attention"
    assert asked(module("deepseek_v4", num_key_value_heads=1, head_dim=16, q_lora_rank=16, o_lora_rank=8, o_groups=2,
                        qk_rope_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                        sliding_window=4, layer_types=[kind] * 2, max_position_embeddings=640)).packs is False


def test_a_layer_that_goes_on_is_found():
    """A module whose body adds up over all rows before would leak if it were packed."""
    ours = module("qwen3", head_dim=8)
    body = ours.model.model
    plain = body.forward

    def adding_up(*args, **given):
        found = plain(*args, **given)
        found.last_hidden_state = found.last_hidden_state.cumsum(1)
        return found

    body.forward = adding_up
    assert asked(ours).packs is False


def test_log_probs_and_entropy_are_those_of_whole_logits():
    """And so are their gradients, scale of the architecture's logits included."""
    ours, batch = module("granite", logits_scaling=4.0), MicroBatch(COLUMNS, canned_samples(), CPU)

    def whole(scored):
        log_p = torch.log_softmax(ours.model.lm_head(scored.hidden) / 4.0 / 0.7, 1)
        return log_p.gather(1, batch.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    def parts(scored: Scored):
        return scored.with_entropy(entropy=True, gradient=True)

    results = []
    for use in (whole, parts):
        ours.zero_grad()
        scores, entropy = ours(batch, use)
        (scores.sum() + 0.1 * entropy.square().sum()).backward()
        results.append((scores.detach(), entropy.detach(), [p.grad.clone() for p in ours.parameters()]))
    (a, b, left), (c, d, right) = results
    torch.testing.assert_close(c, a, atol=2e-6, rtol=0)
    torch.testing.assert_close(d, b, atol=5e-6, rtol=0)
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


def test_a_micro_batch_without_trained_rows_has_a_gradient_of_zero():
    ours, samples = module("qwen3", head_dim=8), canned_samples()[:1]
    samples[0].columns["loss_mask"] = np.zeros_like(samples[0].columns["loss_mask"])
    ours(MicroBatch(COLUMNS, samples, CPU), lambda scored: scored.log_probs().sum()).backward()
    assert all(not parameter.grad.any() for parameter in ours.parameters())


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_megatrons(style, warmup):
    from miles_megatron import cpu

    cpu.install()
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Held:
        param_groups = [{"lr": 0.0, "weight_decay": 0.0}]

    theirs = OptimizerParamScheduler(
        Held(), init_lr=0.0, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=warmup, lr_decay_steps=10, lr_decay_style=style,
        start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True)
    ours = Schedule(style, 1e-3, 1e-5, warmup, 10)
    for done in range(13):
        assert ours.rate(done) == pytest.approx(Held.param_groups[0]["lr"], rel=1e-9, abs=1e-15), done
        theirs.step(1)
