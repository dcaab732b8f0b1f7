"""A checkpoint of a family that comes as a plugin is trained, exported and read back; nobody names the plugin."""

import json
import re
import shutil
from pathlib import Path

import pytest
from miles_testing.forked import miles

from miles_core.errors import OwnerError
from miles_core.plugins.plan import prepare
from miles_core.record.events import read

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
         "eos_token_id": 258, "pad_token_id": 256}  # fmt: skip


@pytest.fixture
def checkpoint(tiny):
    """(model_type, **config) -> the folder of a random model with the tokenizer of the tiny checkpoints."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type, **config):
        torch.manual_seed(0)
        folder = tiny / model_type
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **config)).save_pretrained(folder)
        for file in (tiny / "qwen3").glob("*token*"):
            shutil.copy(file, folder)
        return folder

    return make


@pytest.mark.parametrize(("family", "config"), [
    ("llama", {}), pytest.param("gemma2", {"sliding_window": 8}, marks=pytest.mark.full)],
                         ids=["llama", "gemma2"])
def test_its_checkpoint_is_all_that_a_run_needs(checkpoint, run_file, tmp_path, family, config):
    from transformers import AutoModelForCausalLM

    folder = checkpoint(family, **config)
    outcome = miles(["run", run_file(family), "--no-live", "--run-dir", "run", "--num-rollout", "1", "--save", "saved",
                     "--save-hf", "exported"], tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.err
    metrics = [event["metrics"] for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    assert metrics[0]["train/train_rollout_logprob_abs_diff_max"] <= 1e-5, "engine and trainer are the same model"
    folders = (folder, tmp_path / "exported")
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in folders)
    assert before.keys() == after.keys() and any(not before[name].equal(after[name]) for name in before)


def not_built():
    """Types that the page names as not built, whatever their config.json says."""
    table = PAGE.read_text(encoding="utf-8").partition("### Not built\n")[2].partition("\n#")[0]
    cells = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| `")]
    return [name for cell in cells if " with " not in cell for name in re.findall("`([a-z0-9_]+)`", cell)]


def test_what_the_page_calls_not_built_is_refused_by_name(tmp_path):
    assert {"diffusion_gemma", "mistral_large4"} <= set(not_built())
    for name in not_built():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "vocab_size": 264}))
        with pytest.raises(OwnerError) as caught:
            prepare(None, ["--hf-checkpoint", str(tmp_path), "--plan-without-weights", "--prompt-data", "none.jsonl",
                           "--num-rollout", "1", "--rollout-batch-size", "1"])  # fmt: skip
        assert caught.value.code == "architecture-unknown" and repr(name) in caught.value.what
