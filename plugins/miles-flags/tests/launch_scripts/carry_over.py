"""Launch scripts of Miles and slime (scripts.json), their models' shapes (models.json), what is refused and why.

    python carry_over.py docs/coming-from-miles.md     writes the page's table of them anew
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet

HERE = Path(__file__).parent
QUANTIZED = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}}}},
}
"""What config.json says of rounded weights."""


def recorded() -> dict[str, dict]:
    """scripts.json: by repository its commit, the words of its scripts, and YAML files that they name."""
    return json.loads((HERE / "scripts.json").read_text(encoding="utf-8"))


def scripts() -> Iterator[tuple[str, str, list[str]]]:
    """(repository, path, words) of every launch script; the first word is train.py or train_async.py."""
    for repository, entry in recorded().items():
        for path, words in entry["scripts"].items():
            yield repository, path, shlex.split(words)


def configuration(name: str) -> dict:
    """config.json of a model; of the longest name in models.json that a folder's name begins with."""
    models = json.loads((HERE / "models.json").read_text(encoding="utf-8"))
    known = max((model for model in models if name.lower().startswith(model.lower())), key=len)
    said = _whole(models, models[known])
    rounded = said.pop("quantized", None)
    rounded = next((word for word in QUANTIZED if word in name.lower()), rounded)
    return said | ({"quantization_config": QUANTIZED[rounded]} if rounded else {})


def _whole(models: dict, said: dict) -> dict:
    whole = _whole(models, models[said["like"]]) if "like" in said else {}
    whole |= {key: value for key, value in said.items() if key != "like"}
    return whole | ({"text_config": _whole(models, said["text_config"])} if "text_config" in said else {})


DATA = ("--prompt-data", "--eval-prompt-data")
WEIGHTS = ("--ref-load", "--opd-teacher-load")


def argv(words: list[str], root: Path, tokenizer: Path) -> list[str]:
    """The words of a script with its absolute paths below `root`, where what they name is laid out.

    Args:
        tokenizer: a folder whose tokenizer every model gets.
    """
    moved = [below(root, word) for word in words]
    model = Path(after(moved, "--hf-checkpoint")[0])
    shutil.copytree(tokenizer, model)
    said = configuration(model.name)
    (model / "config.json").write_text(json.dumps(said), encoding="utf-8")
    if "vision_config" in said:
        (model / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    said.pop("quantization_config", None)  # what upstream's tools make of a checkpoint is not rounded
    for given in (given for flag in WEIGHTS for given in after(moved, flag)):
        Path(given).mkdir(parents=True, exist_ok=True)
        (Path(given) / "config.json").write_text(json.dumps(said), encoding="utf-8")
    for folder in map(Path, after(moved, "--load")):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "config.json").exists() and folder != model:  # a converted checkpoint, not a run's
            (folder / "release").mkdir()
            (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
    files = {below(root, name): below(root, text)
             for entry in recorded().values() for name, text in entry["files"].items()}
    texts = [files[word] for word in moved if word in files]
    for name in set(moved) & set(files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(files[name], encoding="utf-8")
    row = {after(moved, "--input-key", "input")[0]: "1+1=", after(moved, "--label-key", "label")[0]: "2", "label": "2",
           after(moved, "--metadata-key", "metadata")[0]: {}}
    paths = [word.partition("@")[0] for flag in DATA for word in after(moved, flag)]
    for path in (*paths, *re.findall(r"path: *(\S+)", "\n".join(texts))):
        if path.startswith((str(root), "./")):  # scripts are started in `root`
            path = str(root / path)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write(Path(path), columns(words, row) if path.endswith(".parquet") else row)
    return moved


def below(root: Path, text: str) -> str:
    """A text with its absolute paths below a folder."""
    return re.sub(r"(^|(?<=[\s:=]))/(?=\w)", f"{root}/", text)


CHAT = [{"role": "user", "content": "1+1="}]
GRADED = {"ground_truth": {"target": ["2"]}, "style": "rule"}
"""What the datasets of search-r1 have under reward_model."""


def columns(words: list[str], row: dict) -> dict:
    """A row of the Parquet files that scripts name: chat messages, with their answers for supervised fine-tuning."""
    answer = [{"role": "assistant", "content": "2"}] if "sft_loss" in words else []
    label = after(words, "--label-key", "label")[0]
    graded = GRADED if label == "reward_model" else "2"
    filled = {key: value for key, value in row.items() if value != {}}  # for which Parquet has no type
    keys = {after(words, flag, "input")[0] for flag in ("--input-key", "--eval-input-key")}
    return filled | dict.fromkeys(keys, CHAT + answer) | {label: graded}


def write(path: Path, row: dict) -> None:
    """A file of prompts, of many rows that are alike."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 1024), path)
    else:
        path.write_text((json.dumps(row) + "\n") * 1024, encoding="utf-8")


def after(words: list[str], flag: str, default: str | None = None) -> list[str]:
    """What follows a flag the last time that it is there."""
    if flag not in words:
        return [] if default is None else [default]
    rest = words[len(words) - words[::-1].index(flag):]
    return rest[:next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


def refused() -> dict[str, dict]:
    """repository/path of a script that is refused -> its entry in refused.toml."""
    found = tomllib.loads((HERE / "refused.toml").read_text(encoding="utf-8"))["refused"]
    return {script: entry for entry in found for script in entry["scripts"]}


PART = re.compile(r"(<!-- launch scripts -->\n).*?(<!-- end of launch scripts -->)", re.DOTALL)


def page(text: str) -> str:
    """A page with its table of launch scripts as it should be."""
    return PART.sub(lambda part: f"{part[1]}{chr(10).join(table())}\n{part[2]}", text)


def table() -> list[str]:
    """How many scripts of each repository plan untouched, and why the others do not."""
    lines = ["| scripts of | commit | scripts | planned untouched |", "|---|---|---|---|"]
    for repository, entry in recorded().items():
        stopped = sum(f"{repository}/{path}" in refused() for path in entry["scripts"])
        count = len(entry["scripts"])
        lines.append(f"| {repository} | {entry['commit'][:7]} | {count} | {count - stopped} |")
    reasons = Counter(entry["reason"] for entry in refused().values())
    lines += ["", "| refused | scripts |", "|---|---|"]
    return lines + [f"| {reason} | {count} |" for reason, count in reasons.most_common()]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(page(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
