"""Every family of the support matrix trains on two ranks as on one, and comes out of them as it went in."""

from pathlib import Path

import pytest
from miles_megatron.testing.parity import cases
from miles_megatron.testing.resharding import reshard_parity

from tests.integration.samples import sampled

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "plugins/miles-megatron/tests/parity.toml", *sorted(ROOT.glob("plugins/*/tests/parity.toml"))]

SAMPLE = ("Qwen3", "Qwen3-MoE", "Gemma 3, text", "Llama with biases", "DeepSeek-V3", "MiniMax-M2", "Qwen3-Next")
"""Of each way in which families differ, one; the others are slow tests."""
FAMILIES = [case for file in FILES for case in cases(file)]

pytestmark = pytest.mark.xdist_group("layouts")


@pytest.fixture(scope="module")
def ranks(one, two):
    return one, two


@pytest.mark.parametrize("case", sampled(FAMILIES, (), [case for case in FAMILIES if case.name in SAMPLE]), ids=str)
def test_a_family_can_be_cut(case, ranks, tmp_path):
    for cut in reshard_parity(case, tmp_path, *ranks):
        print(f"\n{case.name}, {cut.layout}: gradient {cut.gradient:.1e}, round trip {'exact' * cut.exact}")
        cut.check()
