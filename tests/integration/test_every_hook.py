"""The examples on the pages of hooks, all in one plugin, in a run that calls every one of them.

A hook that the core no longer calls is found here, whatever its page says; so is an example that no longer works.
"""

import ast
import shutil

import pytest
from miles_testing import tiny_checkpoint, toy_run
from miles_testing.stubs import listed

from miles_core.types import Prompt, Sample
from tests.pages import ROOT, blocks

SPECS = listed()
NOT_IN_A_RUN = {
    "commands": "tests/unit/cli/test_commands.py::test_the_exit_codes_of_a_diff",  # of the command line
    "convert": "plugins/miles-megatron/tests/test_convert_by.py::test_the_plugins_options_are_flags_and_reach_it_typed",
    "diagnose": "plugins/miles-sglang/tests/test_diagnosis.py::"  # of the doctor
                "test_the_rules_of_the_hook_diagnose_stand_behind_the_doctors_own",
    "engine_args": "tests/integration/test_weight_hooks.py::"  # of SGLang's servers
                   "test_engine_args_adds_to_the_servers_fields",
    "prefill_inputs": "plugins/miles-vision/tests/test_runs.py::"  # of models that read images
                      "test_engine_and_trainer_agree_on_prompts_with_images",
}
"""Hooks that no run on a CPU calls, and a test that calls an implementation of each."""
PARTS = {"algorithm.reduction": "mine", "rollout.generate": "mine", "rollout.combine_rewards": "mine",
         "optimizer.clip_gradients": "mine", "rollout.prompt_source": "mine", "rollout.engine": "mine",
         "perf.trainer": "mine", "perf.placement": "mine", "perf.weight_sync": "mine", "model.model_name": "mine"}
CALLED_BACK = {"rollout.over_sampling_batch_size": 8}


def example(hook):
    """(imports for annotations, the method) of a page, which first writes down that it was called."""
    [block] = [one for one in blocks(ROOT / "docs" / "hooks" / f"{hook}.md") if one.mark == "hook"]
    tree = ast.parse(block.text)
    [checking] = [node for node in tree.body if isinstance(node, ast.If)] or [None]
    [kind] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    [method] = [node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    method.body.insert(1, ast.parse(f"called({hook!r})").body[0])
    return [ast.unparse(node) for node in checking.body] if checking else [], ast.unparse(method)


@pytest.fixture
def mine(tmp_path):
    """A plugin that implements every hook, and what it wrote."""
    imports, methods = zip(*(example(hook) for hook in SPECS), strict=True)
    lines = ["from __future__ import annotations", "from pathlib import Path", "from typing import TYPE_CHECKING",
             "from miles_core import hookimpl", "if TYPE_CHECKING:",
             *(f"    {line}" for line in sorted({line for some in imports for line in some})),
             f"def called(hook):\n    Path({str(tmp_path)!r}, hook).touch()",
             "class Mine:", '    """All."""', '    name = "mine"', '    provides = ("resumes:mine",)',
             *(f"    {line}" for method in methods for line in method.splitlines())]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.full
def test_every_hook_is_called_in_a_run(mine):
    rows = mine.with_name("train.mine")  # what reads it is called by its ending
    shutil.copy(tiny_checkpoint() / "train.jsonl", rows)
    toy_run([mine], options=PARTS | CALLED_BACK | {
        "rollout.prompt_data": str(rows), "algorithm.use_kl_loss": True,
        "checkpoint.save": "{run_dir}/saved", "checkpoint.save_hf": "{run_dir}/hf"})
    called = {path.name for path in mine.parent.iterdir()}
    assert set(SPECS) - called == set(NOT_IN_A_RUN)


def test_the_scorer_on_its_page_knows_a_right_answer_with_the_token_that_ended_it():
    """A new project begins with it, and by default special tokens are in an answer's text."""
    [block] = [one for one in blocks(ROOT / "docs" / "hooks" / "reward.md") if one.mark == "hook"]
    names = {}
    exec(compile(block.text, "reward.md", "exec"), names)
    prompt = Prompt(0, 0, "2+2=", (1, 2), label="4")
    assert [names["MyReward"]().reward(Sample(prompt, 0, text=f"{answer}<|im_end|>")) for answer in (4, 5)] == [1, 0]


@pytest.mark.parametrize("test", NOT_IN_A_RUN.values(), ids=NOT_IN_A_RUN)
def test_the_others_have_a_test_of_their_own(test):
    path, _, name = test.partition("::")
    nodes = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
