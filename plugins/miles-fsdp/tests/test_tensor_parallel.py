"""Ranks that share the projections of layers have the log-probs, the gradient and the weights of one rank."""

from __future__ import annotations

import pytest
import torch
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.module import CausalModule, shard
from miles_fsdp.optimizer import ShardedGradients
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.scored import Temperature
from miles_fsdp.tensor_parallel import add_up, split, whole
from miles_testing.sample_inputs import canned_samples
from several import TIMEOUT, on_ranks

from miles_core.columns import Columns
from miles_core.errors import ConfigError
from miles_core.types import Rank

CPU = torch.device("cpu")
SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
KINDS = {"norms of heads": ("qwen3", {}), "biases": ("qwen2", {}), "biases of all": ("llama", {"attention_bias": True}),
         "windows, four norms": ("gemma3_text", {"sliding_window": 3})}


def made(kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | sizes | more))
    with torch.no_grad():
        for parameter in model.parameters():  # so large that another rank's share shows; biases begin as zeros
            parameter.mul_(3).add_(0.01 * torch.randn_like(parameter))
    return CausalModule(model.double().eval(), Temperature(0.8, 4))  # of float32 one rank itself is 5e-6 away


def backward(module, batch):
    """Log-probs, and a gradient of every parameter."""
    def use(scored):
        log_probs = scored.log_probs()
        return log_probs.detach(), (torch.linspace(-1, 1, len(log_probs)) * log_probs).mean()

    log_probs, loss = module(batch, use)
    loss.backward()
    return log_probs


def split_up(index, size, meeting, kind, options):
    """On one of the ranks; of four the first two have other samples than the last."""
    ranks = Ranks(Rank(index, size, index, f"file://{meeting}"), TIMEOUT, tensor=2)
    module = made(kind)
    before = {name: one.detach().numpy().copy() for name, one in module.named_parameters()}
    shard(module, ranks, options, low=False, offload=False)
    same = all((before[name] == whole(one.detach()).numpy()).all() for name, one in module.named_parameters())
    samples = canned_samples()
    mine = samples if ranks.data == 1 else samples[ranks.data_index :: 2]
    log_probs = backward(module, MicroBatch(Columns(), mine, CPU))
    add_up(module.model, module.partial, ranks.tensor.get_group())
    gradients = {name: whole(one.grad).numpy() for name, one in module.named_parameters()}
    norm = ShardedGradients("actor", module.float(), ranks, 0.0).clip_by_norm()
    numbers = sum(one.to_local().numel() for one in module.parameters())
    ranks.wait()
    ranks.leave()
    return log_probs.numpy(), gradients, norm, numbers, same


@pytest.mark.full  # processes that import torch
@pytest.mark.parametrize(("kind", "size", "again"), [
    *((kind, 2, False) for kind in KINDS), ("norms of heads", 4, True)])
def test_the_gradient_is_that_of_one_rank(kind, size, again, tmp_path):
    """Of every parameter, its norm over all ranks, and what each holds: nothing twice but what is beside layers."""
    ranks = on_ranks(split_up, size, tmp_path, kind, FsdpOptions(gradient_checkpointing=again))
    alone, samples = made(kind), canned_samples()
    parts = [samples] if size == 2 else [samples[0::2], samples[1::2]]
    expected = [backward(alone, MicroBatch(Columns(), part, CPU)).numpy() for part in parts]
    for index, (log_probs, gradients, norm, _, same) in enumerate(ranks):
        assert same
        assert abs(log_probs - expected[index // 2]).max() <= 2e-6
        for name, parameter in alone.named_parameters():
            scale = float(parameter.grad.abs().max())
            assert abs(gradients[name] - parameter.grad.numpy()).max() <= 1e-5 * scale, name
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(
            [one.grad for one in alone.parameters()])), rel=1e-5)
    every = sum(one.numel() for one in alone.parameters())
    split = sum(one.numel() for name, one in alone.named_parameters()
                if ".layers." in name and "norm" not in name and not name.endswith(("o_proj.bias", "down_proj.bias")))
    assert sum(numbers for *_, numbers, _ in ranks) == split + 2 * (every - split)


@pytest.mark.parametrize(("sizes", "fact"), [
    ({"num_key_value_heads": 1}, "num_key_value_heads 1"), ({"intermediate_size": 47}, "down_proj 47"),
])
def test_sizes_that_do_not_divide_are_refused(sizes, fact):
    module = made("norms of heads", **sizes)
    with pytest.raises(ConfigError) as caught:
        split(module.model, Pair(), module.text_layers())
    assert caught.value.code == "fsdp-tensor-unsupported" and fact in str(caught.value)


@pytest.mark.parametrize(("kind", "more", "fact"), [
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8}, "experts"), ("gpt2", {}, "no plan")])
def test_architectures_without_such_a_plan_are_refused(kind, more, fact):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | more if kind != "gpt2" else {"vocab_size": 264, "n_embd": 32, "n_layer": 1, "n_head": 2}
    module = CausalModule(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)), Temperature(1.0, 4))
    with pytest.raises(ConfigError) as caught:
        split(module.model, Pair(), module.text_layers())
    assert caught.value.code == "fsdp-tensor-unsupported" and fact in str(caught.value)


def test_layers_with_adapters_are_refused():
    module = made("norms of heads")
    module.model.model.layers[0].mlp.up_proj.adapter = torch.nn.Linear(32, 2)
    with pytest.raises(ConfigError) as caught:
        split(module.model, Pair(), module.text_layers())
    assert caught.value.code == "fsdp-tensor-unsupported" and "up_proj" in str(caught.value)


class Pair:
    """The mesh of two ranks, of which nothing is asked before all sizes are looked at."""

    def size(self):
        return 2
