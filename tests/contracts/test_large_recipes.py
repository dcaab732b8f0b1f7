"""The run files for GPUs under recipes/large plan, from config.json, a tokenizer and two rows alone."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from configurations import CONFIGURATIONS, without_weights
from miles_megatron import proposals
from miles_megatron.layout import layout_of
from source import ROOT

from miles_core.config.hardware import trainer_gpus
from miles_core.plugins.plan import prepare

sys.path.insert(0, str(ROOT / "plugins/miles-flags/tests/launch_scripts"))
import carry_over

RUN_FILES = sorted(ROOT.glob("recipes/large/*.toml"))


def lay_out(folder: Path, stated: dict) -> None:
    """What the run file names, without weights."""
    name = Path(stated["checkpoint"]["hf_checkpoint"]).name
    constants = dict(CONFIGURATIONS.get(name) or carry_over.configuration(name))
    for key in ("hf_checkpoint", "ref_load"):
        if key in stated["checkpoint"]:
            without_weights(folder / stated["checkpoint"][key], constants)
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
    assert len(RUN_FILES) == 15
