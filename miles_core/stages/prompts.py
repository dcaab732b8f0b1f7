"""Stage 1, prompts: an endless, numbered stream of prompts made of rows.

The stream is a function of the rows, the seed and the prompt's number alone, so its whole state is the next number and
the numbers that were handed out and have to come again.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from miles_core import rng
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.reading import field_of, parse_json, sliced
from miles_core.types import Prompt


class Records(Protocol):
    """The rows that a path names."""

    data: str
    """Tells one dataset from another; empty for a beginning."""
    total: int | None
    """Rows in all, which a plan reads the beginning of; None where that is not known."""

    def __len__(self) -> int:
        """Rows that can be asked for."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """They in order, at the cost of reading once."""

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """One of them, made of what JSON has."""

    def where(self, row: int) -> str:
        """How messages refer to it: file and line."""


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
    """How rows become prompts.

    Args:
        path: what names them, with an optional @[a:b] slice.
        max_prompt_len: longer prompts are left out; None refuses those beyond `context`.
        context: tokens the model can hold.
        template: keyword arguments of the chat template, or None to take text as it is.
        metadata: of every prompt, whatever its row says.
    """

    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    context: int
    max_prompt_len: int | None = None
    template: dict[str, object] | None = None
    stream: str = "train"
    metadata: Mapping[str, Any] = field(default_factory=dict)


def rows_of(config: RunConfig, dataset: Mapping[str, Any] | None = None) -> Rows:
    """How the rows of --prompt-data become prompts, or those of an eval dataset."""
    rollout, eval_, own = config.rollout, config.eval, dataset or {}
    keys = (rollout.input_key, rollout.label_key, rollout.rollout_max_prompt_len)
    if dataset is not None:
        keys = (own.get("input_key") or eval_.eval_input_key or keys[0],
                own.get("label_key") or eval_.eval_label_key or keys[1], eval_.eval_max_prompt_len or keys[2])
    return Rows(
        path=own.get("path", rollout.prompt_data), stream=f"eval/{own['name']}" if own else "train",
        input_key=keys[0], label_key=keys[1], metadata_key=rollout.metadata_key, max_prompt_len=keys[2],
        context=cast("int", rollout.rollout_max_context_len), metadata=own.get("metadata_overrides", {}),
        template=(rollout.apply_chat_template_kwargs or {}) if rollout.apply_chat_template else None)


class RowPrompts:
    """Prompts of rows, in order or shuffled anew in each epoch.

    Raises:
        DataError: an empty dataset, a missing key, or a prompt longer than the context.
    """

    def __init__(self, rows: Rows, records: Records, tokenizer: Any, *, shuffle: bool = False, seed: int = 0):
        self._records, self._shuffle, self._seed, self.data = records, shuffle, seed, records.data
        self._prompt = Rendering(rows, records.where, tokenizer)
        self._again: deque[int] = deque()
        self._next = 0
        self._epoch, self._order = -1, np.arange(0)
        self._keep = np.array([row for row, record in enumerate(records) if self._prompt.fits(row, record)], int)
        self.left_out = len(records) - len(self._keep)
        if not len(self._keep):
            raise DataError("no prompts are left", code="prompts-all-dropped", who=rows.path, fix="check that the file "
                            "and its @[a:b] slice are not empty, and raise --rollout-max-prompt-len")

    def __len__(self) -> int:
        return len(self._keep)

    def __getitem__(self, uid: int) -> Prompt:
        epoch, place = divmod(uid, len(self._keep))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self._keep), self._seed, epoch)
        row = int(self._keep[self._order[place] if self._shuffle else place])
        return self._prompt(uid, row, self._records[row])

    def next(self) -> Prompt:
        if not self._again:
            self._next += 1
        return self[self._again.popleft() if self._again else self._next - 1]

    def give_back(self, prompts: list[Prompt]) -> None:
        self._again.extendleft(prompt.uid for prompt in reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        following, again = self._next, list(self._again)
        while again and again[-1] == following - 1:  # the same stream; how far sampling got is a matter of timing
            following = again.pop()
        return {"next": following, "again": again, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._again = state["next"], deque(state["again"])


def shuffled(count: int, seed: int, *epoch: int) -> np.ndarray:
    """The order of `count` rows in an epoch: [count] int64."""
    return np.random.Generator(np.random.Philox(rng.key(seed, "shuffle", *epoch))).permutation(count)


class Rendering:
    """Makes prompts of single rows; `where` is how messages refer to one."""

    def __init__(self, rows: Rows, where: Callable[[int], str], tokenizer: Any):
        self._rows, self._where, self._tokenizer, self._around = rows, where, tokenizer, -1

    def fits(self, row: int, record: Mapping[str, Any]) -> bool:
        """Whether a prompt is no longer than the limit. Only one that could be, by its bytes, is tokenised for it.

        Raises:
            DataError: a row without the prompt, or, where none is to be left out, with one beyond the context.
        """
        rows = self._rows
        limit = min(rows.max_prompt_len or rows.context - 1, rows.context - 1)
        size = len(str(self.source(row, record)))
        if self._around < 0:  # what the template writes beside messages: a preamble, tools
            self._around = max(len(self(row, row, record).text) - size, 64)
        if 4 * (size + self._around) <= limit:  # a byte-level token is at least a byte, a character at most four
            return True
        length = len(self(row, row, record).token_ids)
        if length > limit and rows.max_prompt_len is None:
            raise DataError(f"the prompt has {length} tokens, which leaves no room for an answer",
                            code="prompt-too-long", got=f"a context of {rows.context}", who=self._where(row),
                            fix="shorten it, or drop long prompts with --rollout-max-prompt-len N")
        return length <= limit

    def __call__(self, uid: int, row: int, record: Mapping[str, Any]) -> Prompt:
        """
        Raises:
            DataError: a row without the prompt or the label, or one that the chat template refuses.
        """
        rows, source = self._rows, self.source(row, record)
        messages = source if isinstance(source, list) else None
        if rows.template is not None:
            messages = messages or [{"role": "user", "content": source}]
            text = render(self._tokenizer, messages, rows.template, self._where(row))
        else:
            text = cast("str", source)
        ids = self._tokenizer(text, add_special_tokens=rows.template is None)["input_ids"]
        label = self._field(row, record, rows.label_key, "label-key") if rows.label_key is not None else None
        metadata = record.get(rows.metadata_key) or {}
        if not isinstance(metadata, dict):
            raise DataError(f"{rows.metadata_key!r} should be an object", code="metadata-not-object",
                            got=type(metadata).__name__, who=self._where(row),
                            fix="write {...}, or name another key with --metadata-key")
        whole = isinstance(label, dict | list)  # as text in the label, and itself beside it
        apart = {rows.input_key} if whole else {rows.input_key, rows.label_key}
        return Prompt(uid, row, text, tuple(ids), json.dumps(label) if whole else None if label is None else str(label),
                      {k: v for k, v in record.items() if k not in apart} | metadata | dict(rows.metadata),
                      tuple(messages) if messages else None, rows.stream, None if isinstance(label, str) else label)

    def source(self, row: int, record: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Text, or chat messages, as the row has them."""
        source = self._field(row, record, self._rows.input_key, "input-key")
        chat = isinstance(source, list) and source and all(isinstance(m, dict) and "role" in m for m in source)
        if not (chat or isinstance(source, str)):
            raise DataError(f"{self._rows.input_key!r} should be text or a list of chat messages", who=self._where(row),
                            code="prompt-not-text-or-chat", fix='write "..." or [{"role": "user", "content": "..."}]',
                            got=type(source).__name__ if source else "nothing")
        if chat and self._rows.template is None:
            raise DataError(f"{self._rows.input_key!r} is a list of chat messages", who=self._where(row),
                            fix="add --apply-chat-template", code="prompt-is-chat")
        return list(map(_as_text, source)) if isinstance(source, list) else cast("str", source)

    def _field(self, row: int, record: Mapping[str, Any], key: str, flag: str) -> Any:
        try:
            return field_of(record, key)
        except KeyError:
            raise DataError(f"the row has no key {key!r}", got=", ".join(record), who=self._where(row),
                            fix=f"name the right key with --{'eval-' * (self._rows.stream != 'train')}{flag}",
                            code="row-key-missing") from None


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """With its parts as one text where all are: templates that know no parts write Python's, or none of them."""
    parts: Any = message.get("content") if isinstance(message.get("content"), list) else ()
    texts = [part.get("text") or "" for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    return {**message, "content": "".join(texts)} if texts and len(texts) == len(parts) else message


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: dict[str, object], where: str) -> str:
    """The chat template's text with the answer's opening.

    Raises:
        DataError: the tokenizer has no template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template", code="chat-template-missing",
                        who=str(getattr(tokenizer, "name_or_path", "tokenizer")),
                        fix="pass --chat-template-path FILE; prompts of plain text need no --apply-chat-template")
    import jinja2

    options = {"add_generation_prompt": True, **arguments}
    try:
        return str(tokenizer.apply_chat_template(for_template(messages), tokenize=False, **options))
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise DataError("the chat template rejected the messages", code="chat-template-failed", got=str(error),
                        who=where, fix="check the roles and contents; try `miles check-template`") from error


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same messages as chat templates take them: arguments of tool calls as objects, where their text is one.

    OpenAI's form has them as text, which most templates would write as a text of JSON in JSON.
    """
    return [{**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
            if message.get("tool_calls") else message for message in messages]


def _with_object(call: Any) -> Any:
    try:
        if "function" in call:
            return {**call, "function": _with_object(call["function"])}
        arguments = parse_json(call["arguments"])
    except (KeyError, TypeError, ValueError):  # no call, arguments that are an object already, or text that is no JSON
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


class JsonlRecords(list[dict[str, Any]]):
    """The rows of a JSONL file, in memory; PATH@[a:b] takes a slice.

    Args:
        most: bytes of the file's beginning that are enough; None reads all.

    Raises:
        DataError: names file and line.
    """

    def __init__(self, path: str, most: int | None = None):
        self._name, part = sliced(path)
        if not Path(self._name).is_file():
            raise DataError("the prompt file does not exist", code="prompt-file-missing", who=self._name,
                            fix="check --prompt-data or --eval-prompt-data")
        whole, self.data = most is None or Path(self._name).stat().st_size <= most, ""
        with open(self._name, "rb") as file:
            if most is None:
                self.data = hashlib.file_digest(file, "sha256").hexdigest()[:16] + path.removeprefix(self._name)[1:]
                file.seek(0)
            lines = file if whole else [line for line in file.read(most).splitlines(keepends=True)
                                        if line.endswith(b"\n") or not line.lstrip().startswith(b"{")]
            rows = [(number, self._record(line, number)) for number, line in enumerate(lines, 1) if line.strip()]
        if not whole and min(part.start or 0, part.stop or 0) < 0:  # of rows whose number is not known
            rows = []
        super().__init__(record for _, record in rows[part])
        self.total, self._numbers = len(self) if whole else None, [number for number, _ in rows[part]]

    def where(self, row: int) -> str:
        return f"{self._name}, line {self._numbers[row]}"

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = parse_json(line.strip())
            if isinstance(record, dict):
                return record
            problem = type(record).__name__
        except ValueError as error:
            problem = str(error).replace("line 1 ", "")
        raise DataError("the line is not a JSON object", code="prompt-line-not-json", got=problem,
                        who=f"{self._name}, line {number}", fix="write one JSON object per line, in UTF-8")
