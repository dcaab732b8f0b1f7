"""What the chat template makes of the first rows, rendered with jinja2 as transformers does, and how long it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_core.config.check_lengths import context_of
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError

FIRST = 16
"""Rows of a file that are rendered, and after them those whose messages are unlike all before."""


def check_rendered(config: RunConfig, template: ChatTemplate | None, origin: str,
                   prompts: Sequence[tuple[int, str | list[dict]]], most: int | None, needed: int | None) -> None:
    """
    Args:
        template: the run's; None where rows are not rendered.
        origin: the file, for messages.
        prompts: (line, text or chat messages) of rows.
        most: the limit on prompts' tokens beyond which they are left out; None where that is an error.
        needed: how many must be left, where these are all rows of the file.

    Raises:
        DataError: the template refuses messages, or too few of the prompts fit.
    """
    if template is not None and template.text is None:
        return
    context = context_of(config)[0]
    limit = min(filter(None, (most, context and context - 1)), default=None)
    seen, long = set(), []
    for place, (line, prompt) in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else ""
        if template is not None:
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            shape = tuple((str(one["role"]), type(one.get("content")), *sorted(one)) for one in messages)
            size = sum(len(str(one.get("content")).encode()) + 32 for one in messages)
            if place >= FIRST and shape in seen and (limit is None or size + 256 <= limit):
                continue
            seen.add(shape)
            text = template.render(messages, f"{origin}, line {line}")
        if limit is not None and len(text.encode()) > limit:  # a token is a byte or more
            long.append((line, text))
    if limit is None or not long or (most is not None and (needed is None or len(prompts) - len(long) >= needed)):
        return
    _fitting(config, origin, long, (limit, most, needed), len(prompts), context)


def _fitting(config: RunConfig, origin: str, long: Sequence[tuple[int, str]],
             limits: tuple[int, int | None, int | None], number: int, context: int | None) -> None:
    """The same for prompts that only their tokens can tell about."""
    file, (limit, most, needed) = Path(str(config.checkpoint.hf_checkpoint)) / "tokenizer.json", limits
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the start says what is wrong with it; tokenizers raises nothing narrower
        return
    whole = not config.rollout.apply_chat_template
    sizes = [(line, len(tokenizer.encode(text, add_special_tokens=whole).ids)) for line, text in long]
    beyond = [(line, size) for line, size in sizes if size > limit]
    if beyond and most is None:
        raise DataError(f"the prompt has {beyond[0][1]} tokens and leaves no room for an answer",
                        got=f"a context of {context}", who=f"{origin}, line {beyond[0][0]}",
                        fix="shorten it, or leave long prompts out with --rollout-max-prompt-len N")
    if needed is not None and number - len(beyond) < needed:
        raise DataError("too few prompts are left for one rollout", got=f"{number - len(beyond)} of {number} rows have "
                        f"at most {limit} tokens, {needed} are needed", who=origin,
                        fix="raise --rollout-max-prompt-len, or write --num-rollout in place of --num-epoch")


class ChatTemplate:
    """The run's chat template; `text` is None where it has none that can be read.

    Raises:
        DataError: it is no Jinja.
    """

    def __init__(self, config: RunConfig):
        folder, rollout = Path(str(config.checkpoint.hf_checkpoint)), config.rollout
        said = _json(folder / "tokenizer_config.json")
        path = Path(rollout.chat_template_path or folder / "chat_template.jinja")
        found = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else (
            _json(folder / "chat_template.json").get("chat_template") or said.get("chat_template"))
        if isinstance(found, list):
            found = next((one.get("template") for one in found if one.get("name") == "default"), None)
        self.text = found if isinstance(found, str) else None
        tokens = {**_json(folder / "special_tokens_map.json"), **said}
        self._given = {name: value.get("content") if isinstance(value, Mapping) else value
                       for name, value in tokens.items() if name.endswith("_token") and value}
        self._given |= {"tools": None, "documents": None, "add_generation_prompt": True}
        self._given |= rollout.apply_chat_template_kwargs or {}
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

    def render(self, messages: Sequence[Mapping], where: str) -> str:
        """The text, with the answer's opening.

        Raises:
            DataError: the template's own refusal.
        """
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        try:
            return self._template.render(messages=plain, **self._given)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise DataError("the chat template refuses the messages", got=str(error), who=where,
                            fix="check the roles and contents, and `miles check-template`") from None


def _environment():
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message):
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = lambda value, ensure_ascii=False, **how: json.dumps(
        value, ensure_ascii=ensure_ascii, **how)
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    return made


def _json(path: Path) -> Mapping:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or the start speaks of it
        return {}
    return said if isinstance(said, Mapping) else {}
