"""The first rows of the prompt files, made into prompts as the run does it: what would be read otherwise than meant.

Read are some 64 KiB of each file, by the run's own `read_rows`; one that is not here yet is not judged, see `astray`.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.plugins.bind import bind
from miles_core.plugins.select import Selected
from miles_core.reading import apart, field_of, format_of, reading, sliced
from miles_preflight.chat_template import RenderingTokenizer, check_prompt
from miles_preflight.paths import Note, astray
from miles_preflight.tokenizer import check_present

if TYPE_CHECKING:
    from miles_core.stages.prompts import Records, Rows

LOOKED_AT = 64 * 1024
"""Bytes of a file."""
RENDERED = 16
"""Rows of a file."""
OF_ROWS = ("rows", "stream")
"""Prompt sources that make prompts of the rows of --prompt-data."""
_RENDERED = re.compile(r"\s*(<\|[\w ]+\|>|<s>|<bos>|<start_of_turn>|\[INST\]|<\uff5c)")
"""How a text begins that a chat template has made already."""
_MESSAGES = re.compile(
    r"""\s*(\{\s*['"](messages|conversations)['"]\s*:\s*)?\[\s*\{\s*['"](role|content|from)['"]\s*:""")
"""How chat messages begin that were written as text."""
NOTHING = ("", "nan", "NaN", "None", "null", "<NA>")
"""What is written for an answer that is missing."""


@dataclass(frozen=True, slots=True)
class File:
    """The beginning of a prompt file.

    Args:
        key: the option that names it.
        how: its rows become prompts.
        scorers: of its answers.
        rows: (how messages refer to it, the row).
        most: rows that the whole file may have; None where that takes long to find out.
    """

    key: str
    how: Rows
    scorers: Sequence[str]
    rows: Sequence[tuple[str, Mapping[str, Any]]] = ()
    most: int | None = None

    @property
    def eval(self) -> bool:
        """Whether it is evaluated on, not trained."""
        return self.how.stream != "train"

    @property
    def origin(self) -> str:
        """How messages refer to it."""
        return f"{self.key}, {self.how.path.partition('@')[0]}"

    def field(self, row: Mapping[str, Any], key: str | None) -> Any:
        """What a row has under a key; None for nothing."""
        try:
            return None if key is None else field_of(row, key)
        except KeyError:
            return None


def begun(plugins: Sequence[Selected], config: RunConfig, note: Note) -> list[File]:
    """The beginnings of the prompt files that are here, the training prompts' first.

    Raises:
        DataError: a file that is not there or cannot be read.
    """
    if config.debug.load_debug_rollout_data or config.rollout.prompt_source not in OF_ROWS:
        return []
    words = {word for one in plugins for word in one.manifest.provides}
    named = [one for one in _named(config) if f"made:{format_of(one[1])}" not in words and _here(*one, note)]
    if not named:
        return []
    from miles_core.stages.prompts import rows_of  # brings numpy

    reading_rows = [one for one in plugins if any(offer.hook == "read_rows" for offer in one.manifest.offers)]
    readers: Mapping[str, Callable[[str, int], Records]] = bind(reading_rows, config, "plan").read_rows
    scorers = config.rollout.rm_type
    return [_read(File(key, rows_of(config, dataset), [own] if (own := (dataset or {}).get("rm_type")) else scorers),
                  readers) for key, _, dataset in named]


def _named(config: RunConfig) -> Iterator[tuple[str, str, Mapping[str, Any] | None]]:
    """(the option, the path, the eval dataset) of every prompt file."""
    yield who(config, "rollout.prompt_data"), str(config.rollout.prompt_data), None
    for dataset in config.eval.every:
        key = "eval.datasets" if dataset in config.eval.datasets else "eval.eval_prompt_data"
        yield who(config, key), dataset["path"], dataset


def _here(key: str, path: str, dataset: Mapping[str, Any] | None, note: Note) -> bool:
    """
    Raises:
        DataError: a file is not, and cannot be meant to come later.
    """
    name = apart(path)[0]
    present = _there(name)
    if not present and (astray(name) or dataset is not None and not re.search("[./]", name)):
        raise DataError("the prompt file does not exist", who=f"{key}, {name}", fix="check the path",
                        code="prompt-file-missing")
    if not present:
        note(f"{key}: {name} is missing: its rows are not checked, and a run has to have it")
    return present


def _read(file: File, readers: Mapping[str, Callable[[str, int], Records]]) -> File:
    part, cut = sliced(file.how.path)[1], apart(file.how.path)[1]
    with reading(file.origin):
        try:
            records = readers[format_of(file.how.path)](file.how.path, LOOKED_AT)
        except DataError as error:
            raise DataError(error.what, got=error.got, who=f"{file.key}, {error.who}", fix=error.fix,
                            code="rows-unusable") from error
        if records.total == 0:
            raise DataError("no prompt is left", got=cut or None, who=file.origin, fix="take rows that there are with "
                            "@[a:b]" if cut else "the file is empty; fetch or write it again", code="no-prompt-left")
        most = records.total
        if most is None and part.stop is not None and min(part.start or 0, part.stop) >= 0:
            most = max(part.stop - (part.start or 0), 0)
        return replace(file, most=most, rows=[(f"{file.key}, {records.where(number)}", row)
                                              for number, row in enumerate(records)])


def present(config: RunConfig) -> bool:
    """Whether the prompts are here. A plan may be made before; a run cannot begin, so what needs them can wait."""
    return config.rollout.prompt_source not in OF_ROWS or _there(apart(str(config.rollout.prompt_data))[0])


def _there(name: str) -> bool:
    """Whether something is at a path, which may stand for several files; of ORG/NAME its reader knows."""
    place = name.partition(":")[0] if format_of(name) == "dataset" else name
    named = place != name or format_of(name) == "dataset" and re.fullmatch(r"[\w-][^/]*/[^/]+", name)
    return bool(named) or Path(place).exists() or any(glob.iglob(place))


def check_rows(config: RunConfig, files: Sequence[File], note: Note) -> None:
    """
    Raises:
        DataError: rows that lack what is read, or that model or scorer would be shown otherwise than they are meant.
    """
    if not files:
        return
    from miles_core.stages.prompts import Rendering

    check_present(config)
    tokenizer = RenderingTokenizer(config)
    for file in files:
        with reading(file.origin):
            names = [where for where, _ in file.rows]
            rendering = Rendering(file.how, names.__getitem__, tokenizer)
            for number, (where, row) in enumerate(file.rows):
                prompt = rendering.source(number, row)
                (_check_text if isinstance(prompt, str) else _check_chat)(config, file, prompt, where)
                if number < RENDERED:
                    check_prompt(config, tokenizer, rendering(number, number, row), where)
            _check_all(config, file)
    media = _media(config).values()  # the same words, other images
    prompts = [[json.dumps([file.field(row, key) for key in (file.how.input_key, *media)]) for _, row in file.rows]
               for file in files]
    trained = {prompt for file, own in zip(files, prompts, strict=True) if not file.eval for prompt in own}
    for file, own in zip(files, prompts, strict=True):
        if file.eval and (common := len([prompt for prompt in own if prompt in trained])):
            note(f"{common} of the first {len(file.rows)} evaluation prompts are trained on ({file.origin})")


def _media(config: RunConfig) -> Mapping[str, str]:
    """Key of a row by the medium that is there, as --multimodal-keys has it."""
    return cast("Mapping[str, str]", (config.options.get("vision") or {}).get("multimodal_keys") or {})


def _check_text(config: RunConfig, file: File, prompt: Any, where: str) -> None:
    key = file.how.input_key
    if not prompt.strip():
        raise DataError(f"{key!r} says nothing", got=repr(prompt), who=where, fix="leave the row out",
                        code="prompt-empty")
    if _MESSAGES.match(prompt):
        raise DataError(f"{key!r} holds chat messages as text", got=prompt[:40], who=where,
                        fix="write the list itself, not its text; json.loads makes one of JSON",
                        code="messages-as-text")
    if config.rollout.apply_chat_template and (match := _RENDERED.match(prompt)):
        raise DataError(f"{key!r} holds what a chat template made, and would pass through one again", got=match[1],
                        who=where, fix="drop --apply-chat-template, or give the messages themselves",
                        code="prompt-rendered-twice")


def _check_chat(config: RunConfig, file: File, prompt: Any, where: str) -> None:
    """A message is text, maybe in parts, beside what a plugin shows; a call of tools needs none."""
    key, seen = file.how.input_key, _media(config)
    for message in prompt:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text"}]
        other = [one.get("type") for one in parts if isinstance(one, dict) and one.get("type") not in ("text", *seen)]
        if other or not (isinstance(content, str | list) or message.get("tool_calls")):
            raise DataError(f"a message of {key!r} has no text", got=other[0] if other else ", ".join(message),
                            who=where, fix='write {"role": "user", "content": "..."}', code="message-without-text")
        if isinstance(content, str) and content.strip() and message["role"] == "user" and (
                content.rstrip().endswith(("]", "}")) or not _MESSAGES.match(content)):
            _check_text(config, file, content, where)
    if not any(str(message.get("content") or message.get("tool_calls") or "").strip() for message in prompt):
        raise DataError(f"no message of {key!r} says anything", got="blanks", who=where, fix="leave the row out",
                        code="messages-empty")
    if prompt[-1]["role"] == "assistant" and (config.rollout.generate == "single-turn" or (
            file.eval and config.algorithm.loss_type == "sft_loss")):
        raise DataError(f"{key!r} ends with an answer, and the model is to give one", got="assistant", who=where,
                        fix="leave the last message out: what it says may be the label", code="prompt-ends-with-answer")


def _check_all(config: RunConfig, file: File) -> None:
    """What some rows may lack, but not all of those that were looked at; and whether there are enough."""
    epochs, batch = config.rollout.num_epoch, config.rollout.rollout_batch_size or 0  # the plan has both, or rollouts
    if epochs is not None and file.most is not None and config.rollout.num_rollout is None and not file.eval and (
            epochs * file.most < batch):
        raise DataError("the run would end at once: there are too few prompts for one rollout", who=file.origin,
                        got=f"{file.most} rows x {epochs} epochs, rollout_batch_size {batch}",
                        fix="lower --rollout-batch-size, or write --num-rollout in place of --num-epoch",
                        code="too-few-prompts")
    key, metadata, rows = file.how.label_key, config.rollout.metadata_key, [row for _, row in file.rows]
    if rows and key is not None and all(file.field(row, key) in (None, "") for row in rows):
        raise DataError(f"no row has a ground truth under {key!r}", got="nothing in each", who=file.origin,
                        fix="name the right key with --label-key, or leave the flag out", code="no-labels")
    if rows and "rollout.metadata_key" in config.origin and not file.eval and not any(metadata in row for row in rows):
        raise DataError(f"no row has the key {metadata!r}", got=", ".join(rows[0]), who=file.origin,
                        fix="name the right key with --metadata-key, or leave the flag out", code="no-metadata")


def check_answers(config: RunConfig, files: Sequence[File], name: str, key: str | None = None, *,
                  generates: bool = False) -> None:
    """
    Args:
        name: a scorer that compares with labels; with `key` it reads this of a row or its metadata, else the label.
        generates: `name` is a generator that takes the answer from there, or from the end of a conversation.

    Raises:
        DataError: a row does not have it.
    """
    for file in files:
        for where, row in file.rows if (not file.eval if generates else name in file.scorers) else ():
            prompt, answer = field_of(row, file.how.input_key), file.field(row, file.how.label_key)
            if key is not None:
                answer = {**row, **(row.get(config.rollout.metadata_key) or {})}.get(key, answer)
            if generates and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
                answer = prompt[-1].get("content") or prompt[-1].get("tool_calls")
            if answer != 0 and (not answer or str(answer).strip() in NOTHING):
                raise DataError(f"{name!r} needs the answer of every row, and here is none", who=where, got=repr(answer)
                                if answer is not None else f"nothing under {key or file.how.label_key!r}",
                                fix="complete the row or leave it out, or name the right key",
                                code="answer-column-empty")
            if isinstance(answer, dict) and key is None and not generates:
                raise DataError(f"{file.how.label_key!r} is an object, and {name!r} compares with text", who=where,
                                got=", ".join(answer), fix="name what in it is the ground truth: --label-key "
                                f"{file.how.label_key}.{next(iter(answer))}; all of it is in the sample's metadata",
                                code="label-is-object")
