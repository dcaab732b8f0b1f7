"""Every flag of the list that is accepted sets what it says, and every other says what to write."""

import pytest
from miles_flags.table import flags, refusal, table
from miles_sglang.forwarded import surface_of

from miles_core.cli import completion
from miles_core.config.load import load
from miles_core.errors import OwnerError, UnknownKeyError
from miles_core.plugins.plan import prepare
from miles_core.plugins.scan import KNOWN
from miles_core.plugins.select import readable

OPTIONS = {option.key: option for option in completion.options()}


def legal(key):
    """(words, value) that an option allows, or a field of SGLang's or its router's."""
    table, _, name = key.partition(".")
    option = OPTIONS.get(key) or surface_of(table).fields[name].option(table)
    if option.choices:
        words = [str(choice) for choice in option.choices if choice != option.default][:1]
    elif option.type.startswith("dict"):
        return ['{"a": 1}'], {"a": 1}
    else:
        words = [] if option.is_bool else ["0.0625" if option.within[1:] else "7"]
    kind = next((kind for kind in (int, float, str) if kind.__name__ in option.type), str)
    values = [True] if option.is_bool else words if option.choices else [kind(word) for word in words]
    return words, values if option.is_list else values[0]


def value_of(config, key):
    """What a key is in a run."""
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name) if hasattr(config, table) else config.surface(table)[name]


@pytest.mark.parametrize("flag", [f for f, entry in flags().items() if "key" in entry and "plugin" not in entry])
def test_a_flag_that_is_accepted_sets_its_key(flag):
    key = flags()[flag]["key"]
    words, value = ([], flags()[flag]["value"]) if "value" in flags()[flag] else legal(key)
    config = load(None, [flag, *words]).config
    assert value_of(config, key) == value and config.origin[key].where == flag


@pytest.mark.parametrize("flag", [flag for flag, entry in flags().items() if "set" in entry])
def test_a_flag_that_stands_for_options_sets_them_all_and_yields_to_theirs(flag):
    config, wanted = load(None, [flag]).config, flags()[flag]["set"]
    assert {key: value_of(config, key) for key in wanted} == wanted
    for key, value in wanted.items():
        named = f"--{OPTIONS[key].name.replace('_', '-')}"
        words = ["false"] if OPTIONS[key].is_bool else ["7"]
        for argv in ([flag, named, *words], [named, *words, flag]):
            assert value_of(load(None, argv).config, key) != value, argv


@pytest.mark.parametrize("flag", [flag for flag, entry in flags().items() if "plugin" in entry])
def test_a_flag_of_an_official_plugin_enables_it_and_is_one_of_its_options(flag):
    entry = flags()[flag]
    words = legal(f"{entry['plugin']}.{entry['key']}")[0] if "key" in entry else []
    loaded = load(None, [flag, *words])
    (one,) = (one for one in loaded.selected if one.manifest.name == entry["plugin"])
    assert one.origin == flag
    if "key" in entry:
        assert flag in {origin.where for origin in loaded.config.origin.values()}, "an option of the plugin spells it"


def test_a_flag_that_an_option_spells_does_not_read_the_list():
    load(None, ["--num-rollout", "3"])
    table.cache_clear()
    load(None, ["--num-rollout", "3", "--rollout-temperature", "0.5", "--server-concurrency", "4"])
    assert table.cache_info().currsize == 0


@pytest.mark.parametrize(("argv", "says"), [
    (["--use-mlflow"], "--use-tensorboard"), (["--eval-sglang-tp-size", "2"], "engine that samples"),
    (["--num-generations", "4"], "write --n-samples-per-prompt"), (["--use-tsi"], "did you mean --use-tis"),
    (["--algorithm.gae-lambda", "1"], "write --lambd"), (["--lr", "1e-6", "-use-tis"], "write --use-tis"),
])  # fmt: skip
def test_a_flag_that_has_no_place_says_what_to_write(argv, says):
    with pytest.raises(Exception, match=says):
        load(None, argv)


def test_a_flag_that_is_not_needed_is_a_note():
    loaded = load(None, ["--distributed-backend", "nccl"])
    assert any("--distributed-backend is not needed" in note for note in loaded.notes)


@pytest.mark.parametrize("part", table()["parts"])
def test_a_part_of_another_name_says_what_to_write(part):
    assert not any(part in offers for offers in KNOWN.values()), "it is there by now"
    hook, _, name = part.partition(":")
    flag = {"reward": "--rm-type", "advantage": "--advantage-estimator"}.get(hook, f"--{hook.replace('_', '-')}")
    base = ["--hf-checkpoint", "x", "--prompt-data", "y", "--num-rollout", "1", "--rollout-batch-size", "4"]
    with pytest.raises(OwnerError) as caught:
        prepare(None, [*base, *([] if hook == "reward" else ["--rm-type", "math"]), flag, name])
    assert caught.value.fix == table()["parts"][part]


def test_a_plugin_that_is_installed_and_not_enabled_is_named_for_its_option_even_where_the_list_refuses_the_flag(
        monkeypatch):
    """Somebody's plugin for what Miles has not."""
    from dataclasses import replace

    from miles_core.config.options import Option
    from miles_core.plugins import select

    (tis,) = (one for one in readable() if one.name == "tis")
    tis = replace(tis, options={"use_mlflow": Option("tis", "use_mlflow", "bool", False, "", ("--use-mlflow",))})
    monkeypatch.setattr(select, "readable", lambda hook=None: [tis])
    with pytest.raises(UnknownKeyError, match="belongs to plugin 'tis'"):
        load(None, ["--use-mlflow"])
    assert refusal("--use-mlflow") is not None


def test_words_that_are_taken_of_a_flag_that_is_refused():
    assert any("--spec" in note for note in load(None, ["--spec", "miles_plugins.models.glm4", "get_glm_spec"]).notes)
    with pytest.raises(UnknownKeyError):
        load(None, ["--spec", "mine", "spec"])


def test_an_eval_config_becomes_eval_datasets(tmp_path):
    (tmp_path / "eval.yaml").write_text("eval: {defaults: {top_p: 0.7}, datasets: [{name: a, path: a.jsonl, "
                                        "n_samples_per_eval_prompt: 4}, {name: b, path: b.jsonl, top_p: 1.0}]}")
    assert load(None, ["--eval-config", str(tmp_path / "eval.yaml")]).config.eval.datasets == [
        {"top_p": 0.7, "name": "a", "path": "a.jsonl", "n_samples": 4}, {"top_p": 1.0, "name": "b", "path": "b.jsonl"}]
