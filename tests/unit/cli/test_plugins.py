"""`miles plugins`: every command works beside a broken and a hostile plugin, and imports none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.plugins.installed import BODY, install

ROOT = Path(__file__).parents[3]
DEMO = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1", "--rm-type",
        "good-reward", "--plugin", "good"]  # fmt: skip
UNBINDABLE = BODY.replace("def score(self, sample)", "def score(self, sampel)")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site folder with a good plugin, one without manifest, one that must not run, and some whose code is wrong."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "good", stated={"presets": {"calm": {"plugins": ["good"], "values": {"good.width": 1}}}})
    install(folder, "ahead", core=">=9.9")
    install(folder, "broken", manifest=False)
    install(folder, "hostile", code=f"open({str(folder / 'trace')!r}, 'w').close()\n")
    install(folder, "raises", code="raise RuntimeError('no such device')\n")
    install(folder, "unbindable", body=UNBINDABLE)
    return folder


@pytest.fixture
def miles(site, tmp_path):
    """(words) -> (exit status, stdout, stderr) of a process that sees the site folder."""

    def run(*words: object) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", "from miles_core.cli import main; main()", *map(str, words)], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
            capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    yield run
    assert not (site / "trace").exists(), "a plugin that nobody named has run"


def test_list_shows_all_of_them_and_says_which_cannot_be_read(miles):
    code, out, _ = miles("plugins", "list")
    assert code == 0
    assert "good              miles-good 1.0" in out and "hostile           miles-hostile 1.0" in out
    lines = out.splitlines()
    assert "cannot be read" in lines[next(n for n, line in enumerate(lines) if line.startswith("broken")) + 1]
    assert lines.index("official") < lines.index("third party") < out[:out.index("good  ")].count("\n")
    assert "Offers the reward good." in out and "miles-core>=9.9" in out and max(map(len, lines)) <= 100
    rows = {row["name"]: row for row in json.loads(miles("plugins", "list", "--json", "--all")[1])}
    assert rows["good"]["offers"] == ["reward:good-reward"] and rows["megatron"]["distribution"] == "miles-megatron"
    assert "no manifest" in rows["broken"]["error"]
    assert {row["kind"] for row in rows.values()} >= {"core", "official", "third party"}
    found = json.loads(miles("plugins", "list", "--json", "--hook", "reward")[1])
    found = {row["name"]: row["offers"] for row in found}
    assert found["good"] == ["reward:good-reward"] and "math" in found and not found.keys() & {"grpo", "broken"}
    assert "did you mean 'reward'" in miles("plugins", "list", "--hook", "rewrd")[2]


def test_info_tells_hooks_options_presets_author_and_place(miles, site):
    _, out, _ = miles("plugins", "info", "miles-good")
    assert "--plugin good," in out and "A. U. Thor" in out and str(site / "miles_good") in out
    assert "reward 'good-reward'  (named, rollout role" in out and "--good.width" in out and "calm" in out
    assert json.loads(miles("plugins", "info", "good", "--json")[1])["presets"]["calm"]["plugins"] == ["good"]
    code, _, err = miles("plugins", "info", "goood")
    assert code == 2 and "did you mean 'good'" in err


def test_check_binds_every_hook(miles):
    code, out, _ = miles("plugins", "check", *DEMO)
    assert code == 0 and "plugins fit each other: good" in out
    code, _, err = miles("plugins", "check", *DEMO, "--plugin", "unbindable")
    assert code == 2 and "unbindable" in err and "sampel" in err
    code, _, err = miles("plugins", "check", *DEMO, "--plugin", "raises")
    assert code == 2 and "raises" in err and "no such device" in err and "[plugin-import-failed]" in err


def test_why_tells_everybody_who_spoke(miles, tmp_path):
    (tmp_path / "run.toml").write_text('presets = ["calm"]\n[good]\nwidth = 2\n')
    _, out, _ = miles("plugins", "why", "good.width", "run.toml", *DEMO, "--good.width", "4")
    lines = [line.split(None, 2) if line.startswith("->") else line.split(None, 1) for line in out.splitlines()]
    assert [line[-2] for line in lines] == ["3", "1", "2", "4"]
    assert [line[-1] for line in lines] == ["default", "preset calm of plugin good", "run.toml:3", "--good.width"]
    code, _, err = miles("plugins", "why", "good.widht", *DEMO)
    assert code == 2 and "did you mean good.width" in err
    assert miles("plugins", "why", "lr", *DEMO, "--lr", "1e-5", "--no-live")[1].splitlines()[0] == "optimizer.lr"
    code, _, err = miles("plugins", "why", "--width", *DEMO, "--plugin", "hostile")
    assert code == 2 and "good.width or hostile.width" in err


def test_the_help_of_a_run_has_the_options_of_the_plugins_that_it_names(miles, tmp_path):
    (tmp_path / "run.toml").write_text('presets = ["calm"]\n')
    for words in (("--plugin", "good"), ("run.toml",)):
        code, out, err = miles("run", *words, "--help")
        assert code == 0 and "--good.width" in out and "[default: 3]" in out and not err
    assert "--good.width" not in miles("run", "--help")[1]
    code, out, err = miles("run", "--plugin", "goood", "-h")
    assert code == 0 and "--lr" in out and "did you mean 'good'" in err


def test_graph_has_every_owner_by_role(miles):
    _, out, _ = miles("plugins", "graph", *DEMO)
    assert "reward              named    good (good-reward)" in out
    assert out.index("driver role") < out.index("rollout role") < out.index("trainer role")
    assert '"rollout" -> "reward" -> "good (good-reward)"' in miles("plugins", "graph", "--dot", *DEMO)[1]


def test_a_locked_run_refuses_what_is_not_in_the_lock(miles, tmp_path):
    (tmp_path / "plugins.lock").write_text(miles("plugins", "lock", *DEMO)[1])
    assert miles("run", "--locked", "plugins.lock", "--plan", *DEMO)[0] == 0
    code, _, err = miles("run", "--locked", "plugins.lock", "--plan", *DEMO, "--good.width", "8")
    assert code == 2 and "good.width: 3 -> 8" in err
    (tmp_path / "other.lock").write_text(miles("plugins", "lock", *DEMO, "--good.width", "8")[1])
    code, out, _ = miles("plugins", "diff", "plugins.lock", "other.lock")
    assert code == 2 and "good.width: 3 -> 8" in out
    assert miles("plugins", "diff", "plugins.lock", "plugins.lock")[1] == "the same\n"


def test_doctor_imports_each_in_a_process_of_its_own(miles):
    code, out, err = miles("plugins", "doctor", "good", "raises", "broken")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 2 and "2 of 3 plugins cannot be loaded" in err
    assert "nothing heavy" in rows["good"] and "no such device" in rows["raises"] and "no manifest" in rows["broken"]


def test_install_is_pip_in_this_python(miles):
    _, out, _ = miles("plugins", "install", "--dry-run", "good", "miles-plugin-other", "./here")
    assert out.split() == [sys.executable, "-m", "pip", "install", "miles-good", "miles-plugin-other", "./here"]


def test_install_tries_both_names_of_a_distribution_and_uninstall_knows_which_it_is(miles, tmp_path, monkeypatch):
    """With an index that has miles-plugin-own alone: a folder."""
    import zipfile

    info = "miles_plugin_own-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "miles_plugin_own-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: miles-plugin-own\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "TARGET": str(tmp_path / "there"),
                        "DISABLE_PIP_VERSION_CHECK": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    code, out, _ = miles("plugins", "install", "own")
    assert code == 0 and (tmp_path / "there" / info).is_dir(), out
    assert "miles-plugin-own" not in miles("plugins", "install", "math", "--dry-run")[1]
    code, out, _ = miles("plugins", "uninstall", "--dry-run", "-y", "miles-good")
    assert code == 0 and out.split()[-3:] == ["uninstall", "-y", "miles-good"]
    code, _, err = miles("plugins", "uninstall", "goood")
    assert code == 2 and "goood" in err
