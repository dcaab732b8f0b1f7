"""The Triton kernels for log-probs on a CPU, by Triton's interpreter, against torch's way; tests/gpu compiles them."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's builds for GPUs"),
              pytest.mark.filterwarnings("ignore:invalid value encountered")]
"""numpy, which interprets, minds products of 0 and infinity that the kernels mask away."""


@pytest.mark.parametrize("entropy", ["none", "kept", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_are_torchs_way(entropy, temperature, monkeypatch):
    """Over several blocks of logits, the last not full; gradients to the rounding of logits' gradients to bfloat16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from miles_local import logits
    from miles_megatron import fused_logits
    from miles_megatron.logprob import token_log_probs

    monkeypatch.setattr(logits, "BLOCK", 64)
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=draw).bfloat16().requires_grad_() for size in (7, 150))
    targets = torch.randint(0, 150, (7,), generator=draw)
    directions = torch.randn(2, 7, generator=draw)
    trained = entropy == "trained"
    ours = fused_logits.FusedLogProbs.apply(hidden, weight, targets, temperature, 3, entropy != "none", trained, None)
    theirs = token_log_probs(hidden, weight, targets, temperature=temperature, chunk_size=3, entropy=entropy != "none",
                             entropy_gradient=trained)
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    pairs = (0, 1) if trained else (0,)
    mine, plain = (torch.autograd.grad([outs[i] for i in pairs], (hidden, weight), [directions[i] for i in pairs])
                   for outs in (ours, theirs))
    for one, other in zip(mine, plain, strict=True):
        assert (one.float() - other.float()).norm() <= 8e-3 * other.float().norm()
