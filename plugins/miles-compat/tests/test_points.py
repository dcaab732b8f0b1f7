"""The 36 extension points: what the table says is so, and the README shows it."""

import dataclasses
import tomllib
from pathlib import Path

import miles_compat
import pytest
from miles_compat import points
from miles_compat.paths import SHAPES
from miles_compat.plugin import CompatOptions
from miles_compat.points import HOOKS, NOT_HERE, POINTS, REPLACED, SUPPORTED, TAKEN
from miles_compat.tables import written

from miles_core.config.load import load
from miles_core.errors import UnknownKeyError

MANIFEST = tomllib.loads((Path(miles_compat.__file__).parent / "miles-plugin.toml").read_text(encoding="utf-8"))
FLAGS = [(point, flag) for point in POINTS for flag in point.names
         if flag.startswith("--") and point.status != TAKEN and not (point.status == REPLACED and point.more)]
OTHERS = {"generate_tool_call_parser", "session_message_matcher", "custom_config_path", "scorer",
          "rollout_global_dataset"}
"""Options that name no function."""
NOT_CALLED = {"generate_tool_specs_path", "rollout_sample_hook_path"}
"""Options that name a list, and a list of functions."""


def test_all_36_are_there_once():
    assert [point.number for point in POINTS if point.number] == list(range(1, 37))
    assert len(set(FLAGS)) == len(FLAGS) and {point.status for point in POINTS} == {
        SUPPORTED, TAKEN, REPLACED, NOT_HERE}


def test_supported_are_those_that_have_an_option_a_signature_and_a_hook():
    options = {field.name for field in dataclasses.fields(CompatOptions)}
    supported = {name.removeprefix("--").replace("-", "_") for point in POINTS if point.status == SUPPORTED
                 for name in point.names}
    assert supported == options - OTHERS == set(SHAPES) | NOT_CALLED == set(HOOKS)
    offered = {offer["hook"] for offer in MANIFEST["offers"]}
    assert {hook for hooks in HOOKS.values() for hook in hooks} == offered


def test_most_of_the_points_carry_over():
    works = [point for point in POINTS if point.number and point.status in (SUPPORTED, TAKEN)]
    assert len(works) >= 32


@pytest.mark.parametrize(("point", "flag"), FLAGS, ids=[flag for _, flag in FLAGS])
def test_the_parser_says_what_the_table_says(point, flag):
    if point.status == SUPPORTED:
        loaded = load(None, [flag, "a.b"])
        option = flag.removeprefix("--").replace("-", "_")
        assert loaded.config.options["compat"][option] in ("a.b", ["a.b"])
        assert loaded.config.origin[f"compat.{option}"].where == flag
        return
    with pytest.raises(UnknownKeyError) as refused:
        load(None, [flag, "a.b"])
    assert refused.value.fix == points.advice(flag)
    assert any(word in refused.value.fix for word in ("rite ", "leave the flag out"))
    if flag == point.names[0]:
        assert points.said(point) == refused.value.fix


def test_the_readme_shows_the_tables():
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 3
    assert page == written(page), "run python -m miles_compat.tables README.md"
