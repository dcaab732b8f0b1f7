"""Log-probs by kernels, in Triton's interpreter on a CPU, against torch's way through a head of the model's own."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from miles_fsdp import scored
from miles_fsdp.context import ALONE
from miles_testing.kernels import INTERPRETED, compare

pytestmark = INTERPRETED


@pytest.mark.parametrize("entropy", ["none", "kept", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_are_torchs_way(entropy, temperature, monkeypatch):
    """Through a head that caps its logits, whose backward needs what it gave."""
    from miles_local import logits

    monkeypatch.setattr(logits, "BLOCK", 64)

    def way(hidden, weight, targets, kernels):
        chunk = 3 if kernels else -1  # rows at once, or all
        monkeypatch.setattr(scored, "by_kernels", lambda _: kernels)
        batch = SimpleNamespace(mine=slice(None), targets=targets, context=ALONE, counts=(7,))
        rows = scored.Scored(hidden, lambda some: torch.tanh(some @ weight.t()), batch,
                             scored.Temperature(temperature, chunk))
        return rows.with_entropy(entropy != "none", entropy == "trained")

    compare(partial(way, kernels=True), partial(way, kernels=False), entropy_gradient=entropy == "trained")
