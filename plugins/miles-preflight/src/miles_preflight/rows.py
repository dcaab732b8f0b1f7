"""The first rows of the prompt files, and the chat template: what would end the run before its first answer.

Read are some 64 KiB of each, by what the run reads them with (hook `read_rows`). A file that is not here yet is not
judged, see `paths.astray`.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.plugins.bind import bind
from miles_core.plugins.select import Selected
from miles_core.reading import field_of, format_of, parse_json, reading, sliced
from miles_preflight.chat_template import ChatTemplate, check_rendered, check_tokenizer, tokenizer_of
from miles_preflight.paths import FOLDER, astray
from miles_preflight.remarks import remark

if TYPE_CHECKING:
    from miles_core.stages.prompts import Records

LOOKED_AT = 64 * 1024
"""Bytes of a file."""
COUNTED = 64 * 1024**2
"""Bytes of the largest file whose lines are counted, and only where their number says how long the run is."""
FORMATS = {b"PAR1": "Parquet", b"ARROW": "Arrow", b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "gzip",
           b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched"}
"""How files begin that people take for JSONL."""
Readers = Mapping[str, Callable[[str, int], "Records"]]
OF_ROWS = ("rows", "stream")
"""Prompt sources that make prompts of the rows of --prompt-data."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab*", "*vocab*.json", "tekken.json", "*.py")
"""One of these a folder with a tokenizer has."""
_RENDERED = re.compile(r"\s*(<\|[\w ]+\|>|<s>|<bos>|<start_of_turn>|\[INST\]|<\uff5c)")
"""How a text begins that a chat template has made already."""
_MESSAGES = re.compile(
    r"""\s*(\{\s*['"](messages|conversations)['"]\s*:\s*)?\[\s*\{\s*['"](role|content|from)['"]\s*:""")
"""How chat messages begin that were written as text."""
NOTHING = ("", "nan", "NaN", "None", "null", "<NA>")
"""What is written for an answer that is missing."""


@dataclass(frozen=True, slots=True)
class File:
    """A prompt file and how its rows are read.

    Args:
        key: the option that names it.
        keys: of the prompt and of the label, with the flags that say them.
        scorers: of its answers.
    """

    key: str
    path: str
    input_key: str
    label_key: str | None
    eval: bool = False
    scorers: Sequence[str] = ()


def readers_of(plugins: Sequence[Selected], config: RunConfig) -> Readers:
    """What reads rows in this run, by format."""
    reading_rows = [one for one in plugins if any(offer.hook == "read_rows" for offer in one.manifest.offers)]
    readers: Readers = bind(reading_rows, config, "plan").read_rows
    return readers


def check_rows(config: RunConfig, readers: Readers, note: Callable[[str], None]) -> None:
    """

    Raises:
        DataError: rows that are not there or cannot be read, that lack the keys that are read, or no chat template.
    """
    if config.debug.debug_train_only or config.rollout.prompt_source not in OF_ROWS:
        return
    files = [_File(config, file, readers) for file in _files(config)]
    for one in files:
        with reading(one.origin):
            one.check()
    _template(config)
    tokenizer = tokenizer_of(config)
    if present(config):
        check_tokenizer(config, tokenizer)
    template = ChatTemplate(config) if config.rollout.apply_chat_template else None
    for one in files:
        with reading(one.origin):
            one.check_rendered(template)
    remark(config, [(one.origin, one.prompts, one.whole) for one in files], tokenizer, note)


def check_needs(config: RunConfig, readers: Readers, name: str, key: str | None = None, *,
                generates: bool = False) -> None:
    """
    Args:
        name: a scorer that compares with labels; with `key` it reads this of a row or its metadata, else the label.
        generates: `name` is a generator that takes the answer from there, or from the end of a conversation.

    Raises:
        DataError: a row does not have it.
    """
    if config.debug.debug_train_only or config.rollout.prompt_source not in OF_ROWS:
        return
    files = (file for file in _files(config) if (not file.eval if generates else name in file.scorers))
    for file in (_File(config, file, readers) for file in files):
        file.check()
        for where, row in file.rows:
            file.check_need(where, row, name, key, generates)


