"""The demo as a user runs it: a real checkpoint gets better at a real task, and what it exports is what it trained."""

import json
from pathlib import Path

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

ROOT = Path(__file__).parents[2]

SHUFFLED = '''
"""The control: every answer gets the reward of another one of the batch."""
import random

from miles_core import hookimpl


class Shuffled:
    """Rewards that say nothing."""

    def __init__(self):
        self.draws = random.Random(0)

    @hookimpl
    def shape_rewards(self, groups):
        samples = [sample for group in groups for sample in group.samples]
        rewards = [sample.reward for sample in samples]
        self.draws.shuffle(rewards)
        for sample, reward in zip(samples, rewards):
            sample.reward = reward
        return groups
'''


def run(folder: Path, *words: str) -> list[dict]:
    """Run examples/demo.toml with its output in `folder`; the events."""
    outcome = miles(["run", "examples/demo.toml", "--no-live", "--run-dir", folder / "run", *words], ROOT, timeout=600)
    assert outcome.code == 0, outcome.err
    return list(read(folder / "run" / "events.jsonl"))


def evals(events: list[dict], name: str = "eval/sums") -> list[float]:
    return [event["metrics"][name] for event in events if event["event"] == "eval"]


def transformers_accuracy(folder: Path) -> float:
    """Greedy answers by transformers' own generate, compared as text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (ROOT / "examples/arithmetic/eval.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt")  # all prompts have the same number of tokens
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs.input_ids.shape[1]:]
    answers = tokenizer.batch_decode(output, skip_special_tokens=True)
    return sum(answer == f"\\boxed{{{row['label']}}}" for answer, row in zip(answers, rows)) / len(rows)


@pytest.mark.full
def test_grpo_raises_greedy_accuracy_and_transformers_agrees(tmp_path):
    events = run(tmp_path)
    accuracy, valid = evals(events), evals(events, "eval/sums/reward/format")
    assert 0.2 <= accuracy[0] <= 0.5 and min(valid) >= 0.95
    assert accuracy[-1] - accuracy[0] >= 0.20
    assert transformers_accuracy(tmp_path / "run/hf") == pytest.approx(accuracy[-1], abs=1e-9)
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) <= 1e-5
    assert (tmp_path / "run/checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "20"


@pytest.mark.slow
def test_rewards_shuffled_within_the_batch_teach_nothing(tmp_path):
    plugin = tmp_path / "shuffled.py"
    plugin.write_text(SHUFFLED)
    accuracy = evals(run(tmp_path, "--plugin", plugin))
    assert accuracy[-1] - accuracy[0] < 0.05


def test_the_splits_share_no_operands():
    def operands(name):
        lines = (ROOT / "examples/arithmetic" / name).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        text = [(r.get("prompt") or r["messages"])[0]["content"] for r in records]
        return {frozenset(t.rstrip("=").split("+")) for t in text}

    held_out = operands("eval.jsonl")
    assert len((ROOT / "examples/arithmetic/eval.jsonl").read_text().splitlines()) >= 1000
    assert not held_out & operands("train.jsonl") and not held_out & operands("sft.jsonl")
