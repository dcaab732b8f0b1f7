"""A context of 262,144 tokens at 0.6B under context parallelism: it trains, and peak memory beside what the plan says.

    python tests/gpu/long_context.py                                on every GPU that is there
    python tests/gpu/long_context.py --ranks 4 --tokens 131072 --flags "--log-probs-chunk-size 512"
    python tests/gpu/long_context.py --tiny                         the same code on a CPU: two ranks, 512 tokens

Two answers of --tokens each to one prompt, every one cut over all ranks, under full recomputation; weights are
Megatron's random ones. Prints loss, gradient norm and seconds of each step, and predicted and measured peak memory of
the rank with the most: as torch counted it, on a CPU the kernel's high-water mark over what the process had before. The
exit status is 1 where a GPU's prediction is more than 10 % wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks import trained
from trainer_speed import RUN, SHAPES, rollout

TOKENS = 262_144
TINY = SHAPES["qwen3-0.6b"] | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
                               "num_key_value_heads": 2, "intermediate_size": 96}


def plan_of(folder: Path, shape: dict[str, Any], ranks: int, tokens: int, flags: list[str]) -> Any:
    """A run that cuts every sequence over all ranks."""
    from miles_core.plugins.plan import prepare

    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": max(tokens, 40960)}))
    (folder / "run.toml").write_text(RUN.format(folder=folder, tokens=tokens // ranks, length=tokens, groups=1))
    cut = ["--actor-num-gpus-per-node", str(ranks), "--context-parallel-size", str(ranks)]
    return prepare(folder / "run.toml", ["--plan-without-weights", "--trainer-host", "process", *cut,
                                         "--recompute-granularity", "full", *flags])


def main() -> int:
    import torch
    from miles_megatron import estimate

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--ranks", type=int)
    arguments.add_argument("--tokens", type=int)
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--flags", default="", help="of miles run")
    given, gpus = arguments.parse_args(), torch.cuda.device_count()
    ranks, tokens = given.ranks or (2 if given.tiny else max(gpus, 1)), given.tokens or (512 if given.tiny else TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY if given.tiny else SHAPES["qwen3-0.6b"]
        plan = plan_of(Path(folder), shape, ranks, tokens, shlex.split(given.flags))
        parts = estimate.trainer(plan.config, estimate.dimensions_of(plan.config))
        found = asyncio.run(trained(plan, ranks, rollout(2 * tokens, tokens), given.steps))
    predicted, measured = sum(parts.values()), max(one["peak"] for one in found.values())
    first = found[0]
    print(json.dumps({"ranks": ranks, "tokens": tokens, "loss": first["loss"], "grad_norm": first["grad_norm"],
                      "seconds": [round(one, 2) for one in first["seconds"]["step"]], "predicted": round(predicted),
                      "predicted_parts": {name: round(one) for name, one in parts.items()},
                      "measured": measured, "off": round(predicted / measured - 1, 3),
                      "on": "GPU" if gpus else "CPU"}))
    return int(bool(gpus) and abs(predicted / measured - 1) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
