"""The Triton kernels for log-probs on a CPU, by Triton's interpreter, against torch's way; tests/gpu compiles them."""

import pytest
from miles_megatron.logprob import token_log_probs
from miles_testing.kernels import INTERPRETED, compare

pytestmark = INTERPRETED


@pytest.mark.parametrize("entropy", ["none", "kept", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_are_torchs_way(entropy, temperature, monkeypatch):
    from miles_local import logits

    monkeypatch.setattr(logits, "BLOCK", 64)
    kept, trained = entropy != "none", entropy == "trained"

    def ours(hidden, weight, targets):
        from miles_megatron.fused_logits import FusedLogProbs

        log_probs, spread = FusedLogProbs.apply(hidden, weight, targets, temperature, 3, kept, trained, None)
        return log_probs, spread if kept else None

    def theirs(hidden, weight, targets):
        return token_log_probs(hidden, weight, targets, temperature=temperature, chunk_size=3, entropy=kept,
                               entropy_gradient=trained)

    compare(ours, theirs, entropy_gradient=trained)
