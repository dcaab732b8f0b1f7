"""Log-probs by Triton kernels against torch's way and against float64, from the same rounded logits.

    PYTHONPATH=SITE python -m pytest tests/gpu/test_logprob.py -s
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.integration,
              pytest.mark.full]


def inputs(rows: int, hidden: int, vocab: int):
    """Hidden states and weights in bfloat16 whose softmax is neither flat nor a single peak, and targets."""
    draw = torch.Generator("cuda").manual_seed(0)
    states, weight = (torch.randn(size, hidden, generator=draw, device="cuda") for size in (rows, vocab))
    weight *= 3 / hidden**0.5
    targets = torch.randint(0, vocab, (rows,), generator=draw, device="cuda")
    return (states.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets,
            torch.randn(2, rows, generator=draw, device="cuda"))


def answers(states, weight, targets, directions, **how):
    from miles_megatron.logprob import token_log_probs

    states.grad = weight.grad = None
    outs = token_log_probs(states, weight, targets, chunk_size=100, **how)
    torch.autograd.backward([out for out in outs if out is not None and out.requires_grad],
                            [direction for out, direction in zip(outs, directions, strict=True)
                             if out is not None and out.requires_grad])
    return (*outs, states.grad, weight.grad)


@pytest.mark.parametrize("vocab", [1000, 8192, 151936])
@pytest.mark.parametrize("entropy", [{}, {"entropy": True}, {"entropy_gradient": True}],
                         ids=["none", "kept", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_are_torchs_way(vocab, entropy, temperature, monkeypatch):
    """Rows that are no multiple of a chunk included; gradients to bfloat16's rounding, as torch's way has it."""
    from miles_megatron import logprob

    made = inputs(250, 64, vocab)
    fused = answers(*made, temperature=temperature, **entropy)
    monkeypatch.setattr(logprob, "_kernels", lambda hidden: None)
    plain = answers(*made, temperature=temperature, **entropy)
    logits = (made[0] @ made[1].t()).detach().double() / temperature
    log_p = logits.log_softmax(1)
    exact = log_p.gather(1, made[2][:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    for ours, theirs, right in zip(fused[:2], plain[:2], exact, strict=True):
        if ours is not None:
            assert (ours - right).abs().max() <= 2e-5 and (ours - theirs).abs().max() <= 2e-5
    for ours, theirs in zip(fused[2:], plain[2:], strict=True):
        assert (ours.float() - theirs.float()).norm() <= 4e-3 * theirs.float().norm()


def test_the_weights_gradient_is_added_to_a_buffer():
    """In float32, on top of what is there; and none is returned."""
    made = inputs(250, 64, 8192)
    *_, wanted = answers(*made)
    buffer = torch.ones(8192, 64, device="cuda")
    *_, returned = answers(*made, gradients=buffer)
    assert returned is None
    assert (buffer - 1 - wanted.float()).norm() <= 4e-3 * wanted.float().norm()
