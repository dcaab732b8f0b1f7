import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(scope="module")
def layers(megatron):
    from miles_megatron import layers

    return layers


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_rms_norm_and_its_gradient(layers, centre):
    x = torch.randn(2, 5, 8, dtype=torch.float32)
    norm = layers.RMSNorm(8, 1e-6, torch.float32, centre)
    assert (norm.weight == 1 - centre).all(), "a new norm scales with one"
    torch.nn.init.normal_(norm.weight)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_()
    grad = torch.randn(2, 5, 8)
    norm(ours).backward(grad)
    F.rms_norm(theirs, (8,), weight + centre, 1e-6).backward(grad)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), weight + centre, 1e-6))
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_rms_norm_in_bf16_is_hugging_faces(layers, family):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    theirs = (Qwen3RMSNorm if family == "qwen3" else Gemma2RMSNorm)(64, 1e-6).bfloat16()
    norm = layers.RMSNorm(64, 1e-6, torch.bfloat16, centre=float(family == "gemma2"))
    with torch.no_grad():
        norm.weight.copy_(theirs.weight.add_(torch.randn(64)))
    x = torch.randn(50, 64).bfloat16()
    assert (norm(x) - theirs(x)).abs().max() <= 2**-6


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_activations_and_their_gradients(layers, activation):
    from transformers.activations import ACT2FN

    module = {"silu": layers.SwiGLU, "gelu_pytorch_tanh": layers.GeGLU}[activation](None)
    x = torch.randn(1100, 6, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    expected = ACT2FN[activation](gate) * up
    torch.testing.assert_close(module(x), expected)
    ours, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (module(x), expected))
    torch.testing.assert_close(ours, theirs)


def test_a_factor_before_the_residual(layers):
    module = layers.ScaledAdd(None, 0.25)
    x, bias, residual = torch.randn(5, 1, 8), torch.randn(8), torch.randn(5, 1, 8)
    for more, expected in ((None, residual + x / 4), (bias, residual + (x + bias) / 4)):
        torch.testing.assert_close(module(True, False)((x, more), residual, 0.0), expected)


def test_a_norm_before_the_residual(layers, megatron):
    """Megatron's protocol for a bias-dropout-add: built with nothing, called with (training, fused)."""
    from types import SimpleNamespace

    config = SimpleNamespace(hidden_size=8, layernorm_epsilon=1e-6, normalization="RMSNorm", sequence_parallel=True,
                             params_dtype=torch.float32, layernorm_zero_centered_gamma=False)
    module = layers.NormThenAdd(config)
    torch.nn.init.normal_(module.norm.weight)
    x, bias, residual = torch.randn(5, 1, 8), torch.randn(8), torch.randn(5, 1, 8)
    expected = residual + F.rms_norm(x + bias, (8,), module.norm.weight, 1e-6)
    torch.testing.assert_close(module(True, False)((x, bias), residual, 0.0), expected)
    assert module.norm.weight.sequence_parallel, "its gradient is summed over the tensor-parallel ranks"
