"""`miles convert NAME` for what plugins offer: listed without an import, called with the plugin's options as flags."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from miles_megatron.commands import convert, convert_by

from miles_core.config import option
from miles_core.config.options import Option
from miles_core.errors import CheckpointError, ConfigError, UnknownPluginError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.manifest import Manifest, Offer
from miles_core.plugins.select import Selected


@dataclass(frozen=True, kw_only=True)
class Options:
    bits: int = option(8, "How many.")
    keep: bool = option(False, "Whether.")


class Rounding:
    """Rounds weights."""

    def __init__(self, options: Options):
        self.options = options

    @hookimpl("convert", name="hf-to-round")
    def to_round(self, source, out):
        out.mkdir()
        (out / "said.json").write_text(json.dumps([self.options.bits, self.options.keep, str(source)]))
        return f"{self.options.bits} bits"


@pytest.fixture
def offered(monkeypatch, tmp_path):
    """An installed plugin with a conversion, and a checkpoint."""
    options = {"bits": Option("rounding", "bits", "int", 8, "How many."),
               "keep": Option("rounding", "keep", "bool", False, "Whether.")}
    manifest = Manifest("rounding", f"{__name__}:Rounding", "Rounds weights.",
                        offers=(Offer("convert", "hf-to-round", "to_round", "Round weights."),), options=options)
    one = Selected(manifest, "a test", "1", "test")
    monkeypatch.setattr(convert_by, "offered", lambda: {"hf-to-round": "rounding"})
    monkeypatch.setattr(convert_by.select, "select", lambda named, already: [one])
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    return source


def call(*words):
    return CliRunner().invoke(convert.command, [str(word) for word in words], standalone_mode=False)


def test_the_plugins_options_are_flags_and_reach_it_typed(offered, tmp_path):
    done = call("hf-to-round", offered, tmp_path / "out", "--bits", "4", "--keep")
    assert done.exception is None and "4 bits" in done.output
    assert json.loads((tmp_path / "out" / "said.json").read_text()) == [4, True, str(offered)]


def test_the_help_lists_it_beside_the_core_s_own(offered):
    text = " ".join(call("--help").output.split())
    assert "hf-to-dist" in text and "hf-to-round Round weights. (plugin rounding)" in text
    assert "--bits" in call("hf-to-round", "--help").output


def test_bad_input_is_refused_before_the_plugin_runs(offered, tmp_path):
    assert isinstance(call("hf-to-round", offered, tmp_path / "out", "--bits", "four").exception, ConfigError)
    (offered / "config.json").unlink()
    assert isinstance(call("hf-to-round", offered, tmp_path / "out").exception, CheckpointError)
    (offered / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    assert isinstance(call("hf-to-round", offered, tmp_path / "out").exception, CheckpointError)


def test_a_known_plugin_that_is_not_installed_says_the_pip_line(monkeypatch, tmp_path):
    def absent(named, already):
        raise UnknownPluginError("plugin 'rounding' is not installed", fix="pip install miles-rounding")

    monkeypatch.setattr(convert_by, "offered", lambda: {"hf-to-round": "rounding"})
    monkeypatch.setattr(convert_by.select, "select", absent)
    assert "pip install miles-rounding" in str(call("hf-to-round", tmp_path, tmp_path / "out").exception)


def test_the_help_imports_no_torch():
    code = ("import sys; from click.testing import CliRunner; from miles_core.cli import cli;"
            "CliRunner().invoke(cli, ['convert', '--help']); assert 'torch' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
