"""Shell completion: the script is there, and completes commands, flags and values."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.shell_completion import ShellComplete

from miles_core.cli import cli
from tests.unit.plugins.installed import install


def complete(*words: str) -> dict[str, str | None]:
    """What is offered for the last word, with its help."""
    items = ShellComplete(cli, {}, "miles", "_MILES_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return {item.value: item.help for item in items}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_produced(invoke, shell):
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_MILES_COMPLETE" in result.output and "miles" in result.output


def test_bash_understands_its_script(invoke, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    (tmp_path / "script").write_text(invoke("completion", "bash").output)
    assert subprocess.run([bash, "-n", tmp_path / "script"]).returncode == 0


def test_an_unknown_shell(call):
    code, _, err = call("completion", "tcsh")
    assert code == 2 and "'bash', 'zsh', 'fish'" in err


def test_commands():
    assert set(complete("re")) == {"report", "reproduce"}


def test_a_doctor_takes_a_folder_and_writes_a_file():
    assert set(complete("doctor", "--")) >= {"--json", "--bundle", "--with-samples"}
    for words, kind in ((["doctor", ""], "dir"), (["doctor", "--bundle", ""], "file")):
        items = ShellComplete(cli, {}, "miles", "_MILES_COMPLETE").get_completions(words[:-1], words[-1])
        assert [item.type for item in items] == [kind]


def test_a_diff_takes_two_folders_or_run_files():
    """A shell completes folders where it completes files."""
    assert set(complete("d")) == {"diff", "doctor"} and set(complete("diff", "--j")) == {"--json"}
    for words in (["diff", ""], ["diff", "runs/a", ""]):
        items = ShellComplete(cli, {}, "miles", "_MILES_COMPLETE").get_completions(words[:-1], words[-1])
        assert [item.type for item in items] == ["file"]


def test_flags_of_every_table():
    assert complete("run", "--rollout-batch")["--rollout-batch-size"] == "Prompts drawn per rollout."
    assert "--advantage-estimator" in complete("run", "demo.toml", "--lr", "1e-6", "--adv")
    assert {"--plan", "--plugin"} <= set(complete("run", "--pl"))
    assert "--no-bf16" in complete("run", "--no-b")


def test_flags_of_megatron_core_and_of_plugins():
    assert "--tensor-model-parallel-size" in complete("run", "--tensor")
    assert {"--tis.use-tis", "--tis.no-use-tis"} <= set(complete("run", "--tis."))


def test_values():
    assert set(complete("run", "--kl-loss-type", "k")) == {"k1", "k2", "k3"}
    assert {"grpo", "gspo", "cispo", "rloo", "sft"} <= set(complete("run", "--advantage-estimator", ""))
    assert "dapo-filter" in complete("run", "demo.toml", "--plugin", "da")


def test_names_that_installed_plugins_of_others_offer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "theirs")
    assert "theirs-reward" in complete("run", "--rm-type", "the")


def test_anything_else_is_a_file():
    items = ShellComplete(cli, {}, "miles", "_MILES_COMPLETE").get_completions(["run"], "examples/")
    assert [item.type for item in items] == ["file"]


def test_conversions():
    assert {"hf-to-dist", "dist-to-hf", "hf-to-fp8"} <= set(complete("convert", ""))
    assert "--hf-checkpoint" in complete("convert", "dist-to-hf", "--hf")
    assert set(complete("convert", "hf-to-dist", "--dtype", "b")) == {"bfloat16"}
    assert "grpo" in complete("convert", "hf-to-dist", "--plugin", "gr")
