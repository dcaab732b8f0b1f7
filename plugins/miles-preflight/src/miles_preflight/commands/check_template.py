"""`miles check-template`: does a chat template give the token ids that training needs?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from miles_core.errors import DataError

CONVERSATION = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>\nTwo and two make four.\n</think>\n\n4"},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "<think>\nTwice four is eight.\n</think>\n\n8"},
)
"""What is rendered when no --messages are given: reasoning is in it, since templates that strip it are common."""

APPEND = "append-only"
BEFORE, AFTER = 3, 4


@dataclass(frozen=True, slots=True)
class Check:
    """Two sequences of token ids that have to fit together.

    Args:
        name: what is compared.
        left, right: the ids.
        whole: they have to be equal; otherwise `left` has to be how `right` begins.
        titles: what the two are called where they differ.
        note: set where a difference is worth knowing and no fault; says what it means.
    """

    name: str
    left: Sequence[int]
    right: Sequence[int]
    titles: tuple[str, str]
    whole: bool = True
    note: str = ""

    @property
    def differs(self) -> int | None:
        """The first position at which they do not fit, None when they fit."""
        for at, (one, other) in enumerate(zip(self.left, self.right)):
            if one != other:
                return at
        if len(self.left) > len(self.right) or (self.whole and len(self.left) < len(self.right)):
            return min(len(self.left), len(self.right))
        return None


@click.command("check-template")
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--chat-template-path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Check this Jinja file, and compare it with the model's own template.")
@click.option("--messages", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json",
              help="A conversation: a JSON list of {role, content}. Default: two turns with reasoning.")
@click.option("--apply-chat-template-kwargs", "arguments", metavar="JSON", default="{}",
              help="Further arguments of the template, such as '{\"enable_thinking\": false}'.")
def command(model_dir: Path, chat_template_path: Path | None, messages: Path | None, arguments: str) -> None:
    """Check the chat template of the tokenizer in MODEL_DIR by token ids. Exit code 1 when a check fails.

    \b
    - the rendered text and the template agree on the ids, with one BOS at most
    - a prompt with the answer's opening begins the conversation with the answer
    - every turn only adds to what came before, for samples of several turns
    - with --chat-template-path: prompt and first answer are the model's own

    A failed check shows the first token that differs, with its neighbours.
    """
    conversation, kwargs = _read(messages) if messages else list(CONVERSATION), _arguments(arguments)
    tokenizer = _tokenizer(model_dir, chat_template_path)
    checks = all_checks(tokenizer, conversation, kwargs, _tokenizer(model_dir, None) if chat_template_path else None)
    failed = [check for check in checks if check.differs is not None and not check.note]
    _show(checks, tokenizer)
    if failed and all(check.name.startswith(APPEND) for check in failed):
        click.echo("Runs with one turn do not need a template that only appends; generators with several turns, "
                   "and SFT on all turns, do.")
    click.echo(f"{len(failed)} of {len(checks)} checks failed" if failed else "the template passes")
    raise SystemExit(1 if failed else 0)


def all_checks(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], arguments: Mapping[str, object],
               own: Any | None = None) -> list[Check]:
    """Every check of a template, in the order shown.

    Args:
        own: the tokenizer with the model's own template, where another one is checked.

    Raises:
        DataError: no template, or one that refuses the messages.
    """
    view = _View(tokenizer, arguments)
    answers = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    first = next(i for i, message in enumerate(conversation) if message["role"] == "user") + 1
    opened, whole = conversation[: answers[0]], conversation
    checks = [
        Check(f"{what}: text and ids agree", view.ids(part, opening), view.of_text(part, opening),
              ("template's ids", "ids of the text"))
        for what, part, opening in (("prompt", opened, True), ("conversation", whole, False))
    ]
    checks += view.bos(opened)
    checks += [
        Check(f"answer {number}: begins with its prompt", view.ids(whole[:i], True), view.ids(whole[: i + 1]),
              ("prompt with the opening", f"messages 1 to {i + 1}"), whole=False)
        for number, i in enumerate(answers, 1)
    ]
    checks += [
        Check(f"{APPEND}: message {count + 1}", view.ids(whole[:count]), view.ids(whole[: count + 1]),
              (f"messages 1 to {count}", f"messages 1 to {count + 1}"), whole=False)
        for count in range(first, len(whole))
    ]
    return checks + (_against(view, _View(own, arguments), whole, answers[0]) if own is not None else [])


def _against(view: _View, own: _View, conversation: Sequence[Mapping[str, Any]], answer: int) -> list[Check]:
    """The template given against the model's own; what it makes of earlier turns may well differ on purpose."""
    if not own.tokenizer.chat_template:
        return []
    titles = ("template given", "model's own")
    later = "it differs where there are several turns, which may be its purpose"
    prompt, first = conversation[:answer], conversation[: answer + 1]
    return [
        Check("prompt: as the model's own", view.ids(prompt, True), own.ids(prompt, True), titles),
        Check("first answer: as the model's own", view.ids(first), own.ids(first), titles),
        Check("conversation: as the model's own", view.ids(conversation), own.ids(conversation), titles,
              note=later if len(conversation) > answer + 1 else ""),
    ]


