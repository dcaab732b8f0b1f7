"""Stage 1, prompts: an endless, numbered stream of prompts from a JSONL file.

The stream is a function of the file, the seed and the prompt's number alone, so its whole state is the next number and
the numbers that were handed out and have to come again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from miles_core import rng
from miles_core.errors import DataError
from miles_core.reading import parse_json
from miles_core.types import Prompt


class PromptSource(Protocol):
    """What the loop needs of a prompt source."""

    data: str
    """Tells one dataset from another; what a run has under way belongs to it."""

    def __len__(self) -> int:
        """Prompts of one epoch."""

    def next(self) -> Prompt:
        """The next prompt: one that was given back, else a fresh one."""

    def give_back(self, prompts: list[Prompt]) -> None:
        """Hand these out again before anything else, in this order."""

    def state_dict(self) -> dict[str, Any]:
        """JSON state from which a resumed run goes on; what was handed out is not in it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How a JSONL file's rows become prompts.

    Args:
        path: the file, with an optional @[a:b] slice of its rows.
        max_prompt_len: longer prompts are left out; None refuses those beyond `context`.
        context: tokens the model can hold.
        template: keyword arguments of the chat template, or None to take text as it is.
    """

    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    context: int
    max_prompt_len: int | None = None
    template: dict[str, object] | None = None
    stream: str = "train"


class JsonlPrompts:
    """Prompts of a JSONL file, in order or shuffled anew in each epoch.

    Raises:
        DataError: missing file, malformed line, empty dataset, missing key, or a prompt longer than the context.
    """

    def __init__(self, rows: Rows, tokenizer: Any, *, shuffle: bool = False, seed: int = 0):
        self._rows, self._tokenizer, self._shuffle, self._seed = rows, tokenizer, shuffle, seed
        self._records, numbers = read_jsonl(rows.path)
        with open(rows.path.partition("@")[0], "rb") as file:
            self.data = hashlib.file_digest(file, "sha256").hexdigest()[:16] + rows.path.partition("@")[2]
        self._numbers = numbers
        self._ready: dict[int, Prompt] = {}
        self._again: deque[int] = deque()
        self._next = 0
        self._epoch, self._order = -1, np.arange(0)
        self.left_out = 0
        self._keep = self._usable()
        if not self._keep:
            raise DataError("no prompt is left", who=rows.path,
                            fix="the file is empty, its @[a:b] slice is, or --rollout-max-prompt-len leaves all out")

    def __len__(self) -> int:
        return len(self._keep)

    def __getitem__(self, uid: int) -> Prompt:
        epoch, place = divmod(uid, len(self._keep))
        if self._shuffle and epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(rng.key(self._seed, "shuffle", epoch)))
            self._epoch, self._order = epoch, generator.permutation(len(self._keep))
        row = self._keep[int(self._order[place]) if self._shuffle else place]
        if row not in self._ready:
            self._ready[row] = self._render(row)
        ready = self._ready[row]
        return Prompt(uid, row, ready.text, ready.token_ids, ready.label, ready.metadata, ready.messages, ready.stream)

    def next(self) -> Prompt:
        if self._again:
            return self[self._again.popleft()]
        self._next += 1
        return self[self._next - 1]

    def give_back(self, prompts: list[Prompt]) -> None:
        self._again.extendleft(prompt.uid for prompt in reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        following, again = self._next, list(self._again)
        while again and again[-1] == following - 1:  # the same stream; how far sampling got is a matter of timing
            following = again.pop()
        return {"next": following, "again": again, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._again = state["next"], deque(state["again"])

    def _usable(self) -> list[int]:
        """Rows whose prompt fits. Only those that could be too long, by their bytes, are tokenised for it."""
        limit = min(self._rows.max_prompt_len or self._rows.context - 1, self._rows.context - 1)
        keep = []
        for row, record in enumerate(self._records):
            source = self._source(row, record)
            size = sum(len(str(m.get("content", ""))) + 32 for m in source) if isinstance(source, list) else len(source)
            if 4 * size + 256 > limit:  # a byte-level token is at least a byte, a character at most four
                self._ready[row] = self._render(row)
                if len(self._ready[row].token_ids) > limit:
                    self._too_long(row)
                    continue
            keep.append(row)
        return keep

    def _too_long(self, row: int) -> None:
        if self._rows.max_prompt_len is None:
            raise DataError(
                f"the prompt has {len(self._ready[row].token_ids)} tokens and leaves no room for an answer",
                got=f"a context of {self._rows.context}", who=self._where(row),
                fix="shorten it, or leave long prompts out with --rollout-max-prompt-len N",
            )
        self.left_out += 1

    def _where(self, row: int) -> str:
        return f"{self._rows.path.partition('@')[0]}, line {self._numbers[row]}"

    def _source(self, row: int, record: dict[str, Any]) -> str | list[dict[str, Any]]:
        source = self._field(row, record, self._rows.input_key, "--input-key")
        chat = isinstance(source, list) and source and all(isinstance(m, dict) and "role" in m for m in source)
        if not (chat or isinstance(source, str)):
            raise DataError(f"{self._rows.input_key!r} should be text or a list of chat messages", who=self._where(row),
                            got=type(source).__name__ if source else "nothing",
                            fix='write "..." or [{"role": "user", "content": "..."}]')
        if chat and self._rows.template is None:
            raise DataError(f"{self._rows.input_key!r} is a list of chat messages", who=self._where(row),
                            fix="add --apply-chat-template")
        return cast("str | list[dict[str, Any]]", source)

    def _field(self, row: int, record: dict[str, Any], key: str, flag: str) -> Any:
        if key not in record:
            raise DataError(f"the row has no key {key!r}", got=", ".join(record), who=self._where(row),
                            fix=f"name the right key with {flag}")
        return record[key]

    def _render(self, row: int) -> Prompt:
        record = self._records[row]
        source = self._source(row, record)
        messages = source if isinstance(source, list) else None
        if self._rows.template is not None:
            messages = messages or [{"role": "user", "content": source}]
            text = render(self._tokenizer, messages, self._rows.template, self._where(row))
        else:
            text = cast("str", source)
        ids = self._tokenizer(text, add_special_tokens=self._rows.template is None)["input_ids"]
        key = self._rows.label_key
        label = self._field(row, record, key, "--label-key") if key is not None else None
        metadata = record.get(self._rows.metadata_key) or {}
        if not isinstance(metadata, dict):
            raise DataError(f"{self._rows.metadata_key!r} should be an object", got=type(metadata).__name__,
                            who=self._where(row), fix="write {...}, or name another key with --metadata-key")
        return Prompt(row, row, text, tuple(ids), None if label is None else str(label),
                      {k: v for k, v in record.items() if k not in (self._rows.input_key, key)} | metadata,
                      None if messages is None else tuple(messages), self._rows.stream)


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: dict[str, object], where: str) -> str:
    """The chat template's text with the answer's opening.

    Raises:
        DataError: the tokenizer has no template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template", who=str(getattr(tokenizer, "name_or_path", "tokenizer")),
                        fix="pass --chat-template-path FILE, or drop --apply-chat-template")
    import jinja2

    options = {"add_generation_prompt": True, **arguments}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise DataError("the chat template refuses the messages", got=str(error), who=where,
                        fix="check the roles and contents, and `miles check-template`") from error


