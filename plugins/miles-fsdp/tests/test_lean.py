"""Norms and gated layers say what transformers' say, and keep less of it."""

from __future__ import annotations

import pytest
import torch
from miles_fsdp.lean import keep_less

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, attn_implementation="sdpa")


def body(kind, **more):
    """With weights of norms that are not all alike."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **{**SIZES, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def outputs(model):
    """Of 17 rows, with the gradients of all parameters and the bytes that were kept for them."""
    kept, own = {}, {one.data_ptr() for one in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model(torch.arange(17)[None], use_cache=False).last_hidden_state
    states.float().square().sum().backward()
    return states.detach(), {name: one.grad for name, one in model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize(("kind", "more", "count"), [
    ("qwen3", {}, 2 * 5 + 1), ("llama", {}, 2 * 3 + 1), ("olmo2", {}, 2 * 5 + 1),
    ("gemma2", {"attn_implementation": "eager"}, 0),  # its weights count from 1, and its gate is another
    ("gpt_neox", {}, 0),  # plain layer norms
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, 2 * 4 + 1),
])
def test_what_computes_the_same_is_replaced_and_nothing_else(kind, more, count):
    theirs, ours = body(kind, **more), body(kind, **more)
    assert keep_less(ours) == count
    (one, expected, _), (other, gradients, _) = outputs(theirs), outputs(ours)
    torch.testing.assert_close(other, one, atol=2e-6, rtol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def test_a_norm_with_a_second_argument_stays():
    """Its gate would be left out."""
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, rows, gate=None):
            normed = torch.nn.functional.rms_norm(rows, (8,), self.weight, self.eps)
            return normed if gate is None else normed * gate

    assert keep_less(Gated()) == 0


def test_a_layer_in_16_bits_keeps_two_thirds():
    theirs, ours = (body("qwen3", hidden_size=64, head_dim=16, intermediate_size=192).bfloat16() for _ in range(2))
    keep_less(ours)
    (one, _, before), (other, _, after) = outputs(theirs), outputs(ours)
    torch.testing.assert_close(other, one, atol=0.06, rtol=0.02)
    print(f"\n{before} -> {after} bytes, {after / before:.2f}")
    assert after < 0.7 * before


def test_a_step_waits_for_the_device_a_few_times_whatever_it_has(tmp_path):
    """Numbers that Python asks tensors for: as many of one micro-batch as of eight, and none for each parameter."""
    from miles_megatron.testing.ranks import batches
    from miles_testing import tiny_checkpoint
    from miles_testing.tiny import run_file
    from torch.utils._python_dispatch import TorchDispatchMode

    from miles_core.build import trainer_part
    from miles_core.plugins.plan import prepare
    from miles_core.types import Rank

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    path = run_file(tmp_path / "run.toml", [], {"perf": {"trainer": "fsdp"}, "rollout": {
        "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 41}}, {},
        checkpoint=tiny_checkpoint())
    counts = []
    for tokens in (64, 4096):
        planned = prepare(path, ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(tokens)])
        trainer = trainer_part(list(planned.selected), planned.config, Rank())
        trainer.load()
        trainer.take_batch(batches(1, vocab=200)[0])
        trainer.score()
        trainer.advantage()
        with Waits() as waits:
            trainer.step(0)
        trainer.close()
        counts.append(waits.count)
    print(f"\n{counts}")
    assert counts[0] == counts[1] < 10
