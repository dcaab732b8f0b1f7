"""Adapters through whole runs on one GPU that trainer and SGLang share: merged weights against adapters alone.

    python tests/gpu/lora.py              the demo's dense model: merged, adapters alone, adapters alone with a backup
    python tests/gpu/lora.py moe          its mixture of experts (Transformer Engine's grouped experts): merged, and
                                          adapters of the attention alone
    python tests/gpu/lora.py --tiny       the same code on a CPU: the local engine

Ten rollouts each, about a minute a run. Prints for each the accuracy before and after, the mean log-prob difference
between trainer and engine at every step, and bytes and seconds of the first and of later syncs; the exit status is 1
where a run fails, learns nothing, or the two sides disagree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from demo import demo

SGLANG = [
    "--engine", "sglang", "--placement", "ray", "--colocate", "--bf16", "--fp32-lm-head",
    "--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none",
    "--sglang-cuda-graph-max-bs", "64", "--sglang-mem-fraction-static", "0.4",
]  # fmt: skip
ATTENTION = ["--target-modules", "q_proj,k_proj,v_proj,o_proj"]
RUNS = {
    "dense": {"merged": [], "adapter": ["--weight-sync", "adapter"],
              "adapter, base backed up": ["--weight-sync", "adapter", "--lora-base-cpu-backup"]},
    "moe": {"merged": ["--hf-checkpoint", "examples/arithmetic/tiny-qwen3-moe"],
            "adapter": ["--hf-checkpoint", "examples/arithmetic/tiny-qwen3-moe", "--weight-sync", "adapter",
                        *ATTENTION]},
}  # fmt: skip
BOUND = 0.02
"""Of the mean log-prob difference of a step in bfloat16, as for runs that train all weights."""


def run(name: str, folder: Path, flags: list[str]) -> bool:
    """Run the demo with adapters of rank 8 and print its figures; whether it went well."""
    outcome = demo(name, folder, ["--num-rollout", "10", "--lora-rank", "8", "--lr", "3e-3", *flags], 240)
    if outcome is None:
        return False
    events, _ = outcome
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    scores = [event["metrics"]["eval/sums"] for event in events if event["event"] == "eval"]
    gaps = [step["train/train_rollout_logprob_abs_diff"] for step in steps]
    first, *later = [event for event in events if event["event"] == "weight_sync"]
    print(f"{name}: accuracy {[round(score, 3) for score in scores]}")
    print(f"{name}: mean log-prob difference {[float(f'{gap:.1e}') for gap in gaps]}")
    print(f"{name}: first sync {first['bytes']:,} bytes {first['seconds']:.2f} s, later {later[-1]['bytes']:,} bytes "
          f"{sum(sync['seconds'] for sync in later) / len(later):.2f} s")
    return scores[-1] > scores[0] + 0.1 and max(gaps) <= BOUND


def main() -> int:
    """Every run of a kind; 1 where one does not go well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", choices=RUNS, default="dense")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    given = parser.parse_args()
    backends = ["--engine", "local"] if given.tiny else SGLANG
    with tempfile.TemporaryDirectory() as folder:
        # None is left out because another failed.
        well = [run(f"{given.kind}, {name}", Path(folder, str(i)), [*backends, *flags])
                for i, (name, flags) in enumerate(RUNS[given.kind].items())]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
