"""What the chat template makes of the first rows, rendered with jinja2 as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.reading import parse_json
from miles_preflight.checkpoint_files import SPECIAL

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

FIRST = 16
"""Rows of a file that are rendered."""
_ADDED = re.compile(SPECIAL.encode())


class Tokenizer(NamedTuple):
    """Files of the run's tokenizer.

    Args:
        folder: the checkpoint's.
        raw: tokenizer.json.
        tokens: that were added to the vocabulary, with their ids.
    """

    folder: Path
    raw: bytes
    tokens: dict[str, int]


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """What lies in --hf-checkpoint; empty where nothing does."""
    folder = Path(str(config.checkpoint.hf_checkpoint))
    raw = (folder / "tokenizer.json").read_bytes() if (folder / "tokenizer.json").is_file() else b""
    added = _ADDED.findall(raw, 0, max(raw.find(b'"normalizer"'), 0))
    return Tokenizer(folder, raw, {json.loads(text): int(number) for number, text in added})


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """
    Raises:
        DataError: tokenizer.json is cut short, or another model's: it has none of the tokens that end answers.
    """
    folder, raw, tokens = tokenizer
    if raw and not (raw[:64].lstrip().startswith(b"{") and raw[-64:].rstrip().endswith(b"}")):
        raise DataError("the tokenizer cannot be read: its file is not whole", got=f"{len(raw)} bytes",
                        who=str(folder / "tokenizer.json"), fix="fetch the checkpoint again")
    tokenizer_config, size = read(folder / "tokenizer_config.json"), (config_json(config)[1] or {}).get("vocab_size")
    ends = [read(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    stops = {one for ids in ends for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    listed = {int(one) for one in tokenizer_config.get("added_tokens_decoder") or {} if one.isdecimal()}
    if stops and tokens and not stops & {*tokens.values(), *listed}:
        raise DataError("no token that ends the model's answers is a special token of the tokenizer, which is another "
                        "model's", got=f"eos_token_id {', '.join(map(str, sorted(stops)))}", who=str(folder),
                        fix="copy tokenizer.json and tokenizer_config.json of this model there")
    merges = raw.rfind(b'"merges"')
    last = re.findall(rb'":\s*(\d+)\s*\}?', raw[max(merges - 400, 0):merges]) if merges > 0 else []
    if last and isinstance(size, int) and int(last[-1]) >= size:
        raise DataError("the tokenizer has tokens beyond the model's vocabulary: it is another model's",
                        got=f"{int(last[-1])}, and config.json has a vocab_size of {size}", who=str(folder),
                        fix="copy tokenizer.json and tokenizer_config.json of this model there")


def token_text(token: object) -> str | None:
    """A token as tokenizer_config.json writes it, as text."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def check_rendered(config: RunConfig, template: ChatTemplate | None,
                   prompts: Sequence[tuple[str, str | list[dict[str, Any]]]]) -> None:
    """
    Args:
        template: the run's; None where rows are not rendered.
        prompts: (how messages refer to it, text or chat messages) of rows.

    Raises:
        DataError: the template refuses messages, leaves out what they say, or opens no answer.
    """
    tokenizer_config = read(Path(str(config.checkpoint.hf_checkpoint)) / "tokenizer_config.json")
    begin, end = token_text(tokenizer_config.get("bos_token")), token_text(tokenizer_config.get("eos_token"))
    if template is not None and template.text is None:
        return
    for where, prompt in prompts[:FIRST]:
        if template is None:
            if begin and tokenizer_config.get("add_bos_token") is True and str(prompt).startswith(begin):
                raise DataError("the prompt begins with the token that the tokenizer puts before every text", got=begin,
                                who=where, fix="leave it out of the rows, or it would stand there twice")
            continue
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        text = template.render(messages, where)
        _whole(messages, text, where)
        if config.rollout.generate == "single-turn" and end and text.rstrip().endswith(end):
            raise DataError("the chat template opens no answer: the prompt ends where the model is to go on", who=where,
                            got=repr(text[-32:]), fix="leave add_generation_prompt on, and name a template that heeds "
                            "it; a prompt that is meant so can be a row's text, without --apply-chat-template")


def _whole(messages: Sequence[Mapping[str, Any]], text: str, where: str) -> None:
    """Of the system's, a tool's and the last user's message the longest word is in the text."""
    for place, message in enumerate(messages):
        role, content = str(message["role"]), message.get("content")
        word = max(re.findall(r"\w+", content), key=len, default="") if isinstance(content, str) else ""
        shown = role in ("system", "tool") or role == "user" and place >= len(messages) - 2
        if shown and word not in text:
            raise DataError(f"the chat template leaves out what the {role} says", got=str(content)[:40], who=where,
                            fix="look at it with `miles check-template`; it should write message.content of every "
                            "one of `messages`")


class ChatTemplate:
    """The run's chat template; `text` is None where it has none that can be read.

    Raises:
        DataError: it is no Jinja.
    """

    def __init__(self, config: RunConfig):
        folder, rollout = Path(str(config.checkpoint.hf_checkpoint)), config.rollout
        tokenizer_config = read(folder / "tokenizer_config.json")
        path = Path(rollout.chat_template_path or folder / "chat_template.jinja")
        source = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else (
            read(folder / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template"))
        if isinstance(source, list):
            source = {one.get("name"): one.get("template") for one in source}
        source = source.get("default") if isinstance(source, Mapping) else source
        self.text = source if isinstance(source, str) else None
        tokens = {**read(folder / "special_tokens_map.json"), **tokenizer_config}
        self._arguments: dict[str, object] = {name: token_text(value) for name, value in tokens.items()
                                              if name.endswith("_token") and value}
        self._arguments |= {"tools": None, "documents": None, "add_generation_prompt": True}
        self._arguments |= rollout.apply_chat_template_kwargs or {}
        if self.text is None:
            return
        import jinja2

        try:
            self._template = _environment().from_string(self.text)
        except jinja2.TemplateError as error:
            place = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError("the chat template is no Jinja", got=f"{place}{error}",
                            who=str(path) if path.is_file() else f"--hf-checkpoint {folder}",
                            fix="correct it, or name another with --chat-template-path FILE") from None

    def render(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """The text, with the answer's opening where the run does not say otherwise.

        Raises:
            DataError: the template's own refusal.
        """
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        try:
            return self._template.render(messages=plain, **self._arguments)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise DataError("the chat template refuses the messages", got=str(error), who=where,
                            fix="check the roles and contents, and `miles check-template`") from None


def _environment() -> SandboxedEnvironment:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(
        value, ensure_ascii=ensure_ascii, **how)
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    return made


def read(path: Path) -> Mapping[str, Any]:
    """A JSON object; nothing where there is none that can be read."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or the start speaks of it
        return {}
    return content if isinstance(content, Mapping) else {}
