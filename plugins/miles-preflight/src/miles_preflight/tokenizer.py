"""The run's tokenizer against its model: tokens that end answers, read from files. No transformers here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_preflight.checkpoint_files import SPECIAL, read

VOCABULARIES = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""One of these a folder with a tokenizer has."""
_ADDED = re.compile(SPECIAL.encode())


def check_tokenizer(config: RunConfig, note: Callable[[str], None]) -> None:
    """
    Raises:
        DataError: answers would never end: a token that ends them is beyond the model's vocabulary, or the tokenizer is
            another model's, which has none of them.
    """
    folder, constants = Path(str(config.checkpoint.hf_checkpoint)), config_json(config)[1] or {}
    added, tokenizer_config = _added_tokens(folder), read(folder / "tokenizer_config.json")
    generation = _ids(read(folder / "generation_config.json").get("eos_token_id"))
    stops, own = _ids(constants.get("eos_token_id")) | generation, token_text(tokenizer_config.get("eos_token"))
    if not stops and own is None and not read(folder / "special_tokens_map.json").get("eos_token"):
        note("no file of the model names a token that ends answers: each goes on to --rollout-max-response-len")
    same, vocabulary = "copy tokenizer.json and tokenizer_config.json of this model there", constants.get("vocab_size")
    ends = stops | ({added[own]} if own in added else set())
    if isinstance(vocabulary, int) and (beyond := sorted(one for one in ends if not 0 <= one < vocabulary)):
        raise DataError("a token that ends answers is beyond the model's vocabulary, and never drawn",
                        got=f"{beyond[0]}, and config.json has a vocab_size of {vocabulary}", who=str(folder), fix=same,
                        code="end-token-beyond-vocabulary")
    listed = {int(one) for one in tokenizer_config.get("added_tokens_decoder") or {} if one.isdecimal()}
    if stops and added and not stops & {*added.values(), *listed}:
        raise DataError("no token that ends the model's answers is a special token of the tokenizer, which is another "
                        "model's", got=f"eos_token_id {', '.join(map(str, sorted(stops)))}", who=str(folder), fix=same,
                        code="tokenizer-of-other-model")
    if own in added and generation and added[own] not in generation:
        note(f"answers end at {own} ({added[own]}), which the tokenizer names, and at "
             f"{', '.join(map(str, sorted(generation)))}, which generation_config.json names")


def check_present(config: RunConfig) -> None:
    """
    Raises:
        DataError: the model has no tokenizer: transformers would make one without tokens, and every prompt be empty.
    """
    folder = Path(str(config.checkpoint.hf_checkpoint))
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise DataError("the model has no tokenizer, and every prompt would be empty", got="no such files",
                        who=f"--hf-checkpoint {folder}", code="tokenizer-missing",
                        fix="copy tokenizer.json and tokenizer_config.json of its model there")


def token_text(token: object) -> str | None:
    """A token as tokenizer_config.json writes it, as text."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens that were added to the vocabulary, with their ids."""
    path = folder / "tokenizer.json"
    raw = path.read_bytes() if path.is_file() else b""
    return {json.loads(text): int(number) for number, text in _ADDED.findall(raw, 0, max(raw.find(b'"normalizer"'), 0))}


def _ids(value: object) -> set[int]:
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