def present(config: RunConfig) -> bool:
    """Whether the prompts are here. A plan may be made before; a run cannot begin, so what needs them can wait."""
    return config.rollout.prompt_source not in OF_ROWS or _there(str(config.rollout.prompt_data).partition("@")[0])


def _there(name: str) -> bool:
    """Whether something is at a path, which may stand for several files; of ORG/NAME its reader knows."""
    place = name.partition(":")[0] if format_of(name) == "dataset" else name
    named = place != name or format_of(name) == "dataset" and re.fullmatch(r"[\w-][^/]*/[^/]+", name)
    return bool(named) or Path(place).exists() or any(glob.iglob(place))


def _files(config: RunConfig) -> Iterator[File]:
    rollout, eval_ = config.rollout, config.eval
    yield File("rollout.prompt_data", str(rollout.prompt_data), rollout.input_key, rollout.label_key,
               scorers=rollout.rm_type)
    for dataset in eval_.every:
        key = "eval.datasets" if dataset in eval_.datasets else "eval.eval_prompt_data"
        yield File(key, str(dataset["path"]), dataset.get("input_key") or eval_.eval_input_key or rollout.input_key,
                   dataset.get("label_key") or eval_.eval_label_key or rollout.label_key, eval=True,
                   scorers=[dataset["rm_type"]] if dataset.get("rm_type") else rollout.rm_type)