class _View:
    """One template's ids and texts of parts of a conversation."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, object]):
        self.tokenizer, self.arguments = tokenizer, dict(arguments)

    def ids(self, messages: Sequence[Mapping[str, Any]], opening: bool = False) -> list[int]:
        """What the template itself gives."""
        self.text(messages, opening)  # for its errors
        return list(self.tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False,
                                                       **{**self.arguments, "add_generation_prompt": opening}))

    def text(self, messages: Sequence[Mapping[str, Any]], opening: bool) -> str:
        """What a run renders."""
        from miles_core.stages.prompts import render

        return render(self.tokenizer, messages, {**self.arguments, "add_generation_prompt": opening},
                      f"messages 1 to {len(messages)}")

    def of_text(self, messages: Sequence[Mapping[str, Any]], opening: bool) -> list[int]:
        """What a run makes of the rendered text."""
        return list(self.tokenizer(self.text(messages, opening), add_special_tokens=False)["input_ids"])

    def bos(self, messages: Sequence[Mapping[str, Any]]) -> list[Check]:
        """One BOS at most; and a note where a plain call of the tokenizer would add one to the template's."""
        bos, ids = self.tokenizer.bos_token_id, self.ids(messages, True)
        if bos is None:
            return []
        times = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        plain = list(self.tokenizer(self.text(messages, True))["input_ids"])
        return [
            Check("prompt: one BOS at most", ids, ids[max(times - 1, 0):], ("template's ids", "with one BOS")),
            Check("prompt: a plain call adds nothing", ids, plain, ("template's ids", "tokenizer(text)"),
                  note="rows that hold rendered text would get special tokens twice: use --apply-chat-template"),
        ]


def _tokenizer(folder: Path, template: Path | None) -> Any:
    """Loaded as a run loads it."""
    from miles_core.build import load_tokenizer
    from miles_core.config.tables import Checkpoint, Rollout, RunConfig

    return load_tokenizer(RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(folder)),
                                    rollout=Rollout(chat_template_path=str(template) if template else None)))


def _read(path: Path) -> list[dict[str, Any]]:
    who = f"--messages {path}"
    fix = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError("the file is not JSON", got=str(error), who=who, fix=fix,
                        code="conversation-not-json") from None
    if not isinstance(messages, list) or not messages:
        raise DataError("the conversation should be a list of messages", got=type(messages).__name__, who=who, fix=fix,
                        code="conversation-not-list")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"message {number} has no role or no content", got=json.dumps(message)[:80], who=who,
                            fix=fix, code="conversation-message-incomplete")
    roles = [message["role"] for message in messages]
    if "user" not in roles or "assistant" not in roles[roles.index("user"):]:
        raise DataError("the conversation needs a user's message and an answer of the assistant after it",
                        got=", ".join(roles), who=who, fix=fix, code="conversation-too-short")
    return messages


def _arguments(text: str) -> dict[str, object]:
    who, fix = "--apply-chat-template-kwargs", "write a JSON object such as '{\"enable_thinking\": false}'"
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError("the template's arguments are not JSON", got=str(error), who=who, fix=fix,
                        code="template-arguments-not-json") from None
    if not isinstance(arguments, dict):
        raise DataError("the template's arguments should be a JSON object", got=text, who=who, fix=fix,
                        code="template-arguments-not-object")
    return arguments


def _show(checks: Sequence[Check], tokenizer: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table("check", Column("tokens", justify="right"), "result", box=box.SIMPLE_HEAD, pad_edge=False)
    for check in checks:
        same = check.whole and check.differs is None
        sizes = f"{len(check.left)}" if same else f"{len(check.left)}, {len(check.right)}"
        table.add_row(check.name, sizes, _verdict(check))
    console.print(table)
    for check in checks:
        if (at := check.differs) is not None:
            console.print(Text(f"{check.name}: differs at token {at}", "bold"))
            if check.note:
                console.print(Text(check.note))
            console.print(_difference(check, at, tokenizer))


def _verdict(check: Check) -> Any:
    from rich.text import Text

    if check.differs is None:
        return Text("ok", "green")
    text = f"differs at {check.differs}"
    return Text(f"note: {text}", "yellow") if check.note else Text(text, "bold red")


def _difference(check: Check, at: int, tokenizer: Any) -> Any:
    """The tokens around the first difference, at position `at`; one position a row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("position", *check.titles, box=box.SIMPLE_HEAD, pad_edge=False)
    for place in range(max(0, at - BEFORE), min(at + AFTER, max(len(check.left), len(check.right)))):
        style = "bold red" if place == at else "dim" if place < at else ""
        cells = [f"{'> ' if place == at else '  '}{place}",
                 *(_token(side, place, tokenizer) for side in (check.left, check.right))]
        table.add_row(*(Text(cell, style) for cell in cells))
    return table


def _token(ids: Sequence[int], place: int, tokenizer: Any) -> str:
    return f"{ids[place]}  {tokenizer.decode([ids[place]])!r}" if place < len(ids) else "(ends)"
