"""What is read from the sources is what SGLang's and smg's own parsers say, and what commands say they understand.

Needs a Python that has both, as tests/sglang does. Their imports take seconds, so this is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from miles_sglang import source, surface
from miles_sglang.arguments import command

from miles_core.config.check import check
from miles_core.config.load import load
from miles_core.types import NodeSlot

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("MILES_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")
LAUNCHER = ROOT / "tests" / "sglang" / "sglang_cpu.py"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=f"no SGLang for {PYTHON}")]

PARSERS = """
import argparse, json, sys
launcher, words = sys.argv[1], json.loads(sys.argv[2])
import runpy; kept = runpy.run_path(launcher, run_name="stand-ins")
from sglang.srt.server_args import ServerArgs, prepare_server_args
from smg.router_args import RouterArgs

def plain(value):
    try:
        json.dumps(value)
        return value
    except TypeError:
        return None

def actions(kind):
    parser = argparse.ArgumentParser(add_help=False)
    kind.add_cli_args(parser)
    return [dict(flags=a.option_strings, dest=a.dest, default=plain(a.default), kind=type(a).__name__,
                 choices=plain(a.choices and list(a.choices)), several=a.nargs not in (None, 0, "?"),
                 const=plain(getattr(a, "const_value", None))) for a in parser._actions]

args = prepare_server_args([*kept["CPU_FLAGS"], *words])
wanted = ("model_path", "port", "tp_size", "dtype", "context_length", "random_seed", "mem_fraction_static",
          "load_format", "custom_weight_loader", "chunked_prefill_size", "enable_metrics", "skip_server_warmup",
          "default_chat_template_kwargs", "schedule_policy", "trust_remote_code", "fp8_gemm_runner_backend", "nnodes")
print(json.dumps({"server": actions(ServerArgs), "router": actions(RouterArgs),
                  "args": {name: getattr(args, name) for name in wanted}}))
"""

FLAGS = ["--sglang-context-length", "96", "--sglang-mem-fraction-static", "0.3", "--sglang-chunked-prefill-size", "-1",
         "--sglang-default-chat-template-kwargs", '{"thinking": true}', "--sglang-schedule-policy", "lpm",
         "--sglang-fp8-gemm-backend", "triton", "--engine", "sglang", "--no-bf16", "--rollout-seed", "7"]


@pytest.fixture(scope="module")
def words(tiny):
    """The words after the program of the command of engine 2, without what only a GPU has."""
    needed = ["--hf-checkpoint", str(tiny / "qwen3"), "--prompt-data", "x", "--rollout-batch-size", "1",
              "--num-rollout", "1"]  # fmt: skip
    config = check(load(None, [*needed, *FLAGS]).config)[0]
    return command(config, NodeSlot(engine=2), 31999, None)[3:]


@pytest.fixture(scope="module")
def real(words):
    """What SGLang's parser and smg's are made of, and what SGLang makes of a command."""
    done = subprocess.run([PYTHON, "-W", "ignore", "-c", PARSERS, LAUNCHER, json.dumps(words)], capture_output=True,
                          text=True, timeout=300, env={**os.environ, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def site():
    done = subprocess.run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True,
                          text=True, check=True, timeout=60)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module", params=["server", "router"])
def both(request, site, real):
    """(read from the source, flag -> argparse action) of one program."""
    package = "sglang" if request.param == "server" else "smg"
    fields = surface._decode(package, "", **surface.read(package, site / package), installed=True)
    return fields, {flag: action for action in real[request.param] for flag in action["flags"]}


def test_every_flag_of_the_program_is_read_and_none_is_invented(both):
    known, actions = both
    deprecated = {flag for flag, action in actions.items() if action["kind"] == "DeprecatedAction"}
    pairs = {f"--no-{field.flag[2:]}" for field in known.fields.values() if field.form == "pair"}
    pairs |= {f"--no-{flag[2:]}" for field in known.fields.values() if field.form == "pair" for flag in field.also}
    read = set(known.spellings()) | set(known.old)
    assert read <= set(actions)
    assert set(actions) - read - pairs - deprecated <= {"--config", "--prefill", "--decode", "--encode"}


def test_every_flag_sets_the_field_that_the_program_sets(both):
    known, actions = both
    wrong = {flag: (name, actions[flag]["dest"]) for flag, name in known.spellings().items()
             if known.package == "sglang" and actions[flag]["dest"] != name}
    assert wrong == {}
    assert {flag: (actions[flag]["dest"], actions[flag]["const"]) for flag in known.old} == dict(known.old)


def test_defaults_and_choices_are_those_of_the_program(both):
    known, actions = both
    for field in known.fields.values():
        action = actions[field.flag]
        # argparse has none where the program takes that of the class, and we have none where it is computed.
        if action["default"] and field.default is not None:
            assert action["default"] == field.default, field
        choices = field.option("server").choices
        if choices and action["choices"]:
            assert set(choices) == set(action["choices"]) - {None}, field
        assert field.type.startswith("list") == action["several"] or field.form in ("json", "repeat"), field


def test_the_bundled_list_is_that_of_these_packages(site):
    assert surface.BUNDLED.read_text() == source.bundle(site)


def test_sglang_understands_a_command(real, words, tiny):
    assert real["args"] == {
        "model_path": str(tiny / "qwen3"), "port": 31999, "tp_size": 1, "dtype": "float32", "context_length": 96,
        "random_seed": 9, "mem_fraction_static": 0.3, "load_format": "dummy",
        "custom_weight_loader": ["miles_weights.load"], "chunked_prefill_size": -1, "enable_metrics": True,
        "skip_server_warmup": True, "default_chat_template_kwargs": {"thinking": True},
        "schedule_policy": "lpm", "trust_remote_code": False, "fp8_gemm_runner_backend": "triton", "nnodes": 1,
    }
