"""The state space against its definition and against transformers; sequences that know nothing of each other."""

from pathlib import Path

import pytest
import torch
from miles_megatron import cpu, model
from miles_megatron.recurrent import Again
from miles_megatron.testing.packed import check_nothing_leaks
from miles_megatron.testing.parity import cases, family_of, model_parity, random_model
from miles_specs_nemotron import mixer, scan

CASES = cases(Path(__file__).with_name("parity.toml"))


def inputs(length, batch=2, groups=2, heads=6, size=5, state=8, dtype=torch.float64):
    draw = torch.Generator().manual_seed(length)

    def some(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    drawn = (some(batch, length, heads, size), some(batch, length, heads).exp(), -some(heads).exp(),
             some(batch, length, groups, state), some(batch, length, groups, state), some(heads))
    return tuple(x.requires_grad_() for x in drawn)


def by_definition(x, dt, decay, b, c, skip):
    """S_t = exp(dt_t A) S_(t-1) + dt_t b_t x_t^T, y_t = S_t^T c_t + D x_t, token by token."""
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
    state, out = torch.zeros(*x.shape[:1], *b.shape[2:], x.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        written = dt[:, t, :, None, None] * b[:, t, :, :, None] * x[:, t, :, None]
        state = (dt[:, t] * decay).exp()[..., None, None] * state + written
        out.append((state.mT @ c[:, t, :, :, None])[..., 0] + skip[:, None] * x[:, t])
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_the_chunked_scan_is_the_definition(length):
    """Values and gradients, in float64."""
    drawn = inputs(length)
    got, expected = Again.apply(scan.state_space, *drawn), by_definition(*drawn)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    weight = torch.randn_like(expected)
    for ours, wanted in zip(torch.autograd.grad(got, drawn, weight), torch.autograd.grad(expected, drawn, weight),
                            strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("length", [5, 64, 150])
def test_the_chunked_scan_is_transformers(length):
    """Whose chunks have another length."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    x, dt, decay, b, c, skip = (part.detach() for part in inputs(length, dtype=torch.float32))
    expected = mamba2_chunk_scan(x, dt, decay, b, c, chunk_size=16, D=skip)
    torch.testing.assert_close(scan.state_space(x, dt, decay, b, c, skip), expected, rtol=1e-5, atol=1e-4)


def test_strong_decays_do_not_overflow():
    x, dt, decay, b, c, skip = inputs(150, dtype=torch.float32)
    out = scan.state_space(x, 50 * dt, decay, b, c, skip)
    out.square().sum().backward()
    assert all(torch.isfinite(part).all() for part in (out, *(each.grad for each in (x, dt, decay, b, c, skip))))


@pytest.fixture(scope="module")
def built():
    """A whole model of the first case, random."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        cpu.initialize()
    hf = random_model(CASES[0]).config
    spec = family_of("nemotron_h", hf).model_spec(hf)
    return model.build(model.transformer_config(spec), spec).eval()


def test_packed_sequences_leak_nothing(built):
    check_nothing_leaks(built)


def test_rows_without_boundaries_are_refused(built):
    with pytest.raises(ValueError, match="takes packed rows"):
        built(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], None)


WRONG = {
    "a convolution one token late": ("causal_convolution", lambda x, weight, bias: (x.roll(1, 1), weight, bias)),
    "a convolution of other weights": ("causal_convolution", lambda x, weight, bias: (x, weight.flip(-1), bias)),
    "no decay": ("state_space", lambda x, dt, decay, b, c, skip: (x, dt, 0 * decay, b, c, skip)),
    "what writes and what reads exchanged": ("state_space", lambda x, dt, decay, b, c, skip: (
        x, dt, decay, c, b, skip)),
    "no way past the state": ("state_space", lambda x, dt, decay, b, c, skip: (x, dt, decay, b, c, 0 * skip)),
    "one norm for all groups": ("gated_norm", lambda x, gate, weight, groups, eps: (x, gate, weight, 1, eps)),
    "a norm without its gate": ("gated_norm", lambda x, gate, weight, groups, eps: (
        x, 1 + 0 * gate, weight, groups, eps)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_is_noticed(wrong, tmp_path, monkeypatch):
    name, spoilt = WRONG[wrong]
    right = getattr(mixer, name)
    monkeypatch.setattr(mixer, name, lambda *given: right(*spoilt(*given)))
    with pytest.raises(AssertionError, match="Nemotron-H: logits differ"):
        model_parity(CASES[1], tmp_path).check()
