"""Every spelling that is accepted changes the key that it names; every other gets a sentence with what to write."""

import pytest
from miles_megatron.flags import megatron_lm_flags
from miles_megatron.surface import surface

from miles_core.config.load import load
from miles_core.config.options import options_of
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError, OwnerError, UnknownKeyError

OPTIONS = {option.key: option for table, kind in TABLES.items() for option in options_of(table, kind).values()}


def legal(kind: str, default: object, choices=()):
    """(words, value) that the type allows and that is not the default."""
    if choices and kind.startswith("list"):
        others = [choice for choice in choices if choice not in default]
        return others, others
    if choices:
        other = next((choice for choice in choices if choice != default), choices[0])
        return [str(other)], other
    if kind.startswith("list[int") or kind.startswith("list[float"):
        return ["3", "4"], [3, 4]
    if kind.startswith("list"):
        return ["one", "two"], ["one", "two"]
    if kind.startswith("dict"):
        return ['{"a": 1}'], {"a": 1}
    return {"int": (["7"], 7), "float": (["0.0625"], 0.0625), "bool": ([], True), "str": (["words"], "words"),
            "dtype": (["bf16"], "bf16")}[kind.split(" | ")[0]]  # fmt: skip


def value_of(config, key):
    table, _, name = key.partition(".")
    found = config.surface(table) if table in config.surfaces else getattr(config, table)
    return found[name] if isinstance(found, dict) else getattr(found, name)


def accepted(config_key: str, argv: list[str], value: object) -> None:
    """Load a command line that sets one key, and look at it and at its origin."""
    config = load(None, argv).config
    assert value_of(config, config_key) == value
    assert config.origin[config_key].where == argv[0]


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if not option.type.startswith("list[dict")])
def test_every_key_is_a_flag(key):
    option = OPTIONS[key]
    words, value = legal(option.type, option.default, option.choices)
    accepted(key, [f"--{option.name.replace('_', '-')}", *words], value)
    if option.is_bool:
        accepted(key, [f"--no-{option.name.replace('_', '-')}"], False)


@pytest.mark.parametrize("name", [name for name, flag in megatron_lm_flags().items() if flag.status == "accepted"])
def test_every_flag_of_megatron_lm_that_is_accepted_sets_its_fields(name):
    flag = megatron_lm_flags()[name]
    expected = {own(key): value for key, value in (flag.set or {}).items()}
    words = []
    if flag.key is not None:
        key = own(flag.key)
        if key in OPTIONS:
            kind, default, choices = OPTIONS[key].type, OPTIONS[key].default, OPTIONS[key].choices
        else:
            field = surface()[flag.key]
            kind, default = field.type, field.default
            choices = kind[7 : kind.index("]")].split("|") if kind.startswith("choice[") else ()
        words, expected[key] = legal(kind, default, choices)
    config = load(None, [name, *words]).config
    for key, value in expected.items():
        assert value_of(config, key) == value, key
        assert config.origin[key].where == name


def own(key):
    return key.removeprefix("miles:") if key.startswith("miles:") else f"megatron.{key}"


OWN = {option.name for option in OPTIONS.values()}


@pytest.mark.parametrize("name", [name for name in surface() if name not in OWN])
def test_every_field_of_megatron_core_is_a_flag_or_says_why_not(name):
    field = surface()[name]
    choices = field.type[7 : field.type.index("]")].split("|") if field.type.startswith("choice[") else ()
    words, value = legal(field.type, field.default, choices)
    flag = "--" + name.replace("_", "-")
    try:
        loaded = load(None, [flag, *words])
    except UnknownKeyError as refusal:
        assert refusal.fix
        return
    if loaded.notes:
        assert "changes nothing" in loaded.notes[0] and not loaded.config.surface("megatron")
    elif flag not in megatron_lm_flags():
        assert loaded.config.surface("megatron")[name] == value


@pytest.mark.parametrize(("argv", "message"), [
    (["--rollout-batchsize", "3"], "did you mean --rollout-batch-size"),
    (["--eps-clp", "3"], "did you mean --eps-clip"),
    (["--tensor-model-paralel-size", "1"], "did you mean --tensor-model-parallel-size"),
    (["--rm-type", "math", "--no-math.boxed-only"], "did you mean --math.no-boxed-only"),
    (["--multi-lora-backend-path", "a.b"], "one adapter"), (["--dumper-enable"], "hook microbatch"),
    (["--fp16"], "--bf16"),
    (["word"], "miles run"), (["--lr"], "one value"), (["--lr", "1", "2"], "one value"), (["--lr", "fast"], "float"),
    (["--use-kl-loss", "maybe"], "[flag-takes-true-or-false]"), (["--num-rollout", "2.5"], "int"),
    (["--kl-loss-type", "k7"], "k1, k2"), (["--apply-chat-template-kwargs", "{"], "JSON"),
])  # fmt: skip
def test_what_is_wrong_says_what_to_write(argv, message):
    with pytest.raises(ConfigError) as caught:
        load(None, argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["inf", "-Infinity", "nan", "1e999"])
@pytest.mark.parametrize("flag", ["--kl-loss-coef", "--min-lr", "--rm-weights", "--eval-temperature", "--adam-eps",
                                  "--moe-aux-loss-coeff", "--sglang-mem-fraction-static"])
def test_a_number_is_finite(flag, value):
    with pytest.raises(ConfigError) as caught:
        load(None, [flag, value])
    assert (caught.value.code, caught.value.who) == ("option-wrong-type", flag) and value in str(caught.value.got)


@pytest.mark.parametrize(("table", "key", "message"), [
    ("rollout", "rollout_batchsize", "did you mean 'rollout_batch_size'"),
    ("rollout", "lr", "it belongs in [optimizer]"), ("rollout", "n", "write --n-samples-per-prompt"),
    ("rolout", "x", "did you mean [rollout]"), ("sft", "x", "not enabled"),
    ("sglang", "server_concurency", "did you mean server_concurrency"),
    ("sglang", "router_polizy", "did you mean router_policy"), ("sglang", "model_path", "--hf-checkpoint"),
    ("server", "tp_size", "[table-unknown]"),
    ("perf", "fp16", "--bf16"), ("eval", "eval_config", "[[eval.datasets]]"),
])  # fmt: skip
def test_a_wrong_key_of_a_run_file_is_named_with_its_line(tmp_path, table, key, message):
    path = tmp_path / "run.toml"
    path.write_text(f"\n[{table}]\n{key} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value) and "run.toml:3" in str(caught.value)


def test_a_spelling_has_one_owner():
    from miles_core.config.flags import owners
    from miles_core.config.options import Option

    options = [Option("a", "x", "int", 1, "", ("--shared",)), Option("b", "y", "int", 1, "", ("--shared",))]
    with pytest.raises(OwnerError, match=r"a\.x and by b\.y.*\[flag-owned-twice\]"):
        owners(options)


def test_underscores_and_equals_signs_are_as_good():
    assert load(None, ["--rollout_batch_size=5"]).config.rollout.rollout_batch_size == 5
    assert load(None, ["--no-bf16"]).config.perf.bf16 is False
    loaded = load(None, ["--moe-layer-freq", "([0]*1+[1]*3)"])
    assert loaded.config.surface("megatron")["moe_layer_freq"] == [0, 1, 1, 1]
