"""The run files for GPUs under recipes/large plan, from config.json, a tokenizer and two rows alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from miles_megatron import proposals
from miles_megatron.layout import layout_of
from source import ROOT

from miles_core.config.hardware import trainer_gpus
from miles_core.plugins.plan import prepare

sys.path.insert(0, str(ROOT / "plugins/miles-flags/tests/launch_scripts"))
import carry_over

SMALL = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
         "tie_word_embeddings": True, "rope_theta": 1000000, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960,
         "architectures": ["Qwen3ForCausalLM"]}
SMOL = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rms_norm_eps": 1e-05, "max_position_embeddings": 8192, "architectures": ["LlamaForCausalLM"]}
OWN = {"Qwen3-0.6B": SMALL, "smollm2-135m-instruct": SMOL}
"""Those which no launch script names."""
RUN_FILES = sorted(ROOT.glob("recipes/large/*.toml"))


def lay_out(folder: Path, stated: dict) -> None:
    """What the run file names, without weights."""
    name = Path(stated["checkpoint"]["hf_checkpoint"]).name
    constants = dict(OWN[name]) if name in OWN else carry_over.configuration(name)
    for key in ("hf_checkpoint", "ref_load"):
        if key in stated["checkpoint"]:
            model = folder / stated["checkpoint"][key]
            shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", model, ignore=lambda *_: ["model.safetensors"])
            (model / "config.json").write_text(json.dumps(constants))
            constants.pop("quantization_config", None)
    (folder / "data").mkdir()
    chat = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}
    (folder / "data/dapo-math-17k.jsonl").write_text((json.dumps(chat) + "\n") * 2)
    rows = [{"question": "What is 1+1?", "answer": "It is 2.\n#### 2"}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data/train.parquet")
    (folder / "data/gsm8k").mkdir()
    (folder / "data/train.parquet").rename(folder / "data/gsm8k/train.parquet")


def gpus(name: str) -> tuple[int, int]:
    """Of a run file by docs/recipes.md: how many, and GiB of each; one of 141 GB has 140 GiB."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [cell] = re.findall(rf"^\| `{re.escape(name)}` \|.*\| (.*) \|$", page, re.MULTILINE)
    nodes, each, size = re.fullmatch(r"(?:(\d+) nodes of )?(\d+) GPUs?(?: of (\d+) GB)?", cell).groups()
    return int(nodes or 1) * int(each), min(int(size or 80), 140)


@pytest.mark.parametrize("run_file", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_for_gpus_plans(run_file, tmp_path, monkeypatch):
    """On the GPUs that the page says, into whose memory it fits with room."""
    monkeypatch.chdir(tmp_path)
    stated = tomllib.loads(run_file.read_text(encoding="utf-8"))
    lay_out(tmp_path, stated)
    count, gib = gpus(run_file.name)
    plan = prepare(run_file, ["--plan-without-weights", "--gpu-memory-gib", str(gib)])
    assert trainer_gpus(plan.config) == count and plan.config.rollout.engine == "sglang"
    assert set(stated["plugins"]) <= {one.manifest.name for one in plan.selected}
    assert not [note for note in plan.notes if "memory is tight" in note]
    if "`miles layouts` lists" in run_file.read_text(encoding="utf-8"):
        assert layout_of(plan.config) in [one.layout for one in proposals.proposals(plan.config, count, 3)]


def test_there_is_one_for_each_size():
    assert len(RUN_FILES) == 12