def read_jsonl(path: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Records and line numbers of a JSONL file; PATH@[a:b] takes a slice of its records.

    Raises:
        DataError: names file and line.
    """
    name, _, cut = path.partition("@")
    span = re.fullmatch(r"\[(-?\d*):(-?\d*)\]", cut) if cut else None
    if cut and span is None:
        raise DataError("the slice should be @[a:b]", got=cut, who=name, fix="for instance data.jsonl@[0:1000]")
    if not Path(name).is_file():
        raise DataError("there is no such prompt file", who=name, fix="check --prompt-data or --eval-prompt-data")
    records, numbers = [], []
    with open(name, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = parse_json(line.strip().decode("utf-8"))
            except json.JSONDecodeError as error:
                raise DataError("the line is not JSON", got=f"{error.msg.removesuffix(' at')} at column {error.colno}",
                                who=f"{name}, line {number}", fix="one JSON object a line") from None
            except UnicodeDecodeError as error:
                raise DataError("the line is not UTF-8 text", got=f"byte 0x{line.strip()[error.start]:02x}",
                                who=f"{name}, line {number}", fix="save the file as UTF-8") from None
            except ValueError as error:
                raise DataError("the line cannot be read", got=str(error), who=f"{name}, line {number}",
                                fix="correct the value, or leave the row out") from None
            if not isinstance(record, dict):
                raise DataError("the line is not a JSON object", got=type(record).__name__,
                                who=f"{name}, line {number}", fix="one JSON object a line")
            records.append(record)
            numbers.append(number)
    if span:
        part = slice(*(int(edge) if edge else None for edge in span.groups()))
        records, numbers = records[part], numbers[part]
    return records, numbers
