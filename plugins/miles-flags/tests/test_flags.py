"""Every flag of the list that is accepted sets what it says, and every other says what to write."""

import base64
import os
import sys

import pytest
from miles_flags.defaults import of_trainer
from miles_flags.table import flags, refusal, table
from miles_sglang.forwarded import surface_of

from miles_core.cli import completion
from miles_core.cli.run import SCRIPTS
from miles_core.config.load import load
from miles_core.errors import ConfigError, DataError, OwnerError, UnknownKeyError
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
    if hasattr(config, table):
        return getattr(getattr(config, table), name)
    return config.options[table][name] if table in config.options else config.surface(table)[name]


@pytest.mark.parametrize("flag", [f for f, entry in flags().items() if "key" in entry and "plugin" not in entry])
def test_a_flag_that_is_accepted_sets_its_key(flag):
    entry, key = flags()[flag], flags()[flag]["key"]
    words, value = ([], entry["value"]) if "value" in entry else legal(key)
    value = f"{value}/{entry['below']}" if "below" in entry else value
    config = load(None, [flag, *words]).config
    assert value_of(config, key) == value and config.origin[key].where == flag


@pytest.mark.parametrize("flag", [flag for flag, entry in flags().items() if "set" in entry])
def test_a_flag_that_stands_for_options_sets_them_all_and_yields_to_theirs(flag):
    config, wanted = load(None, [flag]).config, flags()[flag]["set"]
    assert {key: value_of(config, key) for key in wanted} == wanted
    for key, value in wanted.items():
        named = f"--{OPTIONS[key].name.replace('_', '-')}"
        least, most = (*OPTIONS[key].within, 7, 7)[:2]
        other = next((str(choice) for choice in OPTIONS[key].choices if choice != value), str(min(max(least, 7), most)))
        words = [str(not value).lower()] if OPTIONS[key].is_bool else [other]
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
    (["--dumper-enable"], "hook microbatch"), (["--eval-sglang-tp-size", "2"], "--eval-engine-addrs"),
    (["--optimizer.lr", "0.9"], "did you mean --lr"), (["--group-size", "4"], "write --n-samples-per-prompt"),
    (["--tensor-parallel-size", "2"], "--rollout-num-gpus-per-engine for an engine"),
    (["--num-generations", "4"], "write --n-samples-per-prompt"), (["--use-tsi"], "did you mean --use-tis"),
    (["--lerning-rate", "1e-4"], r"did you mean --lr\?"),
    (["--data.train-batch-size", "4"], "write --rollout-batch-size"), (["--warmup-ratio", "1"], "--lr-warmup-fraction"),
    (["--use-fsdp"], "write --trainer fsdp"), (["--save-total-limit", "2"], "--retention.keep-last"),
    (["--algorithm.gae-lambda", "1"], "write --lambd"), (["--lr", "1e-6", "-use-tis"], "write --use-tis"),
])  # fmt: skip
def test_a_flag_that_has_no_place_says_what_to_write(argv, says):
    with pytest.raises(Exception, match=says):
        load(None, argv)


def test_a_flag_that_is_not_needed_is_a_note():
    loaded = load(None, ["--distributed-backend", "nccl"])
    assert any("--distributed-backend changes nothing" in note for note in loaded.notes)


@pytest.mark.parametrize("part", table()["parts"])
def test_a_part_of_another_name_says_what_to_write(part):
    assert not any(part in offers for offers in KNOWN.values()), "it is there by now"
    hook, _, name = part.partition(":")
    flag = {"reward": "--rm-type", "advantage": "--advantage-estimator"}.get(hook, f"--{hook.replace('_', '-')}")
    base = ["--hf-checkpoint", "x", "--prompt-data", "y", "--num-rollout", "1", "--rollout-batch-size", "4"]
    with pytest.raises(OwnerError) as caught:
        prepare(None, [*base, *([] if hook == "reward" else ["--rm-type", "math"]), flag, name])
    assert caught.value.fix == table()["parts"][part]


@pytest.mark.parametrize("name", ["./rewards.py", "rewards.py:score", "my_package.rewards.score"])
def test_a_function_in_place_of_a_scorers_name_says_which_flag_takes_it(name):
    with pytest.raises(OwnerError) as caught:
        prepare(None, ["--hf-checkpoint", "x", "--prompt-data", "y", "--num-rollout", "1", "--rollout-batch-size", "4",
                       "--rm-type", name])
    assert caught.value.code == "part-not-enabled" and "--custom-rm-path" in caught.value.fix


