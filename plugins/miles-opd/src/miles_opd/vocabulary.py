"""Whether teacher and student mean the same by a token id. Read from their folders, before anything is built."""

from __future__ import annotations

from pathlib import Path

from miles_core.errors import ConfigError
from miles_core.reading import parse_json, reading


def check_vocabulary(student: str, teacher: str | None, top_k: int = 0) -> None:
    """Refuse a teacher whose token ids are not the student's.

    The output layers may differ in length where the tokenizers agree, as padding does that; with top-k they may not,
    for each model has to score the other's tokens.

    Args:
        student: a Hugging Face directory.
        teacher: another, a checkpoint of the student's architecture (nothing to compare), or None.

    Raises:
        ConfigError: names both folders and what differs.
    """
    sizes = [_size(Path(student))]
    if teacher is not None and (Path(teacher) / "config.json").is_file():
        sizes.append(_size(Path(teacher)))
        _compare(Path(student), Path(teacher), sizes, top_k)
    if top_k > min(sizes):
        raise ConfigError("top-k asks for more tokens than the vocabulary has", got=f"{top_k} of {min(sizes)}",
                          who="opd.opd_log_prob_top_k", code="opd-top-k-above-vocabulary", fix="lower it; 20 is usual")


def _compare(student: Path, teacher: Path, sizes: list[int], top_k: int) -> None:
    ours, theirs = _tokenizer(student), _tokenizer(teacher)
    one, other = sizes
    if ours is not None and theirs is not None:
        differ = next((part for part in ours if ours[part] != theirs[part]), None)
        what = f"their tokenizers differ in {differ}" if differ else None
    else:
        what = f"their vocabularies have {one} and {other} tokens" if one != other else None
    if what is None and top_k and one != other:
        what = f"their output layers have {one} and {other} rows, and top-k asks each model about the other's tokens"
    if what is not None:
        raise ConfigError("teacher and student do not share a vocabulary", code="opd-vocabulary-mismatch", got=what,
                          who=f"{teacher} and {student}",
                          fix="take a teacher of the student's family, with the same tokenizer")


def _size(folder: Path) -> int:
    with reading(str(folder / "config.json"), ConfigError):
        constants = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        return int((constants.get("text_config") or constants)["vocab_size"])


def _tokenizer(folder: Path) -> dict[str, object] | None:
    """What decides which ids a text becomes: vocabulary, merges, added tokens. None without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    with reading(str(path), ConfigError):
        data = parse_json(path.read_text(encoding="utf-8"))
        model = data["model"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        return {"vocabulary": model.get("vocab"), "merges": merges,
                "added tokens": {token["content"]: token["id"] for token in data.get("added_tokens") or ()}}
