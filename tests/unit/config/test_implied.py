"""What a plugin's manifest says about a run: values that come with it, and rows of the table of precision."""

import pytest

from miles_core.errors import ManifestError, OwnerError
from miles_core.plugins.plan import prepare

PLUGIN = '''
from dataclasses import dataclass
from miles_core import hookimpl, option

@dataclass(frozen=True, kw_only=True)
class Options:
    bits: int = option(8, "How many.")

class P:
    """States things."""
    name = "{name}"
    implies = {implies!r}
    precision = {precision!r}

    def __init__(self, options: Options): ...

    @hookimpl
    def finish(self): ...
'''
BASE = ["--rm-type", "math", "--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout",
        "1"]  # fmt: skip


@pytest.fixture
def plugin(tmp_path):
    def write(name, implies=None, precision=None):
        path = tmp_path / f"{name}.py"
        path.write_text(PLUGIN.format(name=name, implies=implies or {}, precision=precision or {}))
        return ["--plugin", str(path)]

    return write


def rows(plan) -> dict[str, str]:
    text = plan.to_text().partition("\nprecision\n")[2].partition("\n\n")[0]
    return {line[2:14].strip(): line[14:] for line in text.splitlines()}


def test_an_implied_value_is_the_plugins_in_the_plan(plugin):
    implies = {"server.enable_return_routed_experts": True, "megatron.moe_enable_routing_replay": True,
               "rollout.rollout_seed": 7}
    plan = prepare(None, [*BASE, *plugin("one", implies)])
    assert plan.config.surface("server") == {"enable_return_routed_experts": True}
    assert plan.config.surface("megatron")["moe_enable_routing_replay"] is True
    assert plan.config.rollout.rollout_seed == 7
    assert "rollout.rollout_seed = 7  (plugin one)" in plan.to_text()
    assert not any("not used" in note for note in plan.notes), "nobody asked for SGLang: nothing to announce"


def test_a_flag_overrules_what_is_implied_and_that_is_announced(plugin):
    plan = prepare(None, [*BASE, *plugin("one", {"rollout.rollout_seed": 7}), "--rollout-seed", "3"])
    assert plan.config.rollout.rollout_seed == 3
    assert "rollout.rollout_seed = 3 (--rollout-seed) in place of the 7 that plugin one would have it be" in plan.notes


def test_two_plugins_that_want_two_values_are_refused_by_name(plugin):
    both = [*plugin("one", {"rollout.rollout_seed": 7}), *plugin("two", {"rollout.rollout_seed": 8})]
    with pytest.raises(OwnerError, match=r"plugin one and plugin two .*rollout_seed.*7 and 8.*\[settings-conflict\]"):
        prepare(None, [*BASE, *both])
    assert prepare(None, [*BASE, *both, "--rollout-seed", "8"]).config.rollout.rollout_seed == 8, "somebody has said"
    same = [*plugin("one", {"rollout.rollout_seed": 7}), *plugin("two", {"rollout.rollout_seed": 7})]
    assert prepare(None, [*BASE, *same]).config.rollout.rollout_seed == 7


def test_the_plan_tells_what_computes_in_which_precision(plugin):
    found = rows(prepare(None, [*BASE, "--bf16"]))
    assert list(found) == ["trainer", "log-probs", "engine", "KV cache", "sync"]
    assert found["trainer"].startswith("bfloat16") and found["engine"] == "bfloat16"
    assert found["KV cache"] == "float32, on a GPU the engine's dtype"
    stated = plugin("one", precision={"trainer": "{bits} bits in products"})
    found = rows(prepare(None, [*BASE, "--bf16", *stated, "--one.bits", "4"]))
    assert found["trainer"] == "4 bits in products  (plugin one)" and found["sync"] == "bfloat16"


def test_a_quantised_checkpoint_that_nothing_quantises_for_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}}')
    found = rows(prepare(None, [*BASE, "--hf-checkpoint", str(tmp_path), "--ref-load", "plain"]))
    assert "gptq weights" in found["engine"] and "nothing quantises" in found["sync"]


@pytest.mark.parametrize("precision", [{"trainer": "{width}"}, {"gradients": "x"}], ids=["option", "row"])
def test_a_row_that_cannot_be_read_names_the_plugin(plugin, precision):
    with pytest.raises(ManifestError, match="plugin 'one'"):
        prepare(None, [*BASE, *plugin("one", precision=precision)]).to_text()
