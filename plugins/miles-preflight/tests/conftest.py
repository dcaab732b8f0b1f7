"""A run file that a plan can be made of, tokenizers with faults, and the smallest correct run (measure.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from miles_core.cli import cli, command_line

sys.path.insert(0, str(Path(__file__).parent))  # measure.py, which can also be started by itself
ROOT = Path(__file__).parents[3]
RUN_FILE = """\
plugins = ["grpo"]

[checkpoint]
hf_checkpoint = "elsewhere/tiny"

[rollout]
prompt_data = "data/train.jsonl"
rollout_batch_size = 8
n_samples_per_prompt = 4
num_rollout = 3
rm_type = ["math"]

[optimizer]
lr = 2e-5
num_layers = 2
"""


@pytest.fixture
def plan(tmp_path):
    """(*flags, **replacements) -> the plan of the run file, whose model may have no weights."""
    from miles_core.plugins.plan import prepare

    def planned(*flags, **changes):
        text = RUN_FILE
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return prepare(path, ["--plan-without-weights", *map(str, flags)])

    return planned


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """The tokenizer of the arithmetic example."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([sys.executable, ROOT / "examples/arithmetic/make_tokenizer.py", folder], check=True)
    return folder


@pytest.fixture
def changed_tokenizer(tokenizer_dir, tmp_path):
    """(config changes, post-processor) -> a tokenizer folder with another configuration."""

    def make(processor: dict | None = None, **changes: object) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text()) | changes
        (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        model = json.loads((tokenizer_dir / "tokenizer.json").read_text())
        if processor is not None:
            model["post_processor"] = processor
        (folder / "tokenizer.json").write_text(json.dumps(model))
        return folder

    return make


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """(argv) -> click's Result, in a folder of its own; errors that are no click errors are raised."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in argv], catch_exceptions=False)

    return call


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """(argv) -> (exit code, stdout, stderr) of what the console script runs, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["miles", *map(str, argv)])
        code = 0
        try:
            command_line()
        except SystemExit as leave:
            code = leave.code or 0
        return code, *capfd.readouterr()

    return run
