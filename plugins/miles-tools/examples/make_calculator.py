"""Make the data and the warm start of the calculator recipe, under runs/calculator.

    python plugins/miles-tools/examples/make_calculator.py

Run it from the repository's root; it takes about a minute. The task is to multiply two two-digit numbers and to box the
product, which the tiny model cannot do in its head:

    user       37*85=
    assistant  <calc>37*85</calc>
    tool       3145
    assistant  \\boxed{3145}

Reinforcement learning needs a model that calls the tool now and then, and no random tokens ever do. So the arithmetic
example's tiny Qwen3 first imitates a *hasty teacher*, who takes the calculator three times in ten and otherwise writes
the product rounded to its leading digit. What is left to learn from rewards alone is that calling pays. The products of
the eval set are in no line of the other two files, in either order.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SMALLEST, LARGEST = 11, 99


def asked(a: int, b: int) -> dict:
    """The chat message that asks for a * b."""
    return {"role": "user", "content": f"{a}*{b}="}


def rounded(product: int) -> int:
    """The leading digit, and zeros: 3145 becomes 3000."""
    unit = 10 ** (len(str(product)) - 1)
    return round(product / unit) * unit


def demonstration(a: int, b: int, calls: float, rng: random.Random) -> dict:
    """One line of sft.jsonl: the teacher calls the tool with probability `calls`, else guesses."""
    if rng.random() < calls:
        turns = [{"role": "assistant", "content": f"<calc>{a}*{b}</calc>"}, {"role": "tool", "content": str(a * b)}]
        answer = a * b
    else:
        turns, answer = [], rounded(a * b)
    return {"messages": [asked(a, b), *turns, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]}


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def main() -> None:
    """Write the three files, then train the warm start on the demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calculator"), help="folder for data and checkpoint")
    parser.add_argument("--num-eval", type=int, default=256, help="held-out products")
    parser.add_argument("--calls", type=float, default=0.3, help="how often the teacher takes the calculator")
    args = parser.parse_args()

    rng = random.Random(0)
    pairs = list(itertools.combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    rng.shuffle(pairs)
    held_out, train = pairs[: args.num_eval], pairs[args.num_eval :]
    both_orders = [pair for a, b in train for pair in ((a, b), (b, a))]
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "eval.jsonl", [{"prompt": [asked(a, b)], "label": str(a * b)} for a, b in held_out])
    write_jsonl(args.out / "train.jsonl", [{"prompt": [asked(a, b)], "label": str(a * b)} for a, b in train])
    write_jsonl(args.out / "sft.jsonl", [demonstration(a, b, args.calls, rng) for a, b in both_orders])
    miles = Path(sys.executable).with_name("miles")
    subprocess.run([miles, "run", HERE / "warm-start.toml", f"--run-dir={args.out}/sft", f"--save-hf={args.out}/warm",
                    f"--save={args.out}/sft/checkpoints", f"--prompt-data={args.out}/sft.jsonl"], check=True)


if __name__ == "__main__":
    main()
