"""Log-probs by kernels, in Triton's interpreter on a CPU, against torch's way through a head of the model's own."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from miles_fsdp import scored
from miles_fsdp.context import ALONE

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's builds for GPUs"),
              pytest.mark.filterwarnings("ignore:invalid value encountered")]


@pytest.mark.parametrize("entropy", ["none", "kept", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_are_torchs_way(entropy, temperature, monkeypatch):
    """Through a head that caps its logits, whose backward needs what it gave; twice, as a graph that is kept allows."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from miles_local import logits

    monkeypatch.setattr(logits, "BLOCK", 64)
    draw, outcomes = torch.Generator().manual_seed(0), []
    hidden, weight = (torch.randn(size, 16, generator=draw).bfloat16().requires_grad_() for size in (7, 150))
    targets, directions = torch.randint(0, 150, (7,), generator=draw), torch.randn(2, 7, generator=draw)
    batch = SimpleNamespace(mine=slice(None), targets=targets, context=ALONE, counts=(7,))
    for kernels in (True, False):
        monkeypatch.setattr(scored, "by_kernels", lambda _, kernels=kernels: kernels)
        rows = scored.Scored(hidden, lambda some: torch.tanh(some @ weight.t()), batch,
                             scored.Temperature(temperature, 3))
        log_probs, spread = rows.with_entropy(entropy != "none", entropy == "trained")
        loss = log_probs @ directions[0]
        if entropy == "trained":
            loss = loss + spread @ directions[1]
        gradients = [torch.autograd.grad(loss, (hidden, weight), retain_graph=kept) for kept in (True, False)]
        outcomes.append((log_probs, spread, *gradients[0], *gradients[1]))
    for one, other in zip(*outcomes, strict=True):
        if other is None:
            assert one is None
        elif other.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        else:
            assert (one.float() - other.float()).norm() <= 8e-3 * other.float().norm()
