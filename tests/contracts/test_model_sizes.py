"""The page of model sizes is what its facts say, and the facts have the parameters that were published."""

from __future__ import annotations

import pytest
from source import ROOT

from miles_core.plugins.load import import_file

model_sizes = import_file(ROOT / "docs" / "model_sizes.py")


@pytest.fixture(scope="module")
def models():
    return list(model_sizes.released())


def test_the_page_is_what_the_facts_say():
    text = model_sizes.PAGE.read_text(encoding="utf-8")
    assert model_sizes.page(text) == text, "run python docs/model_sizes.py"


def test_parameters_are_the_published_ones(models):
    assert [one.name for one in models if not one.agrees] == []


def test_a_wrong_constant_shows(models):
    """One layer more or less of any model is beyond what is allowed, unless its authors gave a digit alone."""
    def wrong(one, layers):
        size = model_sizes.replace(one.size.size, layers=layers, sparse=min(one.size.size.sparse, layers))
        return not model_sizes.replace(one, size=model_sizes.replace(one.size, size=size)).agrees

    precise = [one for one in models if len(one.published.replace(".", "").strip("0")) > 2]
    unseen = [one.name for one in precise if not wrong(one, round(one.size.size.layers * 0.9))]
    assert len(precise) > 40 and unseen == []


def test_what_it_lists_is_of_families_that_are_offered(models):
    offered = {offer.partition(":")[2] for offers in model_sizes.KNOWN.values() for offer in offers
               if offer.startswith("model_spec:")}
    listed = {one.run.model.model_name for one in models}
    assert listed <= offered and len(listed) > 20
