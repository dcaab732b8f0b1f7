"""config.json as releases of transformers before 5.18 read it: the same model."""

from pathlib import Path

import pytest
from miles_megatron.testing.parity import TINY, cases
from miles_specs_moe.families import deepseek_v32, minimax_m2
from transformers import AutoConfig

CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}


def whole_heads(hf):
    """rotary_dim is a key that nobody reads."""
    del hf.rope_parameters["partial_rotary_factor"]


def other_names(hf):
    """Of layers whose keys an indexer chooses."""
    hf.layer_types = ["deepseek_sparse_attention"] * hf.num_hidden_layers


@pytest.mark.parametrize(("name", "describe", "older"), [
    ("MiniMax-M2", minimax_m2, whole_heads), ("DeepSeek-V3.2", deepseek_v32, other_names)])
def test_an_older_transformers_reads_the_same_model(name, describe, older):
    case = CASES[name]
    hf, before = (AutoConfig.for_model(case.family, **{**TINY, **case.config}) for _ in range(2))
    older(before)
    assert describe(before).spec() == describe(hf).spec()