class _File:
    """
    Args:
        readers: of rows, by their format.
    """

    def __init__(self, config: RunConfig, file: File, readers: Readers):
        self._config, self._file, self._key = config, file, who(config, file.key)
        self._name, _, self._cut = file.path.partition("@")
        self._format = format_of(file.path)
        self._read = readers[self._format]
        self.origin = f"{self._key}, {self._name}"
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.whole = False

    @property
    def prompts(self) -> list[str]:
        """Those that were looked at, as JSON."""
        return [json.dumps(field_of(row, self._file.input_key)) for _, row in self.rows]

    def check(self) -> None:
        """
        Raises:
            DataError: see `check_rows`.
        """
        part = sliced(self._file.path)[1]
        if not _there(self._name):
            if astray(self._name) or self._file.eval and not re.search("[./]", self._name):
                raise self._error("there is no such prompt file", None, "check the path")
            return
        if self._format == "jsonl":
            self._check_format()
        try:
            records = self._read(self._file.path, LOOKED_AT)
        except DataError as error:
            raise DataError(error.what, got=error.got, who=f"{self._key}, {error.who}", fix=error.fix) from error
        if records.total == 0:
            raise self._error("the slice leaves no rows" if self._cut else "no prompt is left", self._cut or None,
                              "take rows that there are" if self._cut else "the file is empty; fetch or write it again")
        self.rows = [(f"{self._key}, {records.where(number)}", row) for number, row in enumerate(records)]
        self.whole = records.total == len(records)
        for where, row in self.rows:
            self._check_row(where, row)
        self._all([row for _, row in self.rows], self._counted(records, part))

    def check_rendered(self, template: ChatTemplate | None) -> None:
        """
        Raises:
            DataError: see `chat_template.check_rendered`.
        """
        check_rendered(self._config, template, [(where, field_of(row, self._file.input_key))
                                                for where, row in self.rows])

    def check_need(self, where: str, row: Mapping[str, Any], name: str, key: str | None, generates: bool) -> None:
        """
        Raises:
            DataError: see `check_needs`.
        """
        prompt, metadata = field_of(row, self._file.input_key), row.get(self._config.rollout.metadata_key) or {}
        answer = None if self._file.label_key is None else field_of(row, self._file.label_key)
        if key is not None:
            answer = {**row, **metadata}.get(key, answer)
        if generates and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            answer = prompt[-1].get("content") or prompt[-1].get("tool_calls")
        if answer != 0 and (not answer or str(answer).strip() in NOTHING):
            raise self._error(f"{name!r} needs the answer of every row, and here is none",
                              repr(answer) if answer is not None else f"nothing under {key or self._file.label_key!r}",
                              "complete the row or leave it out, or name the right key", where)

    def _check_format(self) -> None:
        with open(self._name, "rb") as file:
            start = file.read(32)
        if kind := next((name for magic, name in FORMATS.items() if start.startswith(magic)), None):
            raise self._error("what ends in .jsonl is read as one JSON object a line", kind,
                              "name the file by what it is; .parquet, .arrow, .csv and .json are read, too")

    def _counted(self, records: Records, part: slice) -> int | None:
        """At most so many rows there are; None where that takes long to find out."""
        if records.total is not None:
            return records.total
        if self._cut and part.stop is not None and min(part.start or 0, part.stop) >= 0:
            return max(int(part.stop) - int(part.start or 0), 0)
        small = self._format == "jsonl" and not self._cut and Path(self._name).stat().st_size < COUNTED
        return Path(self._name).read_bytes().count(b"\n{") + 1 if small else None

    def _check_row(self, where: str, row: Mapping[str, Any]) -> None:
        file = self._file
        flags = ("--eval-input-key", "--eval-label-key") if file.eval else ("--input-key", "--label-key")
        for key, flag in zip((file.input_key, file.label_key), flags, strict=True):
            try:
                _ = None if key is None else field_of(row, key)
            except KeyError:
                raise self._error(f"the row has no key {key!r}", ", ".join(row), f"name the right key with {flag}",
                                  where) from None
        prompt = field_of(row, file.input_key)
        chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
        if not chat and not (isinstance(prompt, str) and prompt.strip()):
            raise self._error(f"{file.input_key!r} should be text or a list of chat messages",
                              type(prompt).__name__ if prompt else "nothing",
                              'write "..." or [{"role": "user", "content": "..."}]', where)
        if chat:
            self._check_chat(prompt, where)
        else:
            self._check_text(prompt, where)
        self._check_rest(row, where)

    def _check_text(self, prompt: str, where: str) -> None:
        file = self._file
        if _MESSAGES.match(prompt):
            raise self._error(f"{file.input_key!r} holds chat messages as text", prompt[:40],
                              "write the list itself, not its text; json.loads makes one of JSON", where)
        if self._config.rollout.apply_chat_template and (match := _RENDERED.match(prompt)):
            raise self._error(f"{file.input_key!r} holds what a chat template made, and would pass through one again",
                              match[1], "drop --apply-chat-template, or give the messages themselves", where)

    def _check_rest(self, row: Mapping[str, Any], where: str) -> None:
        """What stands beside the prompt."""
        file, rollout = self._file, self._config.rollout
        metadata = row.get(rollout.metadata_key)
        if metadata and not isinstance(metadata, dict):
            raise self._error(f"{rollout.metadata_key!r} should be an object", type(metadata).__name__,
                              "write {...}, or name another key with --metadata-key", where)
        label = None if file.label_key is None else field_of(row, file.label_key)
        if isinstance(label, dict) and set(file.scorers) - {"custom", "generated"}:  # functions take objects
            raise self._error(f"{file.label_key!r} is an object, and scorers are given text", ", ".join(label),
                              f"name what in it is the ground truth: --label-key {file.label_key}.{next(iter(label))}; "
                              "all of it is in the sample's metadata", where)

    def _check_chat(self, prompt: list[dict[str, Any]], where: str) -> None:
        """A message is text, maybe in parts; a call of tools needs none."""
        key = self._file.input_key
        if not self._config.rollout.apply_chat_template:
            raise self._error(f"{key!r} is a list of chat messages", ", ".join(str(one["role"]) for one in prompt),
                              "add --apply-chat-template", where)
        for message in prompt:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text"}]
            other = [one.get("type") for one in parts if isinstance(one, dict) and one.get("type") != "text"]
            if other or not (isinstance(content, str | list) or message.get("tool_calls")):
                raise self._error(f"a message of {key!r} has no text", other[0] if other else ", ".join(message),
                                  'write {"role": "user", "content": "..."}', where)
            if isinstance(content, str) and message["role"] == "user" and (
                    content.rstrip().endswith(("]", "}")) or not _MESSAGES.match(content)):
                self._check_text(content, where)
        if not any(str(message.get("content") or message.get("tool_calls") or "").strip() for message in prompt):
            raise self._error(f"no message of {key!r} says anything", "blanks", "leave the row out", where)
        if prompt[-1]["role"] == "assistant" and (self._config.rollout.generate == "single-turn" or (
                self._file.eval and self._config.algorithm.loss_type == "sft_loss")):
            raise self._error(f"{key!r} ends with an answer, and the model is to give one", "assistant",
                              "leave the last message out: what it says may be the label", where)

    def _all(self, rows: list[Mapping[str, Any]], counted: int | None) -> None:
        """What some rows may lack, but not all of those that were looked at; and how many there are."""
        if counted is not None and not self._file.eval:
            self._enough(counted)
        if not rows:
            return
        key, metadata = self._file.label_key, self._config.rollout.metadata_key
        if key is not None and all(field_of(row, key) in (None, "") for row in rows):
            raise self._error(f"no row has a ground truth under {key!r}", "nothing in each",
                              "name the right key with --label-key, or leave the flag out")
        if "rollout.metadata_key" in self._config.origin and not self._file.eval and not any(
                metadata in row for row in rows):
            raise self._error(f"no row has the key {metadata!r}", ", ".join(rows[0]),
                              "name the right key with --metadata-key, or leave the flag out")

    def _enough(self, counted: int) -> None:
        rollout = self._config.rollout
        if rollout.num_rollout is not None:
            return
        epochs, batch = cast("int", rollout.num_epoch), cast("int", rollout.rollout_batch_size)  # the plan has both
        if epochs * counted < batch:
            raise self._error("there are too few prompts for one rollout", f"{counted} rows x {epochs} "
                              f"epochs, rollout_batch_size {batch}",
                              "lower --rollout-batch-size, or write --num-rollout in place of --num-epoch")

    def _error(self, what: str, got: str | None, fix: str, where: str | None = None) -> DataError:
        return DataError(what, got=got, who=where or self.origin, fix=fix)