def test_a_plugin_that_is_installed_and_not_enabled_is_named_for_its_option_even_where_the_list_refuses_the_flag(
        monkeypatch):
    """Somebody's plugin for what Miles has not."""
    from dataclasses import replace

    from miles_core.config.options import Option
    from miles_core.plugins import select

    (tis,) = (one for one in readable() if one.name == "tis")
    option = Option("tis", "dumper_enable", "bool", False, "", ("--dumper-enable",))
    tis = replace(tis, options={option.name: option})
    monkeypatch.setattr(select, "readable", lambda hook=None: [tis])
    with pytest.raises(UnknownKeyError, match="belongs to plugin 'tis'"):
        load(None, ["--dumper-enable"])
    assert refusal("--dumper-enable") is not None


def test_a_folder_of_details_is_where_rollouts_are_saved():
    debug = load(None, ["--dump-details", "runs/a"]).config.debug
    assert debug.save_debug_rollout_data == "runs/a/rollout_data/{rollout_id}"


def test_words_that_are_taken_of_a_flag_that_is_refused():
    taken = load(None, ["--train-env-vars", '{"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"}'])
    assert any("--train-env-vars" in note for note in taken.notes)
    with pytest.raises(UnknownKeyError):
        load(None, ["--train-env-vars", '{"NVTE_FUSED_ATTN":"0"}'])
    assert any("--spec" in note for note in load(None, ["--spec", "miles_plugins.models.glm4", "get_glm_spec"]).notes)
    with pytest.raises(UnknownKeyError):
        load(None, ["--spec", "mine", "spec"])


@pytest.mark.parametrize(("words", "expected"), [
    ([], (0.2, 0.01, 0.999, "linear")),
    (["--eps-clip", "0.3", "--weight-decay", "0.1", "--lr-decay-style", "constant"], (0.3, 0.1, 0.999, "constant")),
    (["--train-backend", "fsdp", "--adam-beta2", "0.98"], (0.2, 0.0, 0.98, "constant")),
])
def test_what_a_launch_script_leaves_out_is_what_its_program_takes(words, expected):
    """As in utils/arguments.py and fsdp_utils/arguments.py of radixark Miles, and Megatron-LM's arguments.py."""
    config = of_trainer(load(None, [*words, *SCRIPTS["train.py"]]).config)
    optimizer = config.optimizer
    assert (config.algorithm.eps_clip, optimizer.weight_decay, optimizer.adam_beta2,
            optimizer.lr_decay_style) == expected
    assert "algorithm.eps_clip" in config.origin, "so the upper width follows it"


def test_an_eval_config_becomes_eval_datasets(tmp_path):
    text = ("eval: {defaults: {top_p: 0.7}, datasets: [{name: a, path: a.jsonl, n_samples_per_eval_prompt: 4}, "
            "{name: b, path: b.jsonl, top_p: 1.0}]}")
    (tmp_path / "eval.yaml").write_text(text)
    for given in (str(tmp_path / "eval.yaml"), f"base64:{base64.b64encode(text.encode()).decode()}"):
        assert load(None, ["--eval-config", given]).config.eval.datasets == [
            {"top_p": 0.7, "name": "a", "path": "a.jsonl", "n_samples": 4},
            {"top_p": 1.0, "name": "b", "path": "b.jsonl"}]
    with pytest.raises(DataError) as caught:
        load(None, ["--eval-config", "base64:no"])
    assert caught.value.code == "eval-config-unreadable"


@pytest.mark.parametrize(("flags", "plugin", "option", "value"), [
    (["--use-wandb", "--wandb-project", "sums", "--disable-wandb-random-suffix"], "wandb", "project", "sums"),
    (["--use-wandb", "--wandb-entity", "us", "--wandb-save-dir", "d"], "wandb", "entity", "us"),
    (["--use-mlflow", "--mlflow-experiment-name", "sums"], "mlflow", "experiment_name", "sums"),
    (["--use-prometheus", "--prometheus-port", "9100"], "telemetry", "port", 9100),
])  # fmt: skip
def test_a_trackers_switch_enables_its_plugin_and_options(flags, plugin, option, value):
    assert load(None, flags).config.options[plugin][option] == value


def test_a_trackers_options_without_its_switch_change_nothing():
    loaded = load(None, ["--wandb-project", "sums", "--mlflow-run-name", "a", "--prometheus-port", "9100"])
    assert not {"wandb", "mlflow", "telemetry"} & {one.manifest.name for one in loaded.selected}
    noted = [note.partition(" ")[0] for note in loaded.notes]
    assert noted == ["--wandb-project", "--mlflow-run-name", "--prometheus-port"]


def test_a_key_goes_to_the_environment_and_nowhere_else(monkeypatch):
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setattr(sys, "argv", ["miles", "run", "--use-wandb", "--wandb-key", key, f"--wandb-key={key}"])
    loaded = load(None, ["--use-wandb", "--wandb-key", key])
    assert os.environ["WANDB_API_KEY"] == key
    assert key not in repr(loaded) and key not in " ".join(sys.argv)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        load(None, ["--wandb-key"])
