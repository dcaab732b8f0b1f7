"""What the chat template makes of the first rows, rendered with jinja2 as transformers does."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.types import Prompt
from miles_preflight.checkpoint_files import read
from miles_preflight.tokenizer import token_text

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment


_FIRST = re.compile(rb'"single":\s*\[\s*\{\s*"SpecialToken":\s*\{\s*"id":\s*("(?:[^"\\]|\\.)*")')
"""The token before every text, where tokenizer.json and not tokenizer_config.json says so, as of Llama 3."""
UNKNOWN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Stands for the template of a tokenizer that is not here yet."""


class RenderingTokenizer:
    """What a plan needs of the run's tokenizer: it renders by the chat template, and makes no tokens.

    `begin` and `end` are the texts of the tokens before a text and after an answer; `begins` says whether the
    tokenizer writes the first by itself. `chat_template` is None where the model has none.
    """

    def __init__(self, config: RunConfig):
        folder, rollout = Path(str(config.checkpoint.hf_checkpoint)), config.rollout
        settings = read(folder / "tokenizer_config.json")
        path = Path(rollout.chat_template_path or folder / "chat_template.jinja")
        source = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else (
            read(folder / "chat_template.json").get("chat_template") or settings.get("chat_template"))
        if isinstance(source, list):
            source = {one.get("name"): one.get("template") for one in source}
        source = source.get("default") if isinstance(source, Mapping) else source
        self.chat_template = source if isinstance(source, str) else None if any(folder.glob("*token*")) else UNKNOWN
        self.name_or_path = f"--hf-checkpoint {folder}"
        tokens = {**read(folder / "special_tokens_map.json"), **settings}
        self._tokens = {name: token_text(value) for name, value in tokens.items() if name.endswith("_token") and value}
        self.begin, self.end = token_text(settings.get("bos_token")), token_text(settings.get("eos_token"))
        path = folder / "tokenizer.json"
        first = _FIRST.search(path.read_bytes()) if path.is_file() and self.begin else None
        self.begins = settings.get("add_bos_token", first is not None and json.loads(first[1]) == self.begin) is True

    def __call__(self, text: str, add_special_tokens: bool = True) -> Mapping[str, Sequence[int]]:
        return {"input_ids": ()}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], tokenize: bool, **arguments: object) -> str:
        """The text; raises what the template raises."""
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        return self._template.render(messages=plain, **{"tools": None, "documents": None, **self._tokens, **arguments})

    @functools.cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.chat_template or "")


def check_prompt(config: RunConfig, tokenizer: RenderingTokenizer, prompt: Prompt, where: str) -> None:
    """
    Args:
        where: how messages refer to the prompt's row.

    Raises:
        DataError: the template leaves out what a message says, or opens no answer; or a token would begin it twice.
    """
    if not config.rollout.apply_chat_template:
        if tokenizer.begin and tokenizer.begins and prompt.text.startswith(tokenizer.begin):
            raise DataError("the prompt begins with the token that the tokenizer puts before every text",
                            got=tokenizer.begin, who=where, fix="leave it out of the rows: it would stand there twice",
                            code="template-doubles-first-token")
        return
    for place, message in enumerate(prompt.messages or ()):
        role, content = str(message["role"]), message.get("content")
        word = max(re.findall(r"\w+", content), key=len, default="") if isinstance(content, str) else ""
        shown = role in ("system", "tool") or role == "user" and place >= len(prompt.messages or ()) - 2
        if shown and word not in prompt.text:
            raise DataError(f"the chat template leaves out what the {role} says", got=str(content)[:40], who=where,
                            fix="look at it with `miles check-template`; it should write message.content of every "
                            "one of `messages`", code="template-drops-message")
    if config.rollout.generate == "single-turn" and tokenizer.end and prompt.text.rstrip().endswith(tokenizer.end):
        raise DataError("the chat template opens no answer: the prompt ends where the model is to go on", who=where,
                        got=repr(prompt.text[-32:]), fix="leave add_generation_prompt on, and name a template that "
                        "heeds it; a prompt that is meant so can be a row's text, without --apply-chat-template",
                        code="template-opens-no-answer")


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
