"""The command line as a user meets it: help, versions, exit codes, misspelt words."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import click
import click.testing
import pytest
from miles_testing.forked import miles

from miles_core.cli import COMMANDS, cli
from miles_core.config.tables import TABLES

GOOD = ("--hf-checkpoint", "tiny", "--prompt-data", "x/train.jsonl", "--rollout-batch-size", "4", "--num-rollout", "1",
        "--rm-type", "math")  # fmt: skip


def test_help_names_every_command_and_imports_none(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name}\s+{re.escape(text)}$", result.output, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(invoke, name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name}")


def test_the_help_of_run_has_the_tables_of_the_core_and_of_every_run_and_each_option(invoke):
    text = invoke("run", "--help").output
    assert re.findall(r"^\[(\w+)\]", text, re.MULTILINE) == [*TABLES, "sglang", "local", "ray"]
    assert len(TABLES) == 8
    words = set(re.findall(r"--[\w-]+", text))
    from miles_core.cli.completion import options
    from miles_core.config.flags import spellings

    assert {spellings(option)[0][0] for option in options() if option.table in TABLES} <= words
    assert "typing" not in text and "NoneType" not in text


def test_the_help_of_run_fits_a_hundred_columns(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, invoke("run", "--help").output.splitlines())) <= 100


def commands(group=cli, words=()):
    """The words of every command there is."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            yield from commands(found, (*words, name)) if isinstance(found, click.Group) else ()
            yield *words, name


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_what_a_command_says_of_itself_fits_a_terminal(invoke, words):
    """Of 80 columns, the examples too, which click leaves as they are."""
    text = invoke(*words, "--help").output.partition("\nOptions:")[0]
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("Usage:")] == []


def examples():
    """The lines of the help that show a run file of the repository, and write nothing."""
    for words in commands():
        for line in click.testing.CliRunner().invoke(cli, [*words, "--help"]).output.splitlines():
            if re.match(r" +miles (plugins (check|why|graph)|run .*--plan)", line) and " examples/" in line:
                yield re.split(r"  | \| ", line.strip())[0]


@pytest.mark.parametrize("line", sorted(set(examples())))
def test_an_example_of_the_help_does_what_it_shows(call, monkeypatch, line):
    monkeypatch.chdir(Path(__file__).parents[3])
    code, out, err = call(*line.split()[1:])
    assert (code, err) == (0, "") and out


@pytest.mark.parametrize("words", [("report", "{}"), ("run", *GOOD, "--plugin", "./{}.py", "--plan")],
                         ids=["a run", "a plugin's file"])
def test_an_error_cannot_steer_the_terminal_and_has_colour_only_where_it_may(call, monkeypatch, words):
    hostile = "a\x1b]0;title\x07\x1b[2J\u202eb"
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        code, _, err = call(*(word.replace("{}", hostile) for word in words))
        assert code == 2 and err.startswith("Error: " if no_color else "\x1b[31m\x1b[1mError: \x1b[0m")
        assert "]0;title" in err
        assert not {"\x1b", "\x07", "\u202e"} & set(err.rpartition("Error: ")[2].removeprefix("\x1b[0m"))


def test_version(invoke):
    assert invoke("--version").output.strip() == importlib.metadata.version("miles-core")


@pytest.mark.parametrize(("words", "meant"), [(["repor"], "report"), (["plugins", "lits"], "list")])
def test_a_misspelt_command_is_answered_with_the_nearest(call, words, meant):
    code, _, err = call(*words)
    assert code == 2
    assert f"Did you mean {meant!r}?" in err


def test_a_command_that_resembles_none(call):
    code, _, err = call("xyzzy")
    assert code == 2 and "No such command 'xyzzy'" in err and "Did you mean" not in err


@pytest.mark.parametrize(("words", "plugin"), [(["report", "runs/a"], "report"), (["plugins", "new", "a"], "testing")])
def test_a_command_of_a_plugin_that_is_not_installed_says_what_to_install(call, monkeypatch, words, plugin):
    from miles_core.plugins import select

    there = [one for one in select.installed() if one.name != plugin]
    monkeypatch.setattr(select, "installed", lambda: there)
    code, _, err = call(*words)
    assert code == 2 and f"pip install miles-{plugin};" in err and len(err.strip().splitlines()) == 1


def test_no_arguments_show_the_help(call):
    code, out, err = call()
    assert code == 2
    assert "Commands:" in out + err


