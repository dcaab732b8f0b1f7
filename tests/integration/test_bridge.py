"""Our weight maps against megatron-bridge's, where that is installed: a second opinion beside transformers' numbers.

    pip download --no-deps --only-binary :all: --python-version 3.12 megatron-bridge==0.6.2 && unzip -d DIR *.whl
    PYTHONPATH=DIR pytest tests/integration/test_bridge.py -m full
    PYTHONPATH=DIR python -m tests.integration.test_bridge          # the table of docs/model-families.md
"""

import json
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from miles_megatron import hf_config, tensor_merges
from miles_megatron.disk_names import packed_with
from miles_megatron.specs import Rule, WeightMap
from miles_megatron.testing.parity import family_of
from miles_megatron.weights import instances

from tests.integration.bridge import Module, bridges, folder, mappings
from tests.integration.published import published

ROOT = folder()
pytestmark = [pytest.mark.full, pytest.mark.skipif(ROOT is None, reason="megatron-bridge is not installed")]
AGREED, ELSEWHERE, DIFFERENT = "agreed", "in other parameters", "different"
OURS_ALONE = {"Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-35B-A3B"}
"""Whose delta nets the other project keeps in one projection."""


def architecture(one):
    """What the bridge calls it: Kimi K2's config.json names DeepSeek-V3's class."""
    return "KimiK2ForCausalLM" if one.model_type == "kimi_k2" else one.config["architectures"][0]


def compared(one, path):
    """(AGREED, ELSEWHERE or DIFFERENT, parameter) of every parameter of our map."""
    keys = one.hf_config
    keys.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(keys))
    hf = hf_config.read(path)
    theirs, ours = mappings(ROOT, architecture(one), hf), family_of(one.model_type, hf).weight_map(hf)
    patterns = [mapping.hf for mapping in theirs]
    for parameter, rule, names in instances(ours):
        wanted = tuple(dict.fromkeys(packed_with(name, ours) for name in names))
        found = [(mapping.kind, mapping.of(parameter)) for mapping in theirs]
        kinds = [kind for kind, tensors in found if tensors == wanted]
        if kinds:
            same = all((word in kind) == (rule.join in joins) for kind in kinds for word, joins in (
                ("QKV", ("qkv", "qkv_gate")), ("Gate", ("rows",))))
            yield AGREED if same else DIFFERENT, parameter
        elif any(tensors is not None for _, tensors in found):
            yield DIFFERENT, parameter
        else:
            covered = all(any(_covers(pattern, name) for several in patterns for pattern in several) for name in wanted)
            yield ELSEWHERE if covered else DIFFERENT, parameter


def _covers(pattern, name):
    parts = name.split(".")
    return len(parts) == len(pattern.split(".")) and all(
        theirs in ("*", mine) for theirs, mine in zip(pattern.split("."), parts, strict=True))


@pytest.mark.parametrize("one", published(), ids=str)
def test_the_two_weight_maps_are_one(one, tmp_path):
    if architecture(one) not in bridges(ROOT):
        pytest.skip("megatron-bridge has no bridge for it")
    results = list(compared(one, tmp_path))
    assert not [parameter for kind, parameter in results if kind == DIFFERENT]
    assert str(one) in OURS_ALONE or not [parameter for kind, parameter in results if kind == ELSEWHERE]


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", [(), (24,)], ids=["bias", "weight"])
def test_queries_keys_and_values_lie_in_the_same_order(gate, shape):
    """The function itself, on numbers."""
    heads, groups, size = 8, 2, 4
    theirs = Module(ROOT, "megatron.bridge.models.conversion.param_mapping")["merge_qkv_weights"]
    layout = SimpleNamespace(num_attention_heads=heads, num_query_groups=groups, kv_channels=size, hidden_size=24,
                             attention_output_gate=gate)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows * size, *shape, generator=draw) for rows in (heads * (1 + gate), groups, groups))
    rule = Rule("x", ("q", "k", "v"), "qkv_gate" if gate else "qkv")
    ours = tensor_merges.join(rule, [q, k, v], WeightMap((rule,), heads, groups, size))
    assert torch.equal(ours, theirs(layout, q, k, v))


def table():
    """Rows of docs/model-families.md."""
    yield f"| checkpoint | {' | '.join((AGREED, ELSEWHERE, DIFFERENT))} |"
    yield "|---|---|---|---|"
    for one in published():
        if architecture(one) in bridges(ROOT):
            with tempfile.TemporaryDirectory() as path:
                counts = Counter(kind for kind, _ in compared(one, Path(path)))
            yield f"| {one.repository} | {' | '.join(str(counts[kind]) for kind in (AGREED, ELSEWHERE, DIFFERENT))} |"


if __name__ == "__main__":
    print("\n".join(table()))
