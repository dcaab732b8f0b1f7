"""The first rows of the prompt files, and the chat template: what would end the run before its first answer.

Read are 64 KiB of each file, with json alone. A file that is not here yet is not judged, see `paths.astray`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.reading import parse_json, reading
from miles_preflight.chat_template import ChatTemplate, check_rendered, check_tokenizer, tokenizer_of
from miles_preflight.paths import FOLDER, astray
from miles_preflight.remarks import remark

LOOKED_AT = 64 * 1024
"""Bytes of a file."""
COUNTED = 64 * 1024**2
"""Bytes of the largest file whose lines are counted, and only where their number says how long the run is."""
FORMATS = {b"PAR1": "Parquet", b"ARROW": "Arrow", b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "gzip",
           b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched"}
"""How files begin that people take for JSONL."""
SUFFIXES = {".parquet": "Parquet", ".arrow": "Arrow", ".csv": "CSV", ".tsv": "TSV", ".gz": "gzip", ".zip": "zip"}
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


def check_rows(config: RunConfig, note: Callable[[str], None]) -> None:
    """

    Raises:
        DataError: a file that is not there or no JSONL, rows without the keys that are read, or no chat template.
    """
    if config.debug.debug_train_only or config.rollout.prompt_source != "jsonl":
        return
    files = [_File(config, file) for file in _files(config)]
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


def check_needs(config: RunConfig, name: str, key: str | None = None, *, generates: bool = False) -> None:
    """
    Args:
        name: a scorer that compares with labels; with `key` it reads this of a row or its metadata, else the label.
        generates: `name` is a generator that takes the answer from there, or from the end of a conversation.

    Raises:
        DataError: a row does not have it.
    """
    if config.debug.debug_train_only or config.rollout.prompt_source != "jsonl":
        return
    files = (file for file in _files(config) if (not file.eval if generates else name in file.scorers))
    for file in (_File(config, file) for file in files):
        file.check()
        for number, row in file.rows:
            file.check_need(number, row, name, key, generates)


def present(config: RunConfig) -> bool:
    """Whether the prompts are here. A plan may be made before; a run cannot begin, so what needs them can wait."""
    rollout = config.rollout
    return rollout.prompt_source != "jsonl" or Path(str(rollout.prompt_data).partition("@")[0]).is_file()


def _files(config: RunConfig) -> Iterator[File]:
    rollout, eval_ = config.rollout, config.eval
    yield File("rollout.prompt_data", str(rollout.prompt_data), rollout.input_key, rollout.label_key,
               scorers=rollout.rm_type)
    pairs = eval_.eval_prompt_data
    datasets: list[tuple[str, Mapping[str, Any]]] = [
        ("eval.eval_prompt_data", {"path": path}) for path in (pairs if len(pairs) == 1 else pairs[1::2])]
    for key, dataset in [*datasets, *(("eval.datasets", one) for one in eval_.datasets)]:
        yield File(key, str(dataset["path"]), dataset.get("input_key") or eval_.eval_input_key or rollout.input_key,
                   dataset.get("label_key") or eval_.eval_label_key or rollout.label_key, eval=True,
                   scorers=[dataset["rm_type"]] if dataset.get("rm_type") else rollout.rm_type)


class _File:
    def __init__(self, config: RunConfig, file: File):
        self._config, self._file = config, file
        self._name, _, self._cut = file.path.partition("@")
        self.origin = f"{who(config, file.key)}, {self._name}"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.whole = False

    @property
    def prompts(self) -> list[str]:
        """Those that were looked at, as JSON."""
        return [json.dumps(row[self._file.input_key]) for _, row in self.rows]

    def check(self) -> None:
        """
        Raises:
            DataError: see `check_rows`.
        """
        path, cut = Path(self._name), self._slice()
        kind = SUFFIXES.get(path.suffix.lower())
        if not path.is_file():
            if kind:
                raise self._no_jsonl(kind)
            hub = self._name.count("/") == 1 and not path.suffix and self._name[0] not in "./~"
            nowhere = self._file.eval and not re.search("[./]", self._name)
            if astray(self._name) or hub or nowhere or path.exists():
                raise self._error("this is a folder, and prompts are a file" if path.is_dir() else
                                  "there is no such prompt file", None,
                                  "prompts are a JSONL file of this machine; nothing is fetched" if hub else
                                  "check the path")
            return
        with path.open("rb") as opened:
            start = opened.read(LOOKED_AT + 1)
        if other_format := next((name for magic, name in FORMATS.items() if start.startswith(magic)), None):
            raise self._no_jsonl(other_format)
        whole = len(start) <= LOOKED_AT
        lines = start.splitlines() if whole else start.splitlines()[:-1]
        numbers = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if whole and not numbers:
            raise self._error("no prompt is left", None, "the file is empty; write one JSON object a line")
        if not whole and not numbers and start.lstrip()[:1] != b"{":
            raise self._no_jsonl("one long line that is no object")
        rows = [(number, self._row(number, line)) for number, line in numbers]
        selected = rows[cut] if whole or (cut.start or 0) >= 0 and (cut.stop is None or cut.stop >= 0) else []
        if whole and not selected:
            raise self._error("the slice leaves no rows", self._cut, f"the file has {len(rows)}")
        for number, row in selected:
            self._check_row(number, row)
        self.rows, self.whole = selected, whole
        ends = (cut.start or 0, cut.stop) if cut.stop is not None and min(cut.start or 0, cut.stop) >= 0 else None
        most = max(ends[1] - ends[0], 0) if ends else None if self._cut else path
        self._all([row for _, row in selected], len(selected) if whole else most)

    def check_rendered(self, template: ChatTemplate | None) -> None:
        """
        Raises:
            DataError: see `chat_template.check_rendered`.
        """
        check_rendered(self._config, template, self.origin, [(number, row[self._file.input_key])
                                                             for number, row in self.rows])

    def check_need(self, number: int, row: Mapping[str, Any], name: str, key: str | None, generates: bool) -> None:
        """
        Raises:
            DataError: see `check_needs`.
        """
        prompt, metadata = row[self._file.input_key], row.get(self._config.rollout.metadata_key) or {}
        answer = None if self._file.label_key is None else row[self._file.label_key]
        if key is not None:
            answer = {**row, **metadata}.get(key, answer)
        if generates and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            answer = prompt[-1].get("content") or prompt[-1].get("tool_calls")
        if answer != 0 and (not answer or str(answer).strip() in NOTHING):
            raise self._error(f"{name!r} needs the answer of every row, and here is none",
                              repr(answer) if answer is not None else f"nothing under {key or self._file.label_key!r}",
                              "complete the row or leave it out, or name the right key", number)

    def _slice(self) -> slice:
        span = re.fullmatch(r"\[(-?\d*):(-?\d*)\]", self._cut) if self._cut else None
        if self._cut and span is None:
            raise self._error("the slice should be @[a:b]", self._cut, "for instance data.jsonl@[0:1000]")
        return slice(*(int(edge) if edge else None for edge in span.groups())) if span else slice(None)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = parse_json(line.strip().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._error("the line is not UTF-8 text", f"byte 0x{line[error.start]:02x}", "save the file as UTF-8",
                              number) from None
        except json.JSONDecodeError as error:
            raise self._error("the line is not JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}",
                              "one JSON object a line", number) from None
        except ValueError as error:
            raise self._error("the line cannot be read", str(error), "correct the value, or leave the row out",
                              number) from None
        if isinstance(row, list) and number == 1:
            raise self._no_jsonl("a JSON list")
        if not isinstance(row, dict):
            raise self._error("the line is not a JSON object", type(row).__name__, "one JSON object a line", number)
        return row

    def _check_row(self, number: int, row: Mapping[str, Any]) -> None:
        file = self._file
        flags = ("--eval-input-key", "--eval-label-key") if file.eval else ("--input-key", "--label-key")
        for key, flag in zip((file.input_key, file.label_key), flags, strict=True):
            if key is not None and key not in row:
                raise self._error(f"the row has no key {key!r}", ", ".join(row), f"name the right key with {flag}",
                                  number)
        prompt = row[file.input_key]
        chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
        if not chat and not (isinstance(prompt, str) and prompt.strip()):
            raise self._error(f"{file.input_key!r} should be text or a list of chat messages",
                              type(prompt).__name__ if prompt else "nothing",
                              'write "..." or [{"role": "user", "content": "..."}]', number)
        if chat:
            self._check_chat(prompt, number)
        else:
            self._check_text(prompt, number)
        self._check_rest(row, number)

    def _check_text(self, prompt: str, number: int) -> None:
        file = self._file
        if _MESSAGES.match(prompt):
            raise self._error(f"{file.input_key!r} holds chat messages as text", prompt[:40],
                              "write the list itself, not its text; json.loads makes one of JSON", number)
        if self._config.rollout.apply_chat_template and (match := _RENDERED.match(prompt)):
            raise self._error(f"{file.input_key!r} holds what a chat template made, and would pass through one again",
                              match[1], "drop --apply-chat-template, or give the messages themselves", number)

    def _check_rest(self, row: Mapping[str, Any], number: int) -> None:
        """What stands beside the prompt."""
        file, rollout = self._file, self._config.rollout
        metadata = row.get(rollout.metadata_key)
        if metadata and not isinstance(metadata, dict):
            raise self._error(f"{rollout.metadata_key!r} should be an object", type(metadata).__name__,
                              "write {...}, or name another key with --metadata-key", number)
        scorers = set(rollout.rm_type) - {"custom", "generated"}  # functions of a launch script are given the object
        if scorers and file.label_key is not None and isinstance(row[file.label_key], dict):
            raise self._error(f"{file.label_key!r} is an object, and scorers are given text",
                              ", ".join(row[file.label_key]), "give the ground truth a key of its own in the row; "
                              "what else scorers need is read from --metadata-key", number)

    def _check_chat(self, prompt: list[dict[str, Any]], number: int) -> None:
        """A message is text, maybe in parts; a call of tools needs none."""
        key = self._file.input_key
        if not self._config.rollout.apply_chat_template:
            raise self._error(f"{key!r} is a list of chat messages", ", ".join(str(one["role"]) for one in prompt),
                              "add --apply-chat-template", number)
        for message in prompt:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text"}]
            other = [one.get("type") for one in parts if isinstance(one, dict) and one.get("type") != "text"]
            if other or not (isinstance(content, str | list) or message.get("tool_calls")):
                raise self._error(f"a message of {key!r} has no text", other[0] if other else ", ".join(message),
                                  'write {"role": "user", "content": "..."}', number)
            if isinstance(content, str) and message["role"] == "user" and (
                    content.rstrip().endswith(("]", "}")) or not _MESSAGES.match(content)):
                self._check_text(content, number)
        if not any(str(message.get("content") or message.get("tool_calls") or "").strip() for message in prompt):
            raise self._error(f"no message of {key!r} says anything", "blanks", "leave the row out", number)
        if prompt[-1]["role"] == "assistant" and (self._config.rollout.generate == "single-turn" or (
                self._file.eval and self._config.algorithm.loss_type == "sft_loss")):
            raise self._error(f"{key!r} ends with an answer, and the model is to give one", "assistant",
                              "leave the last message out: what it says may be the label", number)

    def _all(self, rows: list[dict[str, Any]], counted: int | Path | None) -> None:
        """What some rows may lack, but not all of those that were looked at; and how many there are."""
        if counted is not None and not self._file.eval:
            self._enough(counted)
        if not rows:
            return
        key, metadata = self._file.label_key, self._config.rollout.metadata_key
        if key is not None and all(row[key] in (None, "") for row in rows):
            raise self._error(f"no row has a ground truth under {key!r}", "nothing in each",
                              "name the right key with --label-key, or leave the flag out")
        if "rollout.metadata_key" in self._config.origin and not self._file.eval and not any(
                metadata in row for row in rows):
            raise self._error(f"no row has the key {metadata!r}", ", ".join(rows[0]),
                              "name the right key with --metadata-key, or leave the flag out")

    def _enough(self, counted: int | Path) -> None:
        rollout = self._config.rollout
        if rollout.num_rollout is not None:
            return
        if isinstance(counted, Path):
            counted = counted.read_bytes().count(b"\n{") + 1 if counted.stat().st_size < COUNTED else 2**63
        epochs, batch = cast("int", rollout.num_epoch), cast("int", rollout.rollout_batch_size)  # the plan has both
        if epochs * counted < batch:
            raise self._error("there are too few prompts for one rollout", f"{counted} rows x {epochs} "
                              f"epochs, rollout_batch_size {batch}",
                              "lower --rollout-batch-size, or write --num-rollout in place of --num-epoch")

    def _no_jsonl(self, kind: str) -> DataError:
        return self._error("prompts are read as JSONL, one object a line", kind,
                           "write the rows as JSONL, for instance with to_json of the package datasets")

    def _error(self, what: str, got: str | None, fix: str, line: int | None = None) -> DataError:
        where = self.origin + (f", line {line}" if line else "")
        return DataError(what, got=got, who=where, fix=fix)


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
