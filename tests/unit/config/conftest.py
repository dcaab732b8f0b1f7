"""A folder with a run file that a plan can be made of; nothing in it is ever opened by a plan."""

import pytest

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
def run_file(tmp_path):
    """(text=RUN_FILE, **replacements) -> path of a run file."""
    def write(text=RUN_FILE, **changes):
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def plan(run_file):
    """(*flags, **replacements) -> the plan of the run file, whose model may have no weights."""
    from miles_core.plugins.plan import prepare

    return lambda *flags, **changes: prepare(run_file(**changes), ["--plan-without-weights", *map(str, flags)])
