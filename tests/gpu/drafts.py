"""Drafts by a model in SGLang on one GPU: does the share of accepted tokens hold while the policy moves?

    python tests/gpu/drafts.py                  all five runs
    python tests/gpu/drafts.py kept trained     examples/moe.toml, EAGLE: a layer for multi-token prediction drafts
    python tests/gpu/drafts.py kept trained --far --rollouts 60    ... and another reward moves the policy far away
    python tests/gpu/drafts.py --gpus 2 trained the same on two GPUs: weights travel by broadcast
    python tests/gpu/drafts.py other            examples/demo.toml, STANDALONE: the policy of the start drafts
    python tests/gpu/drafts.py moe demo         the same run files without drafts

The layer is first trained on the CPU for the policy of the start, which stays as it is meanwhile: no answer is
rewarded.
`kept` leaves it so, `trained` trains it beside the policy; both are synced. Runs start side by side and take turns.
Prints accepted share, tokens a step of the server, reward, seconds and log-prob difference of each rollout, and
warnings; the exit status is 1 where a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from moe import MILES, ROOT, SGLANG, in_turns

SHOWN = {"accepted": "rollout/spec_accept_rate", "tokens a step": "rollout/spec_accept_length",
         "reward": "rollout/raw_reward", "log-prob difference": "train/train_rollout_logprob_abs_diff",
         "mtp loss": "train/mtp_loss", "sync s": "perf/update_weights_time", "rollout s": "perf/rollout_time"}
DRAFTED = ["--sglang-speculative-num-steps", "3", "--sglang-speculative-eagle-topk", "1",
           "--sglang-speculative-num-draft-tokens", "4", "--sglang-enable-draft-weights-cpu-backup"]


def with_layer(folder: Path, rollouts: int) -> Path:
    """The example's mixture with a layer that predicts what its policy of the start says."""
    found = folder / "hf"
    if not found.is_dir():
        words = ["run", "examples/moe.toml", "--no-live", "--run-dir", folder / "made", "--plugin",
                 "tests/gpu/still.py", "--rm-type", "still", "--mtp-num-layers", "1", "--enable-mtp-training",
                 "--num-rollout", rollouts, "--skip-eval-before-train", "--eval-interval", 1000, "--lr", "2e-3",
                 "--weight-decay", "0", "--save", folder / "saved", "--save-interval", rollouts, "--save-hf", found]
        subprocess.run([*MILES, *map(str, words)], cwd=ROOT, check=True, timeout=300,
                       env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=["kept", "trained", "other", "moe", "demo"])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-drafts"))
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1,
                        help="2: trainer and engine have one each, and weights travel by broadcast")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--far", action="store_true", help="reward digits read backwards (backwards.py)")
    parser.add_argument("--seconds", type=float, default=400, help="of all runs")
    parser.add_argument("--flags", default="--sglang-cuda-graph-max-bs 64", help="of runs with drafts; "
                        "--sglang-disable-cuda-graph where deep_gemm, which graphs of a draft want, is not installed")
    args = parser.parse_args()
    names = args.runs or ["kept", "trained", "other", "moe", "demo"]
    runs = {name: (args.folder / name, [str(word) for word in flags(name, args)]) for name in names}
    recipes = {name: f"examples/{'demo' if name in ('other', 'demo') else 'moe'}.toml" for name in names}
    found = in_turns(runs, args.seconds, recipes, coin=False, together=args.far)
    for name, steps in found.items():
        for title, key in SHOWN.items():
            values = [round(step[key], 4) for step in steps if key in step]
            print(f"{name:8} {title:20}", json.dumps(values), flush=True)
        log = args.folder / name / "logs" / "run.log"
        print(*[line for line in (log.read_text().splitlines() if log.is_file() else ()) if "accept" in line], sep="\n")
    return int(not all(len(steps) == args.rollouts for steps in found.values()))


def flags(name: str, args: argparse.Namespace) -> list[object]:
    """What a run adds to its file."""
    words = [flag for flag in SGLANG[:-2] if args.gpus == 1 or flag != "--colocate"]
    words += ["--rollout-num-gpus", "1", "--weight-sync", "broadcast"] if args.gpus == 2 else []
    words += ["--num-rollout", args.rollouts, "--sglang-mem-fraction-static", "0.7", "--sglang-max-total-tokens", 65536]
    words += ["--fp32-lm-head"] if name in ("other", "demo") else []
    if args.far:
        words += ["--plugin", "tests/gpu/backwards.py", "--rm-type", "backwards", "--rm-weights", 1, "--lr", "5e-4",
                  "--skip-eval-before-train", "--eval-interval", 1000]
    if name in ("moe", "demo"):
        return words
    if name == "other":
        draft = args.folder / "start"
        shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", draft, dirs_exist_ok=True)
        words += ["--sglang-speculative-algorithm", "STANDALONE"]
    else:
        draft = with_layer(args.folder, 30)
        words += ["--plugin", "mtp", "--hf-checkpoint", draft, "--sglang-speculative-algorithm", "EAGLE"]
        words += ["--enable-mtp-training"] if name == "trained" else []
    return [*words, *DRAFTED, "--sglang-speculative-draft-model-path", draft, *args.flags.split()]


if __name__ == "__main__":
    sys.exit(main())
