"""The gated delta rule against its definition, token by token; sequences that know nothing of each other."""

from pathlib import Path

import pytest
import torch
from miles_megatron import cpu, model
from miles_megatron.recurrent import Again
from miles_megatron.testing.packed import check_nothing_leaks
from miles_megatron.testing.parity import cases, family_of, model_parity, random_model
from miles_specs_qwen3next import delta, mixer

CASES = cases(Path(__file__).with_name("parity.toml"))


def inputs(length, batch=2, keys=2, heads=4, dk=8, dv=6, dtype=torch.float64, channels=False):
    draw = torch.Generator().manual_seed(length)

    def some(*shape):
        return torch.randn(batch, length, *shape, generator=draw, dtype=dtype)

    found = (some(keys, dk), some(keys, dk), some(heads, dv), -some(heads, *[dk] * channels).exp(),
             some(heads).sigmoid())
    return tuple(x.requires_grad_() for x in found)


def by_definition(q, k, v, g, beta):
    """S_t = (I - beta_t k_t k_t^T) a_t S_(t-1) + beta_t k_t v_t^T, o_t = S_t^T q_t (arXiv:2412.06464, equation 10, and
    arXiv:2510.26692, equation 1, where a_t is a diagonal matrix)."""
    each = v.shape[2] // k.shape[2]
    q, k = (torch.nn.functional.normalize(x, dim=-1, eps=0).repeat_interleave(each, 2) for x in (q, k))
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    state, out = torch.zeros(*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        key, share = k[:, t, :, :, None], beta[:, t, :, None, None]
        faded = (g if g.dim() == 4 else g[..., None])[:, t, ..., None].exp() * state
        state = (eye - share * key @ key.mT) @ faded + share * key @ v[:, t, :, None]
        out.append((state.mT @ q[:, t, :, :, None])[..., 0] * k.shape[-1] ** -0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize(("length", "channels"), [(1, False), (2, False), (63, False), (64, False), (65, False),
                                                  (200, False), (1, True), (16, True), (50, True)])
def test_the_chunked_rule_is_the_definition(length, channels, monkeypatch):
    """Values and gradients, in float64; heads that fade as one, and each channel by itself."""
    monkeypatch.setattr(delta, "_EPS", 0.0)
    given = inputs(length, channels=channels)
    found, expected = Again.apply(delta.gated_delta_rule, *given), by_definition(*given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    weight = torch.randn_like(expected)
    for got, wanted in zip(torch.autograd.grad(found, given, weight), torch.autograd.grad(expected, given, weight),
                           strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("channels", [False, True])
def test_strong_decays_do_not_overflow(channels):
    q, k, v, g, beta = inputs(150, dtype=torch.float32, channels=channels)
    out = delta.gated_delta_rule(q, k, v, 50 * g, beta)
    out.square().sum().backward()
    assert all(torch.isfinite(x).all() for x in (out, q.grad, k.grad, v.grad, g.grad, beta.grad))


def test_only_what_goes_in_is_kept_for_the_backward_pass():
    """In between there are the products of a chunk's tokens with each other, and the states."""
    given, kept = inputs(128, dtype=torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        Again.apply(delta.gated_delta_rule, *given)
    assert sum(kept) == sum(x.numel() for x in given)


@pytest.fixture(scope="module", params=["qwen3_next", "bailing_hybrid"])
def built(request):
    """A whole model of the family's first case, random."""
    if not cpu_is_up():
        cpu.initialize()
    hf = random_model(next(case for case in CASES if case.family == request.param)).config
    spec = family_of(request.param, hf).model_spec(hf)
    return model.build(model.transformer_config(spec), spec).eval()


def cpu_is_up():
    from megatron.core import parallel_state

    return parallel_state.model_parallel_is_initialized()


def test_packed_sequences_leak_nothing(built):
    check_nothing_leaks(built)


def test_rows_without_boundaries_are_refused(built):
    with pytest.raises(ValueError, match="takes packed rows"):
        built(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], None)


WRONG = {
    "a convolution one token late": ("causal_convolution", lambda x, weight: (x.roll(1, 1), weight)),
    "a convolution of other weights": ("causal_convolution", lambda x, weight: (x, weight.flip(-1))),
    "no decay": ("gated_delta_rule", lambda q, k, v, g, beta: (q, k, v, 0 * g, beta)),
    "values that replace others whole": ("gated_delta_rule", lambda q, k, v, g, beta: (q, k, v, g, 1 + 0 * beta)),
    "a norm without its gate": ("gated_norm", lambda x, gate, weight, *more: (x, 1 + 0 * gate, weight, *more)),
    "a norm about zero": ("gated_norm", lambda x, gate, weight, *more: (x, gate, 1 + weight, *more)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_is_noticed(wrong, tmp_path, monkeypatch):
    name, spoilt = WRONG[wrong]
    right = getattr(mixer, name)
    monkeypatch.setattr(mixer, name, lambda *given: right(*spoilt(*given)))
    with pytest.raises(AssertionError, match="Qwen3-Next without experts: logits differ"):
        model_parity(CASES[2], tmp_path).check()
