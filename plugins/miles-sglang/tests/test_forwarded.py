"""Every argument of SGLang and of its router is a flag and a key of [sglang], is checked, and reaches the command."""

import json

import pytest
from miles_sglang import forwarded
from miles_sglang.plugin import SglangOptions, sglang_options
from miles_sglang.surface import bundled

from miles_core.config.load import load
from miles_core.config.options import options_of
from miles_core.errors import ConfigError, UnknownKeyError

OWN = {flag for option in options_of("sglang", SglangOptions).values()
       for flag in (f"--{option.name.replace('_', '-')}", *option.flags)}
PREFIX = {"server": "--sglang-", "router": "--router-"}


@pytest.fixture(autouse=True)
def the_bundled_versions(monkeypatch):
    """The same surfaces, whatever is installed."""
    monkeypatch.setattr(forwarded, "surface_of",
                        lambda table: bundled({"server": "sglang", "router": "smg"}[table]))


def sample(field):
    """(words, value) of a value that is not the default."""
    option = field.option("server")
    if option.is_bool:
        return [], True
    if option.choices:
        other = next(choice for choice in option.choices if choice != field.default)
        return [str(other)], other
    if field.form == "json":
        value = {"list[object]": [{"a": 1}], "list[str]": ["a", "b"], "list[int]": [1, 2]}.get(
            field.type.split(" | ")[0], {"a": [1, None]})
        return [json.dumps(value)], value
    if option.is_list:
        words = ["0.5", "1.5"] if "float" in field.type else ["3", "4"]
        return words, words if "str" in field.type else [json.loads(word) for word in words]
    return {"int": (["7"], 7), "float": (["0.625"], 0.625), "str": (["words"], "words")}[field.type.split(" | ")[0]]


FIELDS = [(table, field) for table, package in (("server", "sglang"), ("router", "smg"))
          for field in bundled(package).fields.values()]
FLAGS = [(table, field, flag) for table, field in FIELDS for flag in (field.flag, *field.also)
         if PREFIX[table] + flag[2:] not in OWN]


def test_every_field_is_a_flag_a_key_and_words_of_the_command(tmp_path):
    """One pass over all: a test for each would take as long as everything else here together."""
    for table, field, flag in FLAGS:
        words, value = sample(field)
        argv = [PREFIX[table] + flag[2:], *words]
        if field.name in forwarded.OWNED[table]:
            with pytest.raises(UnknownKeyError, match="does not apply"):
                forwarded.from_flag(given(argv))
            continue
        [one] = forwarded.from_flag(given(argv))
        key, typed = forwarded.typed(one)
        assert (key, typed) == (f"{table}.{field.name}", value), argv
        said = forwarded.words(table, {field.name: typed})
        if value is not None:
            assert said[0] == field.flag
            spelled = {"json": words, "switch": [], "pair": [], "repeat": ["3", field.flag, "4"]}.get(field.form, words)
            assert said[1:] == spelled, argv


def given(argv):
    from miles_core.config.flags import split

    return split(argv)[0]


def test_flags_and_keys_reach_the_configuration_with_who_set_them(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[sglang]\nserver_concurrency = 9\nmem_fraction_static = 0.8\nrouter_policy = "random"\n'
                    'cuda_graph_config = { decode = { backend = "full" } }\n')
    config = load(path, ["--sglang-mem-fraction-static", "0.7", "--router-queue-size", "3"]).config
    assert sglang_options(config).server_concurrency == 9
    graphs = {"decode": {"backend": "full"}}
    assert config.surface("server") == {"mem_fraction_static": 0.7, "cuda_graph_config": graphs}
    assert config.surface("router") == {"policy": "random", "queue_size": 3}
    assert config.origin["server.mem_fraction_static"].where == "--sglang-mem-fraction-static"
    assert config.origin["router.policy"].where == "run.toml:4"


@pytest.mark.parametrize(("argv", "server"), [
    (["--no-sglang-dllm-fdfo"], {"dllm_fdfo": False}), (["--sglang-no-dllm-fdfo"], {"dllm_fdfo": False}),
    (["--no-sglang-enable-metrics"], {"enable_metrics": False}),
    (["--sglang-enable-metrics", "false"], {"enable_metrics": False}),
    (["--sglang-cuda-graph-bs", "1", "2"], {"cuda_graph_bs_decode": [1, 2]}),
    (["--sglang-disable-piecewise-cuda-graph"], {"cuda_graph_backend_prefill": "disabled"}),
    (["--sglang-context-length", "32Ki"], {"context_length": 32768}),
    (["--sglang-context-length", "1.5k"], {"context_length": 1500}),
    (["--sglang-chunked-prefill-size", "-1"], {"chunked_prefill_size": -1}),
    (["--sglang-kv-cache-dtype=fp8_e4m3"], {"kv_cache_dtype": "fp8_e4m3"}),
])
def test_spellings(argv, server):
    assert load(None, argv).config.surface("server") == server


def test_an_own_option_needs_no_prefix():
    for option in options_of("sglang", SglangOptions).values():
        dashed = option.name.replace("_", "-")
        assert f"--{dashed}" in option.flags and (not option.is_bool or f"--no-{dashed}" in option.off)


def test_an_own_option_wins_over_an_argument_of_the_same_spelling():
    config = load(None, ["--sglang-router-port", "7", "--router-ip", "h"]).config
    options = sglang_options(config)
    assert (options.router_port, options.router_ip, config.surface("router")) == (7, "h", {})


@pytest.mark.parametrize(("argv", "message"), [
    (["--sglang-mem-fraction-statik", "0.7"], "did you mean --sglang-mem-fraction-static?"),
    (["--sglang-server-concurency", "7"], "did you mean --sglang-server-concurrency?"),
    (["--router-polizy", "7"], "did you mean --router-policy?"),
    (["--sglang-xyzzy"], "checked against SGLang 0.5.16, which is not installed here"),
    (["--router-xyzzy"], "checked against smg 1.13.0"),
    (["--sglang-port", "1"], "--placement decides"), (["--sglang-model-path", "x"], "--hf-checkpoint"),
    (["--sglang-random-seed", "1"], "--rollout-seed"), (["--sglang-enable-memory-saver"], "--offload-rollout"),
    (["--sglang-custom-weight-loader", "a.b"], "which verifies them"), (["--router-worker-urls", "x"], "which servers"),
    (["--sglang-attention-backend", "abacus"], "should be one of triton"),
    (["--sglang-mem-fraction-static"], "[flag-takes-one-value]"), (["--sglang-mem-fraction-static", "high"], "float"),
    (["--sglang-context-length", "32q"], "int"), (["--no-sglang-page-size"], "write --sglang-page-size VALUE"),
    (["--no-sglang-enable-multimodal"], "only be switched on"),
    (["--sglang-forward-hooks", "[1"], "JSON"), (["--sglang-cuda-graph-config", "{"], "JSON"),
    (["--sglang-enable-ep-moe"], "--sglang-ep-size"),
    (["--eval-sglang-mem-fraction-static", "0.5"], "--eval-engine-addrs"),
])  # fmt: skip
def test_what_is_wrong_says_what_to_write(argv, message):
    with pytest.raises(ConfigError) as caught:
        load(None, argv)
    assert message in str(caught.value)


def test_every_field_that_miles_sets_is_one():
    for table, owned in forwarded.OWNED.items():
        assert set(owned) <= set(forwarded.surface_of(table).fields)
