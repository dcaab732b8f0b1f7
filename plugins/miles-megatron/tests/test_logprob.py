import pytest
import torch
from miles_megatron.logprob import token_log_probs
from torch.utils._python_dispatch import TorchDispatchMode


def inputs(n=23, h=8, v=31, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(n, h, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, h, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, v, (n,))


def naive(hidden, weight, targets, temperature, softcap=None):
    logits = hidden @ weight.t()
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [5, 23, -1, None])
def test_it_is_log_softmax_with_gradients(temperature, chunk_size, softcap):
    hidden, weight, targets = inputs()
    ours = token_log_probs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size,
                           entropy_gradient=True, softcap=softcap)  # fmt: skip
    theirs = naive(hidden, weight, targets, temperature, softcap)
    g, e = torch.randn(2, 23, dtype=torch.float64)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(ours, (hidden, weight), (g, e)),
                    torch.autograd.grad(theirs, (hidden, weight), (g, e)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradcheck(entropy_gradient, softcap):
    hidden, weight, targets = inputs(n=5, h=4, v=6)

    def function(hidden, weight):
        out = token_log_probs(hidden, weight, targets, temperature=0.9, chunk_size=2, softcap=softcap,
                              entropy_gradient=entropy_gradient)  # fmt: skip
        return out if entropy_gradient else out[0]

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_entropy_without_gradient():
    hidden, weight, targets = inputs()
    log_probs, entropy = token_log_probs(hidden, weight, targets, entropy=True, chunk_size=4)
    assert not entropy.requires_grad and log_probs.requires_grad
    torch.testing.assert_close(entropy, naive(hidden, weight, targets, 1)[1])
    log_probs.sum().backward()
    assert token_log_probs(hidden, weight, targets)[1] is None


def test_bf16_inputs_have_an_fp32_softmax():
    hidden, weight, targets = inputs(n=64, h=32, v=500)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    log_probs, _ = token_log_probs(*low, targets, chunk_size=7)
    assert log_probs.dtype == torch.float32
    expected = (low[0] @ low[1].t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    log_probs.sum().backward()
    assert low[1].grad.dtype == torch.bfloat16


def test_unrounded_logits_keep_what_bf16_would_lose():
    """Log-probs and gradients are those of the same bf16 numbers multiplied in fp32."""
    hidden, weight, targets = inputs(n=64, h=32, v=500)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().float().requires_grad_() for t in low]
    found, _ = token_log_probs(*low, targets, chunk_size=7, rounded=False)
    expected, _ = token_log_probs(*exact, targets)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(low[0].grad.float(), exact[0].grad, atol=0.05, rtol=0.02)
    assert (token_log_probs(*low, targets)[0] - found).abs().max() > 1e-3, "rounding is seen"


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(dtype=torch.float32)
    log_probs, entropy = token_log_probs(hidden * 1000, weight, targets, entropy=True)
    assert torch.isfinite(log_probs).all() and torch.isfinite(entropy).all()


def test_no_rows():
    hidden, weight, targets = inputs(n=0)
    log_probs, _ = token_log_probs(hidden, weight, targets)
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and not weight.grad.any()


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(*inputs(), temperature=0)


def test_the_logits_of_all_rows_never_exist():
    hidden, weight, targets = inputs(n=4096, h=8, v=2048, dtype=torch.float32)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, *(t.numel() for t in (out if isinstance(out, tuple) else (out,))))
            return out

    with Watch():
        token_log_probs(hidden, weight, targets, chunk_size=64)[0].sum().backward()
    assert largest == 64 * 2048
