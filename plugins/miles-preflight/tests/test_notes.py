"""What a plan says of data and settings without refusing them, and that it is silent otherwise."""

import json
import shutil
from pathlib import Path

import pytest

TINY = Path(__file__).parents[3] / "examples/arithmetic/tiny-qwen3"
"""Its tokenizer ends a sequence with token 258."""


@pytest.fixture
def notes(plan, tmp_path):
    """(training prompts, evaluation prompts, flags, end tokens of generation_config.json) -> the plan's notes."""
    def make(train, evaluation=("other",), flags=(), ends=(256, 258)):
        folder = tmp_path / "model"
        shutil.copytree(TINY, folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
        for name, prompts in (("train", train), ("eval", evaluation)):
            rows = [json.dumps({"input": prompt, "label": "2"}) + "\n" for prompt in prompts]
            (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        return plan("--hf-checkpoint", folder, "--prompt-data", tmp_path / "train.jsonl", "--input-key", "input",
                    "--eval-prompt-data", "sums", tmp_path / "eval.jsonl", "--eval-interval", 1, "--label-key", "label",
                    *flags, num_layers="# num_layers").notes

    return make


BOTH = (256, 258)
EIGHT = [f"{i}+1=" for i in range(8)]
CASES = {
    "evaluation on training data": (EIGHT, EIGHT[1:3], (), BOTH, "2 of the first 2 evaluation prompts"),
    "another end token": (EIGHT, ("x",), (), (256,), "<|im_end|> (258)"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_remarks(notes, case):
    *given, text = CASES[case]
    assert [text in note for note in notes(*given)].count(True) == 1
    other = notes(EIGHT)
    assert not any(one in note for *_, one in CASES.values() for note in other)


def test_answers_that_nothing_ends_are_remarked_on(notes, tmp_path):
    said = "names a token that ends answers"
    settings = {name: json.loads((TINY / name).read_text()) for name in ("config.json", "tokenizer_config.json")}
    del settings["config.json"]["eos_token_id"], settings["tokenizer_config.json"]["eos_token"]
    folder = tmp_path / "endless"
    flags = ("--hf-checkpoint", folder)
    shutil.copytree(TINY, folder, ignore=lambda *_: ["generation_config.json"])
    for name, values in settings.items():
        (folder / name).write_text(json.dumps(values))
    assert any(said in note for note in notes(EIGHT, flags=flags))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert not any(said in note for note in [*notes(EIGHT, flags=flags), *notes(EIGHT)])


@pytest.mark.parametrize(("flags", "idle"), [((), True), (("--weight-sync", "adapter", "--lora-rank", 4), False)])
def test_layers_of_adapters_that_servers_are_told_of_are_read_where_adapters_travel(plan, flags, idle):
    notes = plan("--engine", "sglang", "--sglang-lora-target-modules", "qkv_proj", *flags).notes
    assert any("reads server.lora_target_modules" in note for note in notes) == idle
