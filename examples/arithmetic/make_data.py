"""Write the three JSONL files of the arithmetic example: train, eval and sft.

The task is to add two two-digit numbers and to box the sum:

    prompt    12+34=
    response  \\boxed{46}

``train.jsonl`` and ``eval.jsonl`` hold prompts with their labels. They share no pair of
operands in either order, so a model that scores on ``eval`` has learnt to add. ``sft.jsonl``
holds worked answers to the train problems, in both orders, written by a *careless teacher* who
always boxes an answer but more often than not forgets to carry (37+85= becomes 12). A model that
imitates the teacher inherits the habit; reinforcement learning, which rewards the true
sum, has to unlearn it.

Every file depends on the arguments alone: the same arguments give the same bytes.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

SMALLEST, LARGEST = 10, 99


def split_pairs(num_eval: int, rng: random.Random) -> tuple[list, list]:
    """Shuffle all unordered operand pairs and deal them into (train, eval), each in a random order."""
    pairs = list(itertools.combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    rng.shuffle(pairs)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    return pairs[num_eval:], pairs[:num_eval]


def forget_carries(a: int, b: int) -> int:
    """Add the units and the tens, and drop what should be carried out of each."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def user_turn(a: int, b: int) -> dict:
    """The chat message that asks for a + b."""
    return {"role": "user", "content": f"{a}+{b}="}


def problem(a: int, b: int) -> dict:
    """One line of train.jsonl or eval.jsonl."""
    return {"prompt": [user_turn(a, b)], "label": str(a + b)}


def worked_answer(a: int, b: int, carelessness: float, rng: random.Random) -> dict:
    """One line of sft.jsonl: the teacher's answer, in which carries may have been forgotten."""
    answer = forget_carries(a, b) if rng.random() < carelessness else a + b
    return {"messages": [user_turn(a, b), {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]}


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Write one JSON object a line, without spaces."""
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def main() -> None:
    """Parse the arguments and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the three files")
    parser.add_argument("--num-eval", type=int, default=1024, help="held-out problems")
    parser.add_argument("--carelessness", type=float, default=0.65, help="how often the teacher forgets to carry")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    train, held_out = split_pairs(args.num_eval, rng)
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", [problem(a, b) for a, b in train])
    write_jsonl(args.out / "eval.jsonl", [problem(a, b) for a, b in held_out])
    both_orders = [pair for a, b in train for pair in ((a, b), (b, a))]
    write_jsonl(args.out / "sft.jsonl", [worked_answer(a, b, args.carelessness, rng) for a, b in both_orders])


if __name__ == "__main__":
    main()