def test_a_plan(call):
    code, out, err = call("run", *GOOD, "--plan")
    assert (code, err) == (0, "")
    assert out.startswith("plan ")
    assert "plugin math" in out and "rollout.rollout_batch_size = 4  (--rollout-batch-size)" in out


@pytest.mark.parametrize(("saved", "begins"), [
    (None, "starts fresh, from the weights of "), ("2", "resumes after 2 rollouts, from runs/run/saved"),
])
def test_a_plan_begins_with_what_is_trained_how_much_where_it_writes_and_where_it_begins(call, tmp_path, saved, begins):
    if saved is not None:
        (tmp_path / "runs/run/saved/iter_0000002").mkdir(parents=True)
        (tmp_path / "runs/run/saved/latest_checkpointed_iteration.txt").write_text(saved)
    (tmp_path / "mine.py").write_text(
        "from miles_core import hookimpl\nclass Mine:\n    @hookimpl\n    def trainer(self):\n        return self\n")
    code, out, _ = call("run", *GOOD, "--save", "{run_dir}/saved", "--load", "{run_dir}/saved", "--num-rollout", "9",
                        "--trainer", "mine", "--plugin", "./mine.py", "--plan")  # another trainer saves as it likes
    _, head, plugins = out.split("\n\n")[:3]
    trains, size, writes, begin = head.splitlines()
    assert code == 0 and trains.startswith("trains ") and "x/train.jsonl" in trains and "math" in trains
    assert "9 rollouts of 4 prompts x " in size and "runs/run" in writes and begin.startswith(begins)
    assert plugins.count("megatron") == plugins.count("in every run") == 1


@pytest.mark.parametrize(("first", "nothing"), [("9", True), ("8", False)])
def test_a_plan_says_that_nothing_is_left_to_train(call, first, nothing):
    code, out, _ = call("run", *GOOD, "--num-rollout", "9", "--start-rollout-id", first, "--plan")
    assert code == 0 and ("trains nothing" in out) is nothing


def test_a_plan_as_json(call):
    code, out, _ = call("run", *GOOD, "--plan", "--json")
    assert code == 0
    assert json.loads(out)["options"]["rollout.rollout_batch_size"] == 4


@pytest.mark.parametrize("words, said", [
    (("--rollout-batch-siz", "4"), "did you mean --rollout-batch-size"),
    (("--rollout-batch-size", "many"), "--rollout-batch-size: rollout.rollout_batch_size should be"),
    (("--engine-dtype", "int8"), "should be one of float32, bfloat16"),
    (("--plugin", "grppo"), "did you mean 'grpo'"),
    (("--plugin", "./nothing.py"), "cannot be read"),
    (("--sglang-config", "x.yaml"), "cannot be read"),
    (("--multi-lora-backend-path", "a.b"), "has no place here"),
    (("--sglang-mem-fraction-statik", "0.7"), "did you mean --sglang-mem-fraction-static"),
    (("--num-steps-per-rollout", "3"), "do not divide"),
    (("--prompt-source", "parquet"), "the prompt_source 'parquet'"),
    (("--tensor-model-parallel-size", "2"), "1 rank does not divide"),
])  # fmt: skip
def test_what_cannot_run_is_refused_with_exit_code_2_and_a_fix(call, words, said):
    code, out, err = call("run", *GOOD, *words, "--plan")
    assert (code, out) == (2, "")
    assert err.startswith("Error: ") and said in err and "Fix: " in err
    assert "Traceback" not in err


def test_a_run_file_that_is_not_there(call):
    code, _, err = call("run", "nowhere.toml")
    assert code == 2 and "nowhere.toml: " in err and "[run-file-missing]" in err


def test_a_run_file_that_is_called_otherwise(call, tmp_path):
    (tmp_path / "recipe.toml").write_text("[rollout]\n")
    code, _, err = call("run", "recipe")
    assert code == 2 and "'recipe.toml'" in err and "[run-file-missing]" in err


def test_a_key_in_a_run_file_is_blamed_on_its_line(call, tmp_path):
    (tmp_path / "bad.toml").write_text("[rollout]\nnum_rollout = 1\nrollout_batch_sise = 4\n")
    code, _, err = call("run", "bad.toml")
    assert code == 2 and "bad.toml:3" in err and "rollout_batch_size" in err


def test_miles_toml_is_read_when_no_run_file_is_named(call, tmp_path):
    (tmp_path / "miles.toml").write_text('[rollout]\nrollout_batch_size = 8\n')
    code, out, _ = call("run", *[word for word in GOOD if word not in ("--rollout-batch-size", "4")], "--plan")
    assert code == 0 and "rollout.rollout_batch_size = 8  (miles.toml:2)" in out


