"""Recipes: each has a claim of five seeds, a lock, a picture, a README, a run file that plans; the page is theirs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, without_weights
from source import ROOT

from miles_core.plugins import lock
from miles_core.plugins.load import import_file
from miles_core.plugins.plan import prepare

RECIPES = sorted(path.parent for path in ROOT.glob("recipes/*/recipe.toml"))
FETCHES = "examples/smollm2/make_model.py"


def minutes(recipe: Path) -> bool:
    """Whether its preparation trains a model; one that would fetch a model gets its config.json alone here."""
    claim = (recipe / "claim.toml").read_text(encoding="utf-8")
    return "[[prepare]]" in claim and FETCHES not in claim


def test_there_are_recipes():
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=pytest.mark.slow) if minutes(recipe) else recipe
                                    for recipe in RECIPES], ids=lambda recipe: recipe.name)
def test_a_recipe_is_whole(recipe, monkeypatch, tmp_path):
    from miles_reproduce.claim import read
    from miles_reproduce.runs import prepare as make

    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    claim = read(recipe / "claim.toml")
    model = Path(tomllib.loads((recipe / "recipe.toml").read_text(encoding="utf-8"))["checkpoint"]["hf_checkpoint"])
    published = CONFIGURATIONS.get(model.name)
    for each in claim.prepare:
        if published:  # it would fetch the model, or train it
            without_weights(tmp_path / each.makes.parent, published)
        make(each, tmp_path / "prepare.log")
    assert claim.measured is not None and len(claim.measured.values) == 5
    assert claim.measured.values == [claim.at_step(curve) for curve in claim.measured.curves]
    measured = lock.read(recipe / "recipe.lock")["options"]
    planned = lock.of(prepare(recipe / "recipe.toml", ["--plan-without-weights"] if published else []))["options"]
    both = measured.keys() & planned.keys()  # versions differ in what options there are
    both -= {"debug.plan_without_weights"}
    assert {key: measured[key] for key in both} == {key: planned[key] for key in both}
    readme = (recipe / "README.md").read_text(encoding="utf-8")
    assert f"miles reproduce {recipe.name}" in readme and "(curve.svg)" in readme


def test_the_page_is_what_the_claims_say():
    made = import_file(ROOT / "docs" / "recipes.py")
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert made.page(text) == text, "run python docs/recipes.py"
    for path, picture in made.pictures().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path}: run python docs/recipes.py"