def _template(config: RunConfig) -> None:
    """
    Raises:
        DataError: prompts are here and no tokenizer, or they are to be rendered and it has no template.
    """
    rollout, folder = config.rollout, Path(str(config.checkpoint.hf_checkpoint))
    if rollout.chat_template_path is not None:
        if not Path(rollout.chat_template_path).is_file():
            raise DataError("the chat template cannot be read", got="there is no such file",
                            who=f"--chat-template-path {rollout.chat_template_path}", fix="name a Jinja file")
        return
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    here = any((folder / name).is_file() for name in TOKENIZERS)
    if folder.is_dir() and not here and present(config):
        raise DataError("the tokenizer cannot be loaded", got="no such files", who=f"--hf-checkpoint {folder}",
                        fix=f"copy tokenizer.json and tokenizer_config.json of its model there; or {FOLDER}")
    if here and present(config) and not any(any(folder.glob(name)) for name in VOCABULARIES):
        raise DataError("the tokenizer cannot be loaded", got="tokenizer_config.json without a vocabulary",
                        who=f"--hf-checkpoint {folder}", fix="copy tokenizer.json of its model there")
    if not rollout.apply_chat_template or not here or any((folder / name).exists() for name in files):
        return
    try:
        tokenizer_config = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        tokenizer_config = {}
    except (OSError, ValueError):  # the start says what is wrong with it
        return
    if not (isinstance(tokenizer_config, Mapping) and tokenizer_config.get("chat_template")):
        raise DataError("the tokenizer has no chat template",
                        who=f"{who(config, 'rollout.apply_chat_template')}, --hf-checkpoint {folder}",
                        fix="base models have none: name one that was tuned for chats, or a template with "
                        "--chat-template-path FILE; drop --apply-chat-template where rows hold plain text")
