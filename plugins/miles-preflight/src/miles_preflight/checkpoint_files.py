"""A checkpoint's files: all there, none cut short, and a model beside the policy that reads its tokens.

Read are the index, and of each *.safetensors file the header, which says how long the file is; no weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError
from miles_core.reading import parse_json

LOOKED_AT = 64 * 1024
"""Bytes of tokenizer.json, at whose start the special tokens stand."""
AGAIN = "fetch the checkpoint again"
POINTER = b"version https://git-lfs"
SPECIAL = r'"id":\s*(\d+),\s*"content":\s*("(?:[^"\\]|\\.)*")'
"""How tokenizer.json writes a token that was added to the vocabulary: its id, and itself as JSON."""
_PLAIN = re.compile(r'("(?:[^"\\]|\\.)*"):\s*(\d+)\s*,')
SHAPELESS = ("model_type", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
             "num_attention_heads", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
             "routed_scaling_factor", "sliding_window", "tie_word_embeddings")
"""Keys of config.json by which two models compute differently, though their tensors may have the same shapes."""


def check_files(config: RunConfig) -> None:
    """
    Raises:
        CheckpointError: files of weights that are missing or cut short, or a reference that is another model.
    """
    folder, (_, constants) = Path(str(config.checkpoint.hf_checkpoint)), config_json(config)
    if constants is not None:
        check_whole(folder)
    reference = config.checkpoint.ref_load
    if constants is not None and reference is not None and not config.debug.debug_rollout_only:
        check_other(config, Path(reference))
        other = read(Path(reference) / "config.json")
        for key in SHAPELESS:
            if constants.get(key) is not None and other.get(key, constants[key]) not in (None, constants[key]):
                raise _error(Path(reference), "the reference is another model, and would be computed with the policy's "
                             f"{key}", f"{other[key]} and {constants[key]}",
                             "name a checkpoint of the model that is trained with --ref-load")


def check_whole(folder: Path) -> None:
    """
    Raises:
        CheckpointError: a file is missing, cut short or a pointer.
    """
    for path in sorted(path for kind in ("*.json", "*.safetensors", "*.model") for path in folder.glob(kind)):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise _error(path, "this is a pointer of Git LFS, whose file was not fetched", None,
                             "git lfs pull, or fetch the checkpoint again")
    for path in sorted(folder.glob("*.safetensors")):
        _check_length(path)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        files = {str(file) for file in parse_json(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _error(index, "the index of the weights cannot be read", error, AGAIN) from None
    if missing := sorted(file for file in files if not (folder / file).is_file()):
        raise _error(folder, f"files of weights that {index.name} names are not there",
                     ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else ""), AGAIN)
    if (folder / "model.safetensors").is_file() and "model.safetensors" not in files:
        raise _error(folder, "the folder has weights twice: model.safetensors, and files that an index names", None,
                     f"remove what is older: model.safetensors, or {index.name} and its files")


def _check_length(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = parse_json(file.read(length) if length < size else "")
            end = 8 + length + max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"),
                                   default=0)
        except (ValueError, AttributeError, LookupError, TypeError):
            raise _error(path, "a tensor file cannot be read: it is not whole", f"{size} bytes", AGAIN) from None
    if size != end:
        raise _error(path, "a tensor file cannot be read: it is cut short", f"{size} of {end} bytes", AGAIN)


def check_other(config: RunConfig, folder: Path) -> None:
    """A Hugging Face folder of another model that reads the policy's tokens.

    Raises:
        CheckpointError: files that are not whole, or other tokens.
    """
    policy = Path(str(config.checkpoint.hf_checkpoint))
    if folder == policy or not (folder / "config.json").is_file():
        return
    check_whole(folder)
    if other := other_tokens(policy, folder):
        raise _error(folder, "its tokens are not the policy's", other,
                     "name a model of the policy's family, with the same tokenizer")


def other_tokens(one: Path, other: Path) -> str | None:
    """A token that has another id in another folder, of those at the start of both tokenizers."""
    ours, theirs = (dict(_tokens(folder / "tokenizer.json")) for folder in (one, other))
    return next((f"{token} is {ours[token]} and {theirs[token]}" for token in ours
                 if token in theirs and ours[token] != theirs[token]), None)


def _tokens(path: Path) -> Iterator[tuple[str, int]]:
    """Of a tokenizer.json, special tokens and as much of the vocabulary, with their ids."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * LOOKED_AT).decode("utf-8", "ignore")
    except OSError:
        return
    head, _, tail = text.partition('"vocab"')
    yield from ((token, int(number)) for number, token in re.findall(SPECIAL, head))
    yield from ((token, int(number)) for token, number in _PLAIN.findall(tail[:LOOKED_AT]))


def read(path: Path) -> Mapping[str, Any]:
    """A JSON object; nothing where there is none that can be read."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or the start speaks of it
        return {}
    return content if isinstance(content, Mapping) else {}


def _error(path: Path, what: str, got: object, fix: str) -> CheckpointError:
    return CheckpointError(what, got=got, who=str(path), fix=fix, code="checkpoint-file-damaged")
