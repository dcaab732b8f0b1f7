"""The page of model sizes is what its facts say, and the facts have the parameters that were published."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace

import pytest
from miles_megatron import proposals
from source import ROOT

from miles_core.plugins.load import import_file
from miles_core.plugins.plan import prepare

model_sizes = import_file(ROOT / "docs" / "model_sizes.py")
FACTS = json.loads(model_sizes.FACTS.read_text(encoding="utf-8"))
RUN = ("--plan-without-weights", "--rm-type", "math", "--label-key", "label", "--rollout-batch-size", "32",
       "--n-samples-per-prompt", "8", "--num-rollout", "1", "--rollout-max-response-len", "14336", "--placement", "ray",
       *model_sizes.FLAGS)  # fmt: skip


@pytest.fixture(scope="module")
def models():
    return list(model_sizes.released())


def test_the_page_has_what_the_facts_say_of_every_fourth_model():
    lines = model_sizes.PAGE.read_text(encoding="utf-8").splitlines()
    rows = model_sizes.generated(itertools.islice(model_sizes.released(), 0, None, 4)).splitlines()
    assert [row for row in rows if row not in lines] == [], "run python docs/model_sizes.py"
    assert len(rows) > 60


@pytest.mark.full
def test_the_page_is_what_the_facts_say():
    text = model_sizes.PAGE.read_text(encoding="utf-8")
    assert model_sizes.page(text) == text, "run python docs/model_sizes.py"


def test_parameters_are_the_published_ones(models):
    assert [one.name for one in models if not one.agrees] == []


def test_a_wrong_constant_shows(models):
    """One layer more or less of any model is beyond what is allowed, unless its authors gave a digit alone."""
    def wrong(one, layers):
        whole = one.size.size
        kinds = {kind: round(getattr(whole, kind) * layers / whole.layers) for kind in ("sparse", "linear", "alone")}
        size = replace(whole, layers=layers, **kinds)
        return not replace(one, size=replace(one.size, size=size)).agrees

    precise = [one for one in models if len(one.published.replace(".", "").strip("0")) > 2]
    unseen = [one.name for one in precise if not wrong(one, round(one.size.size.layers * 0.9))]
    assert len(precise) > 40 and unseen == []


def test_what_it_lists_is_of_families_that_are_offered(models):
    offered = {offer.partition(":")[2] for offers in model_sizes.KNOWN.values() for offer in offers
               if offer.startswith("model_spec:")}
    listed = {one.run.model.model_name for one in models}
    assert listed <= offered and len(listed) > 20


@pytest.mark.full
@pytest.mark.parametrize("name", FACTS)
def test_the_whole_plan_accepts_the_layouts_of_the_page(models, name, tmp_path):
    """The engine's part of it, too."""
    one = next(model for model in models if model.name == name)
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", tmp_path / "model",
                    ignore=lambda *_: ["model.safetensors"])
    constants = model_sizes.config_of(FACTS, name) | {"max_position_embeddings": 32768}
    (tmp_path / "model/config.json").write_text(json.dumps(constants))
    (tmp_path / "rows.jsonl").write_text((json.dumps({"input": "1+1=", "label": "2"}) + "\n") * 32)
    here = ("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "rows.jsonl"))
    for gib in model_sizes.MEMORY:
        run = one.on(gib)
        run = replace(run, checkpoint=replace(run.checkpoint, hf_checkpoint=str(tmp_path / "model")))
        for gpus in model_sizes.GPUS:
            for best in proposals.proposals(run, gpus):
                words = " ".join(best.flags()).split()
                plan = prepare(None, [*RUN, *here, "--gpu-memory-gib", str(gib), *words])
                assert proposals.layout_of(plan.config) == best.layout
