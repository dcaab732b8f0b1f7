"""The recipe grpo-shapes on one GPU that trainer and SGLang share: images in the servers, with either trainer.

    python plugins/miles-vision/examples/make_shapes.py    what it starts from, a minute and a half
    python tests/gpu/images.py                             both trainers, one after the other
    python tests/gpu/images.py fsdp --rollouts 4
    python tests/gpu/images.py fsdp --tiny                 the same code on a CPU, with the local engine

Prints of each run the greedy accuracy with images and with blank ones, and log-prob differences; of one that fails the
exceptions of its server. The exit status is 1 where a run fails or learns nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from moe import SGLANG, ended, started

from miles_core.record.events import read

RECIPE = "recipes/grpo-shapes/recipe.toml"
SERVER = [*SGLANG, "--sglang-mem-fraction-static", "0.4", "--sglang-mm-attention-backend", "sdpa"]


def measured(trainer: str, folder: Path, args: argparse.Namespace) -> bool:
    """Run the recipe and print its figures; whether it went well."""
    words = ["--trainer", trainer, "--num-rollout", args.rollouts, "--eval-interval", args.rollouts,
             *(["--engine", "local"] if args.tiny else SERVER), *args.flags.split()]
    steps = ended(started(folder, words, coin=False, recipe=RECIPE), folder, time.monotonic() + args.seconds)
    greedy = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "eval"]
    seeing, blind = ([one[key] for one in greedy if key in one] for key in ("eval/circles", "eval/blank"))
    for title, values in {
        "accuracy": seeing, "with blank images": blind,
        "mean log-prob difference": [step["train/train_rollout_logprob_abs_diff"] for step in steps],
        "step s": [step["perf/step_time"] for step in steps],
    }.items():  # fmt: skip
        print(f"{trainer}: {title}", json.dumps([round(value, 4) for value in values]), flush=True)
    if len(steps) < args.rollouts:
        print(*exceptions(folder / "logs" / "engine-0.log"), sep="\n", flush=True)
        return False
    return seeing[-1] > seeing[0]


def exceptions(log: Path) -> list[str]:
    """The lines before and after each exception of a server, whose log also has pages of arguments."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    ends = [at for at, line in enumerate(lines) if "Error" in line and not line.startswith("[") or "Traceback" in line]
    return [line[:300] for at, line in enumerate(lines) if any(end - 12 <= at <= end + 2 for end in ends[:8])]


def main() -> int:
    """Every trainer's run; 1 where one does not go well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", choices=["fsdp", "megatron", []], default=["fsdp", "megatron"])
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=250, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-images"))
    parser.add_argument("--flags", default="--bf16", help="of miles run")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    args = parser.parse_args()
    return int(not all([measured(trainer, args.folder / trainer, args) for trainer in args.trainers]))


if __name__ == "__main__":
    sys.exit(main())
