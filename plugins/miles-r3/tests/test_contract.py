import numpy as np
from miles_testing import plugin_contract, tiny_checkpoint

from miles_core.stages.rollout import Response


def answer(sample):
    """An engine's, with the experts of each position but the last: two of four, in both layers."""
    drawn = [sample.columns[name] for name in ("rollout_log_probs", "versions")]
    experts = np.resize(np.array([[0, 1], [2, 3]], np.int32), (sample.length - 1, 2, 2))
    return Response(sample.tokens[-len(drawn[0]):], *drawn, "stop", extra={"routed_experts": experts})


TestContract = plugin_contract("r3", checkpoint=tiny_checkpoint(experts=True), response=answer)
