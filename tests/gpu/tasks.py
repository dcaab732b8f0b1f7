"""Which tasks of reasoning-gym can teach a model something? Mean rewards, and shares of groups whose answers differ.

    python tests/gpu/tasks.py --model models/smollm2-135m-instruct                    one GPU, minutes
    python tests/gpu/tasks.py --model examples/arithmetic/tiny-qwen3 --tiny --tasks gcd spell_backward --prompts 4
    python tests/gpu/tasks.py --model ... --answers text --tasks '{"name": "chain_sum", "config": {"max_terms": 3}}'

Nothing is trained: for each way to ask, one rollout of one server holds --prompts prompts of every task, with eight
answers each at temperature 1. A group is mixed where its rewards differ, and partly right where some answers have the
full reward and some have not, by which the table is sorted: parts of a reward may be for the form, or for brevity.
Writes the same as JSON, with the best answer of each task, into $OUT if it is set, else into --folder. Status 1 where
a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from moe import SGLANG, ended, started

from miles_core.record.replay import load_batch

DIGITS = {"min_digits": 1, "max_digits": 1}
TASKS: dict[str, dict[str, Any]] = {
    "acre": {}, "aiw": {"max_entities": 3}, "base_conversion": {"max_base": 4, "max_value": 20},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, **DIGITS}, "binary_alternation": {"min_n": 3, "max_n": 6},
    "bitwise_arithmetic": {"difficulty": 1}, "caesar_cipher": {"min_words": 1, "max_words": 1, "max_rotation": 3},
    "calendar_arithmetic": {}, "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "coin_flip": {"min_trials": 1, "max_trials": 3}, "count_bits": {"max_n": 16},
    "count_primes": {"max_n": 20}, "countdown": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 10,
                                                 "min_target": 2, "max_target": 20},
    "decimal_arithmetic": {"min_terms": 2, "max_terms": 2, "min_num_decimal_places": 1, "max_num_decimal_places": 1},
    "family_relationships": {"max_family_size": 4}, "fraction_simplification": {"max_value": 10, "max_factor": 5},
    "gcd": {"max_value": 30}, "gsm_symbolic": {}, "isomorphic_strings": {"max_string_length": 4},
    "knights_knaves": {}, "lcm": {"max_value": 10}, "leg_counting": {"min_animals": 1, "max_animals": 2,
                                                                   "max_instances": 3},
    "letter_counting": {"min_words": 1, "max_words": 3}, "letter_jumble": {"max_word_len": 5, "max_words": 1,
                                                                          "min_words": 1},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 6},
    "number_filtering": {"max_numbers": 4, "max_decimals": 0}, "number_format": {},
    "number_sequence": {"max_complexity": 1}, "number_sorting": {"max_numbers": 4, "max_decimals": 0},
    "palindrome_generation": {"max_length": 5}, "power_function": {"max_exponent": 2, "min_exponent": 1},
    "prime_factorization": {"max_value": 20}, "products": {"min_terms": 2, "max_terms": 2, **DIGITS},
    "propositional_logic": {}, "ransom_note": {"max_note_length": 4, "max_magazine_length": 8},
    "sentence_reordering": {"max_words_in_sentence": 5},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 10},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4}, "string_insertion": {"max_string_length": 6},
    "syllogism": {}, "time_intervals": {}, "word_sequence_reversal": {"min_words": 2, "max_words": 3},
    "word_sorting": {"min_words": 2, "max_words": 3},
}  # fmt: skip
"""Easy ones of those whose prompts are short, with keys that make them easier still."""

RUN_FILE = """
plugins = ["grpo", "reasoning-gym"]

[rollout]
prompt_source = "reasoning-gym"
rm_type = ["reasoning-gym"]
rm_timeout = 300
apply_chat_template = true
num_rollout = 1

