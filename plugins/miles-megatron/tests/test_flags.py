"""Each flag of Megatron-LM, Miles and slime has one fate, and what is said about it can be followed."""

from __future__ import annotations

import dataclasses
import re
import time
import tomllib
from pathlib import Path

import pytest
from miles_megatron import flags
from miles_megatron.flags import layer_pattern, lookup, megatron_lm_flags
from miles_megatron.surface import SurfaceField, surface
from miles_sglang.forwarded import surface_of

from miles_core import hookspecs
from miles_core.config.tables import TABLES
from miles_core.plugins.select import all_specs

MILES_LIST = Path(hookspecs.__file__).parent / "config" / "miles_flags.toml"
SPELLED = {flag for kind in TABLES.values() for field in dataclasses.fields(kind) for flag in field.metadata["flags"]}
OWN = {f"{table}.{field.name}" for table, kind in TABLES.items() for field in dataclasses.fields(kind)}


@pytest.fixture(scope="module")
def miles() -> dict:
    return tomllib.loads(MILES_LIST.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def megatron() -> dict:
    return tomllib.loads(flags._LIST.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["miles", "megatron"])
def flag_list(request) -> dict:
    return request.getfixturevalue(request.param)


def state(entry: dict) -> str:
    """The one state of an entry; an entry in two of them is an error."""
    states = {"key": "accepted", "set": "accepted", "plugin": "accepted", "derived": "derived", "refused": "refused"}
    found = {states[word] for word in entry if word in states}
    assert len(found) == 1, entry
    return found.pop()


def text_of(flag_list: dict, entry: dict) -> str:
    text = entry[state(entry)]
    return flag_list["families"][text[1:]] if text.startswith("@") else text


def said(flag_list: dict) -> list[tuple[str, str]]:
    entries = {**flag_list["flags"], **flag_list.get("fields", {})}
    return [(name, text_of(flag_list, entry)) for name, entry in entries.items() if state(entry) != "accepted"]


def test_every_flag_is_in_exactly_one_state(flag_list):
    for name, entry in flag_list["flags"].items():
        assert name.startswith("--")
        state(entry)


def forwarded(flag: str) -> bool:
    """Whether it is a flag of SGLang's or of the router's that goes through, or their prefix."""
    table, _, name = flag[2:].partition("-")
    prefixed = {"sglang": "server", "router": "router"}.get(table)
    return prefixed is not None and (not name or name.replace("-", "_") in surface_of(prefixed).fields)


def test_every_text_is_a_sentence(flag_list):
    for name, text in said(flag_list):
        assert text.endswith("."), name
        assert "\n" not in text and "  " not in text, name


def test_every_refusal_says_what_to_do(flag_list):
    """Either what to write, or that Miles does without and the flag or key is left out."""
    for name, text in said(flag_list):
        entry = {**flag_list["flags"], **flag_list.get("fields", {})}[name]
        if state(entry) == "refused":
            advice = r"[Ww]rite |[Ss]et |leave the (flag|key) out|--plugin|start |name |as a plugin|no place here"
            assert re.search(advice, text), (name, text)


def test_every_flag_that_a_text_recommends_is_accepted(flag_list, miles):
    for name, text in said(flag_list):
        for advice in re.findall(r"--[a-z0-9][a-z0-9-]*[a-z0-9]", text):
            field = advice[2:].replace("-", "_").removeprefix("no_")
            own = {key.partition(".")[2] for key in OWN} | {"plugin"}
            plugin = "plugin" in miles["flags"].get(advice, {})
            found = lookup(advice)
            known = isinstance(found, SurfaceField) or getattr(found, "status", "") == "accepted"
            known = known or forwarded(advice) or advice in SPELLED
            assert field in own or plugin or known, (name, advice)


def test_every_hook_that_a_text_recommends_exists(flag_list):
    known = set(all_specs())
    for name, text in said(flag_list):
        for pair in re.findall(r"with the hooks? (\w+)(?: (?:and|or) (?!pass)(\w+))?", text):
            assert set(filter(None, pair)) <= known, (name, pair)


def test_no_family_is_unused(flag_list):
    used = {entry.get("refused", "") for entry in [*flag_list["flags"].values(), *flag_list.get("fields", {}).values()]}
    assert {f"@{family}" for family in flag_list["families"]} <= used


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


def test_accepted_miles_flags_name_options_that_exist(miles):
    for name, entry in miles["flags"].items():
        if state(entry) == "accepted" and "plugin" not in entry:
            for key in entry.get("set", {entry.get("key"): None}):
                assert key in OWN or key.partition(".")[0] in ("server", "router"), name


def test_both_lists_agree_where_they_overlap(miles, megatron):
    for name in miles["flags"].keys() & megatron["flags"].keys():
        ours, theirs = miles["flags"][name], megatron["flags"][name]
        if "plugin" in ours:  # what Megatron-LM's entry says then is for the key of that name in [model]
            continue
        assert state(ours) == state(theirs), name
        if "key" in ours:
            assert theirs["key"] == flags.OWN + ours["key"], name
        else:
            assert text_of(miles, ours) == text_of(megatron, theirs), name


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
