"""The architecture that a checkpoint's config.json names picks the plugin that builds it, in the plan already."""

import json

import pytest

from miles_core.errors import CheckpointError, OwnerError, UnknownPluginError


@pytest.fixture
def checkpoint(tmp_path):
    """(text or model_type) -> the flags that name a folder with this config.json."""

    def make(content):
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        known = {"model_type": content, "max_position_embeddings": 64}
        (folder / "config.json").write_text(content if content.startswith(("{", "[")) else json.dumps(known))
        return "--hf-checkpoint", folder

    return make


def owner(made):
    return [(choice.name, choice.plugin) for choice in made.choices if choice.hook == "model_spec"]


def test_a_built_in_family_needs_nothing(plan, checkpoint):
    made = plan(*checkpoint("qwen3"))
    assert owner(made) == [("qwen3", "megatron")]
    assert made.config.model.model_name == "qwen3"
    assert str(made.config.origin["model.model_name"]).endswith("config.json")


@pytest.mark.parametrize(("model_type", "plugin"), [("llama", "specs-llama"), ("gemma3_text", "specs-gemma")])
def test_a_family_of_an_official_plugin_enables_it_and_the_plan_says_why(plan, checkpoint, model_type, plugin):
    made = plan(*checkpoint(model_type))
    assert owner(made) == [(model_type, plugin)]
    line, = [line for line in made.to_text().splitlines() if line.startswith(f"  {plugin} ")]
    assert f"model.model_name = '{model_type}'" in line and "config.json" in line


def test_a_family_whose_plugin_is_not_installed_names_it(plan, checkpoint, monkeypatch):
    from miles_core.plugins import select

    there = [one for one in select.installed() if one.name != "specs-llama"]
    monkeypatch.setattr(select, "installed", lambda: there)
    with pytest.raises(UnknownPluginError, match="'specs-llama' is not installed.*pip install miles-specs-llama"):
        plan(*checkpoint("llama"))


def test_an_unknown_family_lists_what_there_is_and_how_to_add_one(plan, checkpoint):
    with pytest.raises(OwnerError, match=r"builds the architecture 'mamba2'.*glm4, .*llama.*docs/model-families\.md"):
        plan(*checkpoint("mamba2"))
    assert owner(plan(*checkpoint("mamba2"), "--debug-rollout-only")) == [], "an engine alone trains nothing"


def test_model_name_wins_over_config_json(plan, checkpoint):
    assert owner(plan(*checkpoint("my_llama"), "--model-name", "llama")) == [("llama", "specs-llama")]


def test_model_name_may_leave_out_underscores(plan, checkpoint):
    """As launch scripts of Miles do: deepseekv4."""
    made = plan(*checkpoint("gemma3_text"), "--model-name", "gemma3text")
    assert owner(made) == [("gemma3_text", "specs-gemma")] and made.config.model.model_name == "gemma3_text"


def test_a_file_plugin_may_own_an_official_family(plan, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text('''"""A family."""
from miles_core import hookimpl


class Mine:
    """Builds Llama otherwise."""

    @hookimpl("model_spec", name="llama")
    def llama(self, hf_config):
        return self
''')
    assert owner(plan(*checkpoint("llama"), "--plugin", tmp_path / "mine.py")) == [("llama", "mine")]


@pytest.mark.parametrize("content", ["{", "[]"])
def test_what_cannot_be_read_is_refused(plan, checkpoint, content):
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        plan(*checkpoint(content))


@pytest.mark.parametrize("content", ["{}", '{"model_type": 3}'])
def test_what_cannot_be_read_is_left_to_the_start(plan, checkpoint, content):
    assert owner(plan(*checkpoint(content))) == []


def test_a_trainer_that_does_not_build_by_families_needs_none(plan, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text('''"""A trainer."""
from miles_core import hookimpl


class Mine:
    """Builds whatever transformers can."""

    provides = {}

    @hookimpl
    def trainer(self, config, hooks, columns, rank):
        return self
''')
    source, flags = (tmp_path / "mine.py").read_text(), ("--plugin", tmp_path / "mine.py", "--trainer", "mine")
    (tmp_path / "mine.py").write_text(source.format("()"))
    assert owner(plan(*checkpoint("mamba2"), *flags)) == []
    (tmp_path / "mine.py").write_text(source.format('("trainer:mine:model_spec",)'))
    with pytest.raises(OwnerError, match="builds the architecture 'mamba2'"):
        plan(*checkpoint("mamba2"), *flags)