def test_a_file_plugin_offers_named_parts(call, tmp_path):
    (tmp_path / "best.py").write_text(
        "from miles_core import hookimpl\n\n\nclass Best:\n    '''The best of the scores.'''\n\n    @hookimpl\n"
        "    def combine_rewards(self, sample, weights):\n        return max(sample.rewards.values())\n"
    )
    code, out, _ = call("run", *GOOD, "--plugin", "./best.py", "--combine-rewards", "best", "--plan")
    assert code == 0
    assert re.search(r"combine_rewards +best +plugin best +\(--combine-rewards\)", out)


def test_plugins_list(invoke):
    text = invoke("plugins", "list").output
    for name in ("grpo", "math", "sft", "dapo-filter", "tensorboard"):
        assert re.search(rf"^{name} ", text, re.MULTILINE)


def test_a_manifest_that_is_behind_its_code(call, tmp_path):
    project = tmp_path / "miles-x"
    package = project / "src" / "miles_x"
    package.mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project.entry-points."miles.plugins"]\nx = "miles_x.plugin:X"\n')
    (package / "plugin.py").write_text(
        "from miles_core import hookimpl\n\n\nclass X:\n    '''X.'''\n\n    @hookimpl\n    def finish(self):\n"
        "        pass\n")
    code, _, err = call("plugins", "manifest", "--check", project)
    assert code == 2 and "miles plugins manifest --write" in err
    assert call("plugins", "manifest", "--write", project)[0] == 0
    assert call("plugins", "manifest", "--check", project)[0] == 0


def test_a_report_of_nothing(call):
    code, _, err = call("report", "nowhere")
    assert code == 2 and "[not-a-run-directory]" in err


def test_flags_and_hooks_print_pages(invoke):
    assert "# Flags" in invoke("flags").output
    assert "# Hooks" in invoke("hooks").output


def test_commands_are_lazy():
    assert set(cli.commands) == set(), "nothing is registered, so nothing is imported"


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_ends_the_process_with_the_code_that_it_exits_with(call, monkeypatch, code):
    @click.command()
    @click.pass_context
    def leaves(ctx):
        ctx.exit(code)

    monkeypatch.setattr("miles_core.cli.of_plugin", lambda name, group: {"leaves": leaves}.get(name))
    assert call("leaves") == (code, "", "")


def test_the_exit_codes_of_a_diff(call, tmp_path):
    from miles_core.record.console import Console
    from miles_core.record.directory import RunDirectory
    from miles_core.record.journal import Journal

    for name, weight in (("a", "1"), ("same", "1"), ("other", "2")):
        with RunDirectory(tmp_path / name) as directory:
            Journal(directory, Console()).hashes(0, {"w": weight}, {"tokens": "1"}, 1.0)
    code, out, err = call("diff", "a", "same")
    assert (code, err) == (0, "") and "hashes are the same" in out
    code, out, err = call("diff", "a", "other")
    assert (code, err) == (1, "") and "first difference: weights w" in out
    code, out, err = call("diff", "a", "nowhere")
    assert (code, out) == (2, "") and "[not-a-run-directory]" in err


def onto(path: str) -> None:
    """Let the standard output of this process be a file."""
    os.dup2(os.open(path, os.O_WRONLY), 1)


@pytest.mark.parametrize("words", [["--version"], ["run", "--help"], ["run", *GOOD, "--plan"], ["plugins", "list"]])
def test_an_output_on_a_full_disk_is_one_sentence(tmp_path, words):
    done = miles(words, tmp_path, before=functools.partial(onto, "/dev/full"))
    assert done.code == 1 and "No space left" in done.err and len(done.err.splitlines()) == 1


def test_a_name_that_no_encoding_has_is_printed(tmp_path):
    from miles_core.record.console import Console
    from miles_core.record.directory import RunDirectory
    from miles_core.record.journal import Journal

    for name in ("a", "b"):
        with RunDirectory(tmp_path / name) as directory:
            Journal(directory, Console()).events.append("metrics", 0, metrics={f"{name}/\ud800": 1.0})
    done = miles(["diff", "a", "b"], tmp_path)
    assert (done.code, done.err) == (1, "") and "metrics a/\ufffd" in done.out
    done = miles(["report", "a", "-o", "-"], tmp_path)
    assert (done.code, done.err) == (0, "") and '"a/?":{' in done.out
