"""The short sample of test_conformance.py that CI runs where there is an SGLang for the CPU."""

import asyncio

import numpy as np
import pytest
from scenes import PROMPT, ask, sync
from test_conformance import reference


@pytest.mark.parametrize("readers", [0, 2], ids=["driver", "readers"])
def test_a_real_server_generates_is_retracted_updated_and_goes_on(beside, models, readers):
    """Every token has the log-prob of the weights and experts that its answer names, whoever reads the answers."""
    engine = beside(readers=readers)

    async def story():
        await engine.start()
        try:
            await sync(engine, models["old"], 1)
            calls = [asyncio.ensure_future(engine.generate(ask(i, 800, want=("routed_experts",)))) for i in range(2)]
            await asyncio.sleep(1.0)
            await sync(engine, models["new"], 2)
            return await asyncio.gather(*calls)
        finally:
            await engine.stop()

    for response in asyncio.run(story()):
        ids, cut = [*PROMPT, *response.output_ids.tolist()], int((response.versions == 1).sum())
        assert len(response.output_ids) == 800 and 0 < cut < 800
        first = cut + len(PROMPT) - 1  # the first position that the new weights computed for the first time
        experts = response.extra["routed_experts"].astype(np.int64)
        expected = reference(models["old"], ids, experts=experts)
        experts[:first] = -1
        expected[first:] = reference(models["new"], ids, experts=experts)[first:]
        np.testing.assert_allclose(response.log_probs, expected[len(PROMPT) - 1:], atol=5e-5, rtol=0)
