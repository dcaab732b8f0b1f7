"""Experts computed side by side against Megatron's one by one, on the CPU: same products, dispatcher and buffers."""

from dataclasses import replace

import pytest
import torch
from miles_megatron.packed_layout import packed_rows

EXPERTS, LENGTHS = 6, (5, 9, 2)


@pytest.fixture(scope="module")
def made(megatron):
    """(side by side) -> a wrapped model of two layers, whose gradients have buffers, with drawn weights."""
    from megatron.core.transformer.module import MegatronModule
    from miles_megatron import model, module_specs
    from miles_megatron.families import FAMILIES
    from miles_megatron.grouped_experts import GroupedExperts, sort_once
    from miles_megatron.layers import SwiGLU
    from miles_megatron.optimizer import OptimizerOptions, wrap
    from transformers import Qwen3MoeConfig

    class Weights(torch.nn.Module):
        """A layer of Transformer Engine's as far as its parameters go."""

        def __init__(self, count, inputs, outputs):
            super().__init__()
            for number in range(count):
                self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(outputs, inputs)))

    class Layers(MegatronModule):
        """Its layers, called one expert after the other."""

        activation_recompute = offload_expert_fc1 = offload_moe_act = False

        def __init__(self, count, config, submodules=None, pg_collection=None):
            super().__init__(config)
            self.num_local_experts, self.activation_func = count, SwiGLU(config)
            self.linear_fc1 = Weights(count, config.hidden_size, 2 * config.moe_ffn_hidden_size)
            self.linear_fc2 = Weights(count, config.moe_ffn_hidden_size, config.hidden_size)

        def forward(self, rows, counts, probs):
            inner = [self.activation_func(x @ getattr(self.linear_fc1, f"weight{number}").t())
                     for number, x in enumerate(rows.split(counts.tolist()))]
            weighed = (torch.cat(inner) * probs[:, None]).split(counts.tolist())
            return torch.cat([x @ getattr(self.linear_fc2, f"weight{number}").t()
                              for number, x in enumerate(weighed)]), None

    class SideBySide(GroupedExperts, Layers):
        pass

    hf = Qwen3MoeConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
                        num_key_value_heads=2, intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=2,
                        moe_intermediate_size=32, decoder_sparse_step=1, max_position_embeddings=64)  # fmt: skip
    spec = FAMILIES["qwen3_moe"].model_spec(hf)

    def make(side_by_side: bool, **overrides):
        config = model.transformer_config(spec, overrides)
        with pytest.MonkeyPatch.context() as patch:
            if side_by_side:
                config.moe_grouped_gemm = True
                patch.setattr(module_specs, "OURS", replace(module_specs.OURS, grouped=(SideBySide, None, None)))
            built = model.build(config, spec)
        if side_by_side:
            sort_once(built)
        draw = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(one.shape, generator=draw) * 0.3
                 for name, one in sorted(_by_expert(built).items()) if one.dim() == 2}
        with torch.no_grad():
            for name, one in _by_expert(built).items():
                if name in drawn:
                    one.copy_(drawn[name])
        return wrap([built], config, OptimizerOptions())[0]

    return make


def _by_expert(model) -> dict[str, torch.nn.Parameter]:
    """Parameters by the names that they have where every expert is a module."""
    from miles_megatron.weights import global_parameters

    return dict(global_parameters(model))


def _passed(wrapped):
    """Hidden states, and gradients by name, of two micro-batches."""
    wrapped.zero_grad_buffer()
    draw = torch.Generator().manual_seed(1)
    boundaries = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for _ in range(2):
        tokens = torch.randint(0, 96, (1, sum(LENGTHS)), generator=draw)
        hidden = wrapped(tokens, None, None, packed_seq_params=packed_rows(boundaries))
        (hidden * torch.randn(hidden.shape, generator=draw)).sum().backward()
    return hidden.detach(), {name: one.main_grad.clone() for name, one in _by_expert(wrapped.module).items()}


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full"}], ids=["kept", "recomputed"])
def test_hidden_states_and_gradients_are_those_of_experts_one_by_one(made, recompute):
    """Experts that no token goes to included: their gradient is zero, and not what lay there."""
    wanted, gradients = _passed(made(False, **recompute))
    hidden, ours = _passed(made(True, **recompute))
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=2e-6)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((ours[name] - gradient).norm()) <= 2e-6 * float(gradient.norm()), name


def test_the_weights_of_all_experts_are_one_tensor_before_and_after_ddp_has_moved_them(made):
    """And so are their gradients: a product reads and writes the parameters themselves."""
    layer = made(True).module.decoder.layers[1].mlp
    for linear, stack in zip((layer.experts.linear_fc1, layer.experts.linear_fc2), layer.experts.stacks(), strict=True):
        for number in range(EXPERTS):
            parameter = getattr(linear, f"weight{number}")
            assert stack.weights[number].data_ptr() == parameter.data_ptr()
            assert stack.gradients[number].data_ptr() == parameter.main_grad.data_ptr()


def test_a_layer_whose_forward_is_not_its_own_is_called(made):
    """Adapters and fake quantisation put one in its place: the result is theirs, by Megatron's way."""
    from miles_megatron.substitute import substitute

    wrapped = made(True)
    hidden, _ = _passed(wrapped)
    experts = wrapped.module.decoder.layers[1].mlp.experts
    experts.linear_fc1.forward = lambda *args: None  # what stands for a layer that is called
    assert experts.stacks() is None
    again, _ = _passed(wrapped)
    torch.testing.assert_close(again, hidden, rtol=0, atol=2e-6)
    del experts.linear_fc1.forward
    assert experts.stacks() is not None
    substitute(experts.linear_fc2, lambda weight: weight * 2, "weight3")
    assert experts.stacks() is None


def test_tensors_that_do_not_lie_evenly_are_not_one():
    from miles_megatron.grouped_experts import as_one

    store = torch.arange(64.0)
    one, other, third = store[0:8], store[16:24], store[32:40]
    assert torch.equal(as_one([one, other, third]), torch.stack([one, other, third]))
    assert as_one([other, one]) is None and as_one([one, other, store[40:48]]) is None
    assert as_one([one, other.clone()]) is None
    assert as_one([store[0:6], store[6:12]]) is None  # 24 bytes: a product's matrices begin at multiples of 16
    assert as_one([store[0:8], store[4:12]]) is None