[perf]
bf16 = false
"""


def rollout(answer: str, tasks: list[str], args: argparse.Namespace) -> Path | None:
    """Sample and score: the rollout's dump; None where the run failed, which is printed."""
    folder, run_file = args.folder / answer, args.folder / f"{answer}.toml"
    args.folder.mkdir(parents=True, exist_ok=True)
    run_file.write_text(RUN_FILE)
    flags = ["--reasoning-gym.answer", answer, "--reasoning-gym.tasks", *tasks, "--hf-checkpoint", args.model,
             "--reasoning-gym.scoring-processes", min(8, os.cpu_count() or 1), "--n-samples-per-prompt", args.samples,
             "--rollout-batch-size", args.prompts * len(tasks), "--rollout-max-response-len", args.tokens,
             "--debug-rollout-only", "--save-debug-rollout-data", folder / "{rollout_id}.batch"]
    if args.tiny:
        flags += ["--engine", "local"]
    else:
        flags += [word for word in SGLANG if word != "--colocate"]
        flags += ["--rollout-num-gpus", 1, "--sglang-mem-fraction-static", "0.7", "--sglang-cuda-graph-max-bs", 256]
    steps = ended(started(folder, list(map(str, flags)), coin=False, recipe=str(run_file)), folder,
                  time.monotonic() + args.seconds)
    return folder / "{rollout_id}.batch" if steps else None


def measured(dump: Path, answer: str) -> list[dict[str, Any]]:
    """A row for each task: mean reward, shares of answers and of groups, mean length in tokens."""
    groups: dict[str, list] = {}
    for group in load_batch(str(dump), 0).groups:
        groups.setdefault(group.prompt.metadata["reasoning_gym"]["task"], []).append(group.samples)
    rows = []
    for task, each in groups.items():
        samples = [sample for group in each for sample in group]
        best = max(samples, key=lambda sample: sample.reward)
        rows.append({
            "task": task, "answer": answer, "groups": len(each), "reward": fmean(one.reward for one in samples),
            "right": fmean(one.reward >= 1 for one in samples),
            "mixed": fmean(len({one.reward for one in group}) > 1 for group in each),
            "partly": fmean(0 < sum(one.reward >= 1 for one in group) < len(group) for group in each),
            "cut": fmean(one.status.name == "TRUNCATED" for one in samples),
            "tokens": fmean(one.response_length for one in samples), "config": TASKS.get(task, {}),
            "example": {"prompt": best.prompt.text[-600:], "response": best.text[-300:],
                        "answer": best.prompt.metadata["reasoning_gym"]["answer"], "reward": best.reward}})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="names, or JSON with name and config")
    parser.add_argument("--answers", nargs="+", default=["tag", "text"], help="ways to ask: tag, boxed, text")
    parser.add_argument("--prompts", type=int, default=48, help="of a task")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=400, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-tasks"))
    parser.add_argument("--tiny", action="store_true", help="by the local engine")
    args, rows = parser.parse_args(), []
    tasks = [word if word.startswith("{") else json.dumps({"name": word, "config": TASKS.get(word, {})})
             for word in args.tasks]
    dumps = {answer: rollout(answer, tasks, args) for answer in args.answers}
    for answer, dump in dumps.items():
        rows += measured(dump, answer) if dump else []
    print(f"{'task':24}{'asked':8}{'groups':>8}{'reward':>8}{'right':>8}{'mixed':>8}{'partly':>8}{'cut':>8}{'tokens':>8}")
    rows.sort(key=lambda row: (row["partly"], row["mixed"]), reverse=True)
    for row in rows:
        shares = "".join(f"{row[key]:8.3f}" for key in ("reward", "right", "mixed", "partly", "cut"))
        print(f"{row['task']:24}{row['answer']:8}{row['groups']:8}{shares}{row['tokens']:8.1f}")
    target = Path(os.environ.get("OUT") or args.folder) / "tasks.json"
    target.write_text(json.dumps(rows, indent=1))
    return int(not all(dumps.values()))


if __name__ == "__main__":
    sys.exit(main())
