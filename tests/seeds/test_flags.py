"""What Miles was asked for: every flag that its texts name is accepted in a run, or says what to write instead."""

import json
import socket
import sys
import tomllib
from contextlib import chdir
from pathlib import Path

import pytest

from miles_core.errors import MilesError
from miles_core.plugins.plan import Plan, prepare

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "plugins/miles-preflight/tests"))
from measure import argv  # noqa: E402 - the smallest correct run, which has its place there

SEEDS = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
PUBLISHED = json.loads((ROOT / "tests/integration/published.json").read_text(encoding="utf-8"))
LINES = {line["name"]: line for line in SEEDS["line"]}
FLAGS = [(one["flag"], one.get("value", "").split(), one) for one in SEEDS["flag"]]


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """(line) -> what `miles run --plan` would print of the smallest run with these flags."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan(line: dict) -> Plan:
        with chdir(ROOT), socket.create_server(("127.0.0.1", 0)) as listening:
            flags = [word.replace("{port}", str(listening.getsockname()[1])) for word in
                     (*line["flags"], *line.get("needs", []))]
            return prepare(None, argv({"flags": flags, "without": line.get("without", [])}, ROOT))

    return plan


def words_of(flags: list[str], flag: str) -> list[str]:
    """What follows a flag."""
    rest = flags[flags.index(flag) + 1:]
    return rest[:next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_planned_and_none_of_its_flags_is_passed_over(planned, name):
    plan, line = planned(LINES[name]), LINES[name]
    obeyed = {origin.where for origin in plan.config.origin.values()} | {one.origin for one in plan.selected}
    named = [(flag, words) for flag, words, one in FLAGS if one.get("line") == name]
    assert named, "a line is there for flags"
    for flag, words in named:
        assert words_of(line["flags"], flag) == words, flag
    missing = [word for word in line["flags"] if word.startswith("--") and word not in obeyed]
    assert not missing, f"nobody took {missing}"


def test_the_command_for_deepseek_v3_plans_with_its_config_json(planned, tmp_path):
    """Its plain checkpoint: training cannot start from the FP8 that is published."""
    config = next(one["config"] for one in PUBLISHED if one["repository"] == "deepseek-ai/DeepSeek-V3")
    tokenizer = {"added_tokens": [{"id": config["eos_token_id"], "content": "<|end|>"}], "normalizer": None}
    for name, content in {"config": config | {"quantization_config": None}, "tokenizer": tokenizer}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    line = LINES["mixture of experts"]
    flags = [str(tmp_path) if word == "path/to/deepseek-v3" else word for word in line["flags"]]
    plan = planned({"flags": [*flags, "--plan-without-weights"], "without": ["--apply-chat-template"]})
    layout = plan.config.surface("megatron")
    assert layout["sequence_parallel"] and layout["expert_tensor_parallel_size"] == 1
    assert sum(note.startswith(("sequence_parallel is", "expert_tensor_parallel_size is")) for note in plan.notes) == 2


@pytest.mark.parametrize(("flag", "words", "one"), [found for found in FLAGS if "says" in found[2]],
                         ids=[flag for flag, _, one in FLAGS if "says" in one])
def test_a_flag_that_is_not_here_says_what_to_write(planned, flag, words, one):
    try:
        said = "\n".join(planned({"flags": [flag, *words]}).notes)
    except MilesError as error:
        said = str(error)
    assert one["says"] in said
    assert "did you mean" not in said, "it is known, and no typo"


def test_every_flag_says_what_becomes_of_it():
    for flag, _, one in FLAGS:
        assert ("line" in one) != ("says" in one), flag
        assert one["seed"] in ("overview", "launch script", "training backends", "debugging") and one["feature"], flag
        assert "line" not in one or flag in LINES[one["line"]]["flags"], flag
