"""Each flag of Megatron-LM has one fate, and sets what there is."""

from __future__ import annotations

import dataclasses
import re
import time
import tomllib

import pytest
from miles_megatron import flags
from miles_megatron.flags import layer_pattern, lookup, megatron_lm_flags
from miles_megatron.surface import surface

from miles_core.config.load import load
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError

OWN = {f"{table}.{field.name}" for table, kind in TABLES.items() for field in dataclasses.fields(kind)}


@pytest.fixture(scope="module")
def megatron() -> dict:
    return tomllib.loads(flags._LIST.read_text(encoding="utf-8"))


def test_accepted_megatron_flags_set_what_exists():
    fields = surface()
    for flag in megatron_lm_flags().values():
        if flag.status != "accepted":
            continue
        keys = [*(flag.set or ()), *([flag.key] if flag.key else ())]
        assert keys, flag
        for key in keys:
            assert key.removeprefix(flags.OWN) in OWN if key.startswith(flags.OWN) else key in fields, flag


def test_a_set_value_fits_the_field():
    fields = surface()
    for flag in megatron_lm_flags().values():
        for key, value in (flag.set or {}).items():
            if key in fields:
                pattern = r"\bbool\b" if isinstance(value, bool) else rf"[\[|]{value}[\]|]"
                assert re.search(pattern, fields[key].type), flag


def test_what_miles_owns_is_not_set_past_it():
    """A key that is both Miles's own and megatron-core's goes to Miles, which decides what megatron-core gets."""
    own = {key.partition(".")[2] for key in OWN}
    for flag in megatron_lm_flags().values():
        assert not ({*(flag.set or ()), flag.key} & own), flag


def test_defaults_name_fields_and_differ_from_them():
    for name, value in flags.megatron_lm_defaults().items():
        assert surface()[name].default != value


def test_fields_without_a_flag_are_fields(megatron):
    for name in megatron["fields"]:
        assert name in surface() and f"--{name.replace('_', '-')}" not in megatron["flags"]


def test_the_list_is_dated_and_of_the_installed_release():
    from miles_megatron.surface import version

    assert flags.source()["tag"] == f"core_v{version()}"
    assert re.fullmatch(r"[0-9a-f]{40}", flags.source()["commit"])


def test_reading_the_list_is_cheap():
    flags._read.cache_clear()
    megatron_lm_flags.cache_clear()
    before = time.process_time()
    assert len(megatron_lm_flags()) > 650
    assert time.process_time() - before < 0.1


def test_lookup_translates_flags_that_stand_for_values():
    assert dict(lookup("--swiglu").set) == {"gated_linear_unit": True, "activation_func": "silu"}
    assert dict(lookup("--disable-bias-linear").set) == {"add_bias_linear": False}
    assert dict(lookup("--untie-embeddings-and-output-weights").set) == {"share_embeddings_and_output_weights": False}
    assert lookup("--num-experts").key == "num_moe_experts"
    assert lookup("--lr-warmup-iters").key == "miles:optimizer.lr_warmup_iters"
    assert lookup("--seq-length").status == "derived"


def test_lookup_falls_back_to_the_surface():
    assert lookup("--num-moe-experts") is surface()["num_moe_experts"]
    assert lookup("--no-gated-linear-unit") is surface()["gated_linear_unit"]
    assert lookup("--no-num-moe-experts") is None
    assert lookup("--nonsense") is None
    assert lookup("num-experts") is None


def test_a_refused_field_is_not_accepted_by_its_other_name():
    assert lookup("--use-kitchen").status == "refused"
    assert lookup("--params-dtype").status == "derived"
    assert lookup("--mtp-num-layers").status == "refused"


@pytest.mark.parametrize(("text", "value"), [
    ("2", 2), ("0,1,1", [0, 1, 1]), ("([0]*1+[1]*2)*2", [0, 1, 1, 0, 1, 1]), ("[0]*1+[1]*2", [0, 1, 1]),
    ("(128, 0)", [128, 0]),
])
def test_layer_patterns_of_launch_scripts(text, value):
    assert layer_pattern(text) == value


@pytest.mark.parametrize("text", ["", "x", "[1]*10**9", "[[1]]", "[1]*'a'", "__import__('os')", "1.5", "[1]+1", "True"])
def test_other_text_is_no_layer_pattern(text):
    with pytest.raises(ValueError, match="layer pattern"):
        layer_pattern(text)


def test_a_flag_with_other_text_is_an_error_that_names_it():
    with pytest.raises(ConfigError) as caught:
        load(None, ["--moe-layer-freq", "[1,1"])
    assert caught.value.code == "layer-pattern-malformed" and "--moe-layer-freq" in str(caught.value)
