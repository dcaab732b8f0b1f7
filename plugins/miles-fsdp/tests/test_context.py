"""Ranks that share the rows of samples have the log-probs, the loss and the gradient of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.module import CausalModule, check_shared, shard
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.scored import Scored, Temperature
from miles_testing.sample_inputs import canned_samples
from several import TIMEOUT, on_ranks

from miles_core.columns import Columns
from miles_core.errors import ConfigError
from miles_core.types import Rank

CPU = torch.device("cpu")
SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             head_dim=8, max_position_embeddings=128)
KINDS = {"heads that divide": {"num_key_value_heads": 2}, "fewer keys than ranks": {"num_key_value_heads": 1},
         "a window": {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 3,
                      "max_window_layers": 1}}


def made(kind):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that another mask shows
                parameter.mul_(3)
    return CausalModule(model.eval(), Temperature(0.8, 4))


def results(module, batch):
    """(log-probs, entropy, likeliest tokens, loss), and backward through the loss."""
    def use(scored):
        log_probs, entropy = scored.with_entropy(True, True)
        weights = torch.linspace(-1, 1, len(log_probs))
        sums = batch.segment_sum(log_probs).square().mean()  # a loss of whole samples
        loss = (weights * log_probs).mean() + 0.1 * entropy.mean() + 1e-3 * sums
        return log_probs, entropy, scored.top_k(3)[0], loss

    *values, loss = module(batch, use)
    loss.backward()
    return [one.detach() for one in (*values, loss)]


def shared(index, size, meeting, kind):
    """On one of the ranks."""
    ranks = Ranks(Rank(index, size, index, f"file://{meeting}"), TIMEOUT, context=size)
    module = made(kind)
    shard(module, ranks, FsdpOptions(), low=False, offload=False)
    check_shared(module, size)
    values = results(module, MicroBatch(Columns(), canned_samples(), CPU, ranks.context))
    gradients = {name: one.grad.full_tensor().numpy() for name, one in module.named_parameters()}
    ranks.wait()
    ranks.leave()
    return [one.numpy() for one in values], gradients


def test_rows_are_scored_some_at_a_time_or_all_at_once():
    lengths = {rows: [len(range(9)[chunk]) for chunk in Scored(
        torch.zeros(9, 4), lambda some: some, SimpleNamespace(mine=slice(None)), Temperature(1.0, rows))._chunks()]
        for rows in (4, -1)}
    assert lengths == {4: [4, 4, 1], -1: [9]}


@pytest.mark.full  # two processes that import torch
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_one_rank(kind, tmp_path):
    """To 1e-6, losses of whole samples and entropy included; every rank knows all log-probs."""
    alone = made(kind)
    expected = results(alone, MicroBatch(Columns(), canned_samples(), CPU))
    for index, (values, gradients) in enumerate(on_ranks(shared, 2, tmp_path, kind)):
        for ours, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=5e-6, rtol=0)
        assert abs(float(values[-1]) - float(expected[-1])) <= 1e-6
        off = max(float((torch.from_numpy(gradients[name]) - one.grad).abs().max())
                  for name, one in alone.named_parameters())
        print(f"\nrank {index}: loss off by {float(values[-1]) - float(expected[-1]):.1e}, gradient by {off:.1e}")
        assert off <= 1e-6 and all(one.grad.abs().max() > 1e-3 for one in alone.parameters())


def test_what_cannot_be_shared_is_refused():
    module = made("heads that divide")
    check_shared(module, 4)
    with pytest.raises(ConfigError) as caught:
        check_shared(module, 3)
    assert caught.value.code == "fsdp-context-unsupported" and "4 heads for 3 ranks" in str(caught.value)
    module.pad()
    with pytest.raises(ConfigError):
        check_shared(module, 2)
