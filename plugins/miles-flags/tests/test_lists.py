"""Each flag of Miles, slime and Megatron-LM has one fate, and what is said about it can be followed."""

from __future__ import annotations

import re
import tomllib

import pytest
from miles_flags.table import table
from miles_megatron import flags as megatron_lm
from miles_megatron.flags import lookup
from miles_megatron.surface import SurfaceField
from miles_sglang.forwarded import surface_of

from miles_core.cli import completion
from miles_core.config.flags import spellings
from miles_core.plugins.select import all_specs

OWN = {option.key for option in completion.options()}
SPELLED = {flag for one in completion.options() for side in spellings(one) for flag in side} | {"--plugin"}


@pytest.fixture(scope="module")
def miles() -> dict:
    return table()


@pytest.fixture(scope="module")
def megatron() -> dict:
    return tomllib.loads(megatron_lm._LIST.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["miles", "megatron"])
def flag_list(request) -> dict:
    return request.getfixturevalue(request.param)


def state(entry: dict) -> str:
    """The one state of an entry; an entry in two of them is an error."""
    states = {word: "accepted" for word in ("key", "set", "read", "plugin", "environment")}
    states |= {"derived": "derived", "refused": "refused"}
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
            found, listed = lookup(advice), "plugin" in miles["flags"].get(advice, {})
            known = isinstance(found, SurfaceField) or getattr(found, "status", "") == "accepted"
            assert known or listed or forwarded(advice) or advice in SPELLED, (name, advice)


def test_every_hook_that_a_text_recommends_exists(flag_list):
    known = set(all_specs())
    for name, text in said(flag_list):
        for pair in re.findall(r"with the hooks? (\w+)(?: (?:and|or) (?!pass)(\w+))?", text):
            assert set(filter(None, pair)) <= known, (name, pair)


def test_no_family_is_unused(flag_list):
    entries = [*flag_list["flags"].values(), *flag_list.get("fields", {}).values()]
    used = {entry.get("refused", entry.get("derived", "")) for entry in entries}
    assert {f"@{family}" for family in flag_list["families"]} <= used


def test_accepted_miles_flags_name_options_that_exist(miles):
    for name, entry in miles["flags"].items():
        if state(entry) == "accepted" and not {"plugin", "environment"} & entry.keys():
            for key in entry.get("set", {entry.get("key", entry.get("read")): None}):
                assert key in OWN or key.partition(".")[0] in ("server", "router"), name


def test_both_lists_agree_where_they_overlap(miles, megatron):
    for name in miles["flags"].keys() & megatron["flags"].keys():
        ours, theirs = miles["flags"][name], megatron["flags"][name]
        if "plugin" in ours:  # what Megatron-LM's entry says then is for the key of that name in [model]
            continue
        assert state(ours) == state(theirs), name
        if "key" in ours:
            assert theirs["key"] == megatron_lm.OWN + ours["key"], name
        else:
            assert text_of(miles, ours) == text_of(megatron, theirs), name
