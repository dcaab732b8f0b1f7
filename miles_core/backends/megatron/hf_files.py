"""The checkpoint's files against each other: weights that are all there, and of the sizes that config.json states.

Read are the index, and of each *.safetensors file the header, which names tensors, shapes and places; no weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from miles_core.config.architecture import Architecture, architecture_of
from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError

LOOKED_AT = 64 * 1024
"""Bytes of tokenizer.json, at whose start the special tokens stand."""
AGAIN = "fetch the checkpoint again"
POINTER = b"version https://git-lfs"
_LAYER = re.compile(r"(?:model\.|language_model\.)layers\.(\d+)\.")


def check_files(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        CheckpointError: files that are missing or cut short, or that are of another model than config.json.
    """
    folder, (_, said) = Path(str(config.checkpoint.hf_checkpoint)), config_json(config)
    if said is None:
        return config
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.model")]):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise _error(path, "this is a pointer of Git LFS, whose file was not fetched", None,
                             "git lfs pull, or fetch the checkpoint again")
    files = sorted(folder.glob("*.safetensors"))
    _complete(folder, files)
    shapes = {name: shape for path in files for name, shape in _header(path).items()}
    if shapes and not (folder / "adapter_config.json").is_file():
        _sizes(folder, shapes, architecture_of(config), said)
    _end_of_sequence(folder, said)
    return config


def _complete(folder: Path, files: list[Path]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(re.search(r"-\d{5}-of-\d{5}\.", path.name) for path in files):
            raise _error(folder, "the weights are in several files, and no index says which is where",
                         f"no {index.name}", AGAIN)
        return
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the start will speak of it
        return
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise _error(folder, f"files of weights that {index.name} names are not there",
                     ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else ""), AGAIN)


def _header(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a file, once it is certain that the file is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if length < size else "")
            tensors = {name: one for name, one in header.items() if name != "__metadata__"}
            end = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
            shapes = {name: tuple(one["shape"]) for name, one in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError):
            raise _error(path, "a tensor file cannot be read: it is not whole", f"{size} bytes", AGAIN) from None
    if size != end:
        raise _error(path, "a tensor file cannot be read: it is cut short", f"{size} of {end} bytes", AGAIN)
    return shapes


def _sizes(folder: Path, shapes: Mapping[str, tuple[int, ...]], model: Architecture, said: Mapping) -> None:
    values = (model.groups or 0) * (model.head_dim or 0)
    stated = {"embed_tokens.weight": (model.vocab, model.hidden),
              "layers.0.mlp.gate_proj.weight": (model.ffn, model.hidden),
              "layers.0.self_attn.k_proj.weight": (values or None, model.hidden)}  # fmt: skip
    for name, shape in shapes.items():
        wanted = next((size for end, size in stated.items() if name.endswith(end) and "vis" not in name), None)
        if wanted is not None and None not in wanted and len(shape) == 2 and shape != wanted:
            raise _error(folder, "the tensors do not fit the sizes that config.json states",
                         f"misshapen {name}: {shape}, not {wanted}", "both files have to be of one checkpoint")
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    # Layers behind the model's own, which predict tokens further on, take two inputs; config.json need not count them.
    further = {int(found[1]) for name in shapes if "eh_proj" in name and (found := _LAYER.search(name))}
    if model.layers and layers and not len(layers - further) <= model.layers <= len(layers):
        raise _error(folder, f"config.json has {model.layers} layers, and the weights are of others", len(layers),
                     "both files have to be of one checkpoint")
    if said.get("tie_word_embeddings") is False and layers and not any("lm_head" in name for name in shapes):
        raise _error(folder, "config.json says that the output layer has weights of its own, and they are not there",
                     "no lm_head.weight", "set tie_word_embeddings to true there, or fetch the checkpoint again")


def _end_of_sequence(folder: Path, said: Mapping) -> None:
    """The token that ends an answer is one of the model's. Special tokens stand at the start of tokenizer.json."""
    vocab, ids = said.get("vocab_size"), said.get("eos_token_id")
    found = {("config.json", one) for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    try:
        text = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        with (folder / "tokenizer.json").open("rb") as file:
            start = file.read(LOOKED_AT).decode("utf-8", "ignore")
        spelled = rf'"id":\s*(\d+),\s*"content":\s*{re.escape(json.dumps(text, ensure_ascii=False))}'
        found |= {("tokenizer.json", int(one)) for one in re.findall(spelled, start)}
    except (OSError, ValueError, AttributeError):  # the start says what is wrong with it
        pass
    for name, one in sorted(found):
        if isinstance(vocab, int) and not 0 <= one < vocab:
            raise _error(folder / name, "the token that ends a sequence is none of the model's",
                         f"{one}, and config.json has a vocab_size of {vocab}",
                         "tokenizer, config.json and weights have to be of one checkpoint")


def _error(path: Path, what: str, got: object, fix: str) -> CheckpointError:
    return CheckpointError(what, got=got, who=str(path), fix=fix)
