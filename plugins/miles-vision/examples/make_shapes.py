"""Make the images, the rows and the warm start of the recipe grpo-shapes, under runs/shapes.

    python plugins/miles-vision/examples/make_shapes.py

Run it from the repository's root; it takes a minute and a half of CPU. An image shows up to six shapes in sixteen
cells, from none to four of them circles and one or two squares, in any colours. The question is always the same, so
that nothing but the image answers it:

    user       <image>How many circles?
    assistant  \\boxed{2}

A tiny Qwen2.5-VL with random weights first imitates a *hasty teacher*, who looks at each shape four times in ten and
otherwise says how many shapes there are. What is left to learn from rewards alone is to tell circles from squares.
Counts are equally frequent in every file, so that whoever does not look is right once in five times. The rows of
blank.jsonl are those of eval.jsonl with a grey image; those of train-blank.jsonl train a control.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ARITHMETIC = HERE.parents[2] / "examples" / "arithmetic"
COUNTS = range(5)
CELLS, CELL = 4, 8
GREY = (128, 128, 128)
QUESTION = "<image>How many circles?"
TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "min_pixels": 64, "max_pixels": (CELLS * CELL) ** 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}


def draw(circles: int, squares: int, rng: random.Random):
    """An image with so many shapes, each in a cell of its own and a colour of its own."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), GREY)
    pen = ImageDraw.Draw(image)
    for number, cell in enumerate(rng.sample(range(CELLS**2), circles + squares)):
        x, y = (part * CELL + rng.randrange(2) for part in divmod(cell, CELLS))
        colour = tuple(rng.choice([rng.randrange(60), rng.randrange(196, 256)]) for _ in range(3))
        (pen.ellipse if number < circles else pen.rectangle)((x, y, x + 6, y + 6), fill=colour)
    return image


def rows(folder: Path, name: str, size: int, rng: random.Random) -> list[dict]:
    """Images under folder/name, and a row for each with the number of its shapes."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(size):
        circles, squares = COUNTS[number % len(COUNTS)], rng.randrange(1, 3)
        draw(circles, squares, rng).save(folder / name / f"{number}.png")
        made.append({"prompt": [{"role": "user", "content": QUESTION}], "images": [f"{name}/{number}.png"],
                     "label": str(circles), "shapes": circles + squares})
    return made


def demonstration(row: dict, looks: float, rng: random.Random) -> dict:
    """What the teacher says, who tells circles from squares with probability `looks`."""
    answer = row["label"] if rng.random() < looks else row["shapes"]
    return row | {"response": f"\\boxed{{{answer}}}"}


def write_jsonl(path: Path, some: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in some))


def random_checkpoint(folder: Path) -> None:
    """A Hugging Face directory: seeded random weights of shapes.json, a tokenizer of bytes, an image processor."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText

    constants = json.loads((HERE / "shapes.json").read_text())
    config = AutoConfig.for_model(constants.pop("model_type"), **constants)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    subprocess.run([sys.executable, ARITHMETIC / "make_tokenizer.py", folder], check=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


def main() -> None:
    """Write images and rows, then train the warm start on the demonstrations."""
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"), help="folder for data and checkpoint")
    parser.add_argument("--looks", type=float, default=0.4, help="how often the teacher looks at each shape")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    out = args.out
    data = {name: rows(out, name, size, rng) for name, size in (("sft", 2000), ("train", 1000), ("eval", 250))}
    Image.new("RGB", (CELLS * CELL, CELLS * CELL), GREY).save(out / "blank.png")
    blank = {name: [row | {"images": ["blank.png"]} for row in data[name]] for name in ("train", "eval")}
    write_jsonl(out / "sft.jsonl", [demonstration(row, args.looks, rng) for row in data["sft"]])
    write_jsonl(out / "train.jsonl", data["train"])
    write_jsonl(out / "eval.jsonl", data["eval"])
    write_jsonl(out / "train-blank.jsonl", blank["train"])
    write_jsonl(out / "blank.jsonl", blank["eval"])
    random_checkpoint(out / "random")
    miles = Path(sys.executable).with_name("miles")
    subprocess.run([miles, "run", HERE / "warm-start.toml", f"--hf-checkpoint={out}/random", f"--run-dir={out}/sft-run",
                    f"--save-hf={out}/warm", f"--save={out}/sft-run/checkpoints", f"--prompt-data={out}/sft.jsonl"],
                   check=True)


if __name__ == "__main__":
    main()
