"""Every script of bench/ and tests/gpu/ still starts, and what pytest runs there is collected: the code and the checks
that it meets change more often than it is run.

A script that makes plans runs until it has them, and one that makes none does its smallest piece of work. Where that
takes a GPU, only its command line is read; that the names of Miles which it uses are there is tested for all.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from miles_testing import forked

ROOT = Path(__file__).parents[2]
STARTS = Path(__file__).parent / "starts"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
           for folder in ("bench", "tests/gpu") for path in ROOT.joinpath(folder).rglob("*.py")}
FOUND = sorted(path for path, text in SOURCES.items() if "__main__" in text)
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/gpu/test_*.py"))

CASES = [  # script, its words, how many plans it makes
    ("bench/against_trl.py", "--trl-python {python} --workloads small --rounds 1 --verdict --beta 0.1", 1),
    ("bench/async_throughput.py", "--rollouts 2", 1),
    ("bench/batch_memory.py", "--data 2 --samples 8 --tokens 64", 1),
    ("bench/calculator.py", "--data {folder} --seeds 1", 1),
    ("bench/checkpoint_stall.py", "--layers 2 --hidden 64 --vocab 256 --rounds 1", 0),
    ("bench/convert_memory.py", "--size 4 --shard 1 --processes 1", 0),
    ("bench/demo_seeds.py", "--seeds 1", 1),
    ("bench/driver.py", "--requests 8 --tokens 64 --rollouts 1 --routes off", 1),
    ("bench/engine.py", "--workloads small --rounds 1", 0),
    ("bench/hooks.py", "", 1),
    ("bench/install.py", "--help", 0),  # minutes of pip; tests/packages installs
    ("bench/on_policy.py", "--rounds 1", 1),
    ("bench/peers/make_model.py", "--workload large --out {folder}", 0),
    ("bench/peers/run_miles.py", "--workload large --model {folder}/warm", 1),
    ("bench/peers/trl_grpo.py", "--help", 0),  # TRL has an environment of its own
    ("bench/peers/trl_step.py", "--help", 0),
    ("bench/prompts.py", "--rows 200", 0),
    ("bench/selection.py", "--commits 1", 0),
    ("bench/trackers.py", "--help", 0),  # seven runs of the demo
    ("tests/gpu/drafts.py", "kept --folder {folder}", 1),
    ("tests/gpu/drafts.py", "other demo --far --folder {folder}", 2),
    ("tests/gpu/fp8.py", "--tiny --parts train --recipes bf16", 1),
    ("tests/gpu/fsdp_speed.py", "--tiny", 2),
    ("tests/gpu/images.py", "--help", 0),  # its model is trained first
    ("tests/gpu/int4.py", "--help", 0),
    ("tests/gpu/large.py", "layouts --tiny --gpus 2 --only ep-block --folder {folder}", 1),
    ("tests/gpu/large.py", "whole --tiny --gpus 2 --folder {folder}", 1),
    ("tests/gpu/link.py", "{folder}/site", 0),
    ("tests/gpu/long_context.py", "--tiny", 1),
    ("tests/gpu/local_engine.py", "--tiny", 2),
    ("tests/gpu/lora.py", "dense", 3),
    ("tests/gpu/lora.py", "moe", 2),
    ("tests/gpu/moe.py", "replay --tiny --folder {folder}", 2),
    ("tests/gpu/moe.py", "recipe --folder {folder}", 2),
    ("tests/gpu/offload_speed.py", "--tiny --turns 2", 0),
    ("tests/gpu/probe.py", "", 0),
    ("tests/gpu/qwen3next.py", "--help", 0),
    ("tests/gpu/speculation.py",
     "--model examples/arithmetic/tiny-qwen3 --tokens 512 --sides plain partial --folder {folder}", 2),
    ("tests/gpu/sync_speed.py", "", 0),
    ("tests/gpu/tasks.py", "--model examples/arithmetic/tiny-qwen3 --tiny --tasks gcd spell_backward --answers text "
     "--prompts 2 --tokens 8 --folder {folder}", 1),
    ("tests/gpu/trainer_speed.py", "qwen3-0.6b moe-4b", 4),
    ("tests/gpu/whole_step.py", "moe-4b --tiny --tokens 8 --requests 16 --rollouts 2 --profile --folder {folder}", 1),
]  # fmt: skip
UNREAD = ("tests/gpu/probe.py", "tests/gpu/sync_speed.py")
"""These look for a GPU at once, and are imported."""


def test_every_script_has_a_case():
    assert sorted({script for script, _, _ in CASES}) == FOUND


@pytest.mark.parametrize("path", sorted(SOURCES.keys() - {*FOUND, *TESTS}))
def test_what_is_neither_a_script_nor_a_test_is_used_by_one(path):
    stem = re.compile(rf"\b{Path(path).stem}\b")
    assert any(stem.search(SOURCES[other]) for other in (*FOUND, *TESTS)), f"nothing starts {path}"


def test_the_set_up_of_a_gpu_host_can_be_read():
    for path in (ROOT / "tests" / "gpu").glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


def material(folder: Path) -> None:
    """What scripts want to find: a model with prompts, a calculator's data."""
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", folder / "warm")
    (folder / "warm/prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(ROOT / "examples/arithmetic" / name, folder)


COSTLY = ("bench/convert_memory.py", "tests/gpu/trainer_speed.py", "tests/gpu/offload_speed.py")
"""These measure even the smallest piece of work in processes of their own."""


@pytest.mark.parametrize("script, words, plans", [
    pytest.param(*case, id=" ".join(case[:2]).strip(), marks=[pytest.mark.full] if case[0] in COSTLY else [])
    for case in CASES])
def test_it_starts(tmp_path, script, words, plans):
    material(tmp_path)
    starts = tmp_path / "starts.jsonl"
    folders = [*([str(STARTS)] if plans else []), str((ROOT / script).parent), os.environ.get("PYTHONPATH", "")]
    command = [script, *words.format(folder=tmp_path, python=sys.executable).split()]
    done = forked.python(
        ["-c", f"import {Path(script).stem}"] if script in UNREAD else command, ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "MILES_TEST_STARTS": str(starts)})  # fmt: skip
    outcomes = [json.loads(line) for line in starts.read_text().splitlines()] if starts.exists() else []
    printed = f"{outcomes}\n{done.out[-3000:]}{done.err[-5000:]}"
    assert [outcome for _, outcome in outcomes] == ["planned"] * plans, printed
    # Figures of so little work may miss a bar, which is status 1.
    assert plans or (done.code in (0, 1) and "Traceback" not in done.err), printed


def test_tests_that_take_a_gpu_are_collected_without_one():
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    done = forked.python(["-c", code, "--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", *TESTS], ROOT,
                         timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.out[-3000:] + done.err[-2000:]
    assert {line.partition("::")[0] for line in done.out.splitlines() if "::" in line} == set(TESTS)


@pytest.mark.parametrize("script", FOUND + TESTS)
def test_the_names_of_miles_that_it_imports_are_there(script):
    """Those too that it imports when it comes to need them."""
    for node in ast.walk(ast.parse(ROOT.joinpath(script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("miles_"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}"), script
