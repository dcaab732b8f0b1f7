"""What the chat template makes of the first rows, rendered with jinja2 as transformers does, and how long it is."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miles_core.backends.megatron.hf_files import SPECIAL
from miles_core.config.check_lengths import context_of
from miles_core.config.history import check_history
from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, DataError

MEANT = {name: role for role, names in {
    "system": "system sys", "user": "user human prompter", "developer": "developer",
    "assistant": "assistant gpt chatgpt bot ai model function_call",
    "tool": "tool observation function_response"}.items() for name in names.split()}
"""How messages' roles are called, here and in other programs -> the role."""
_ADDED = re.compile(SPECIAL.encode())
_CALLED = re.compile(r"tokenize|conversation|return_\w+|chat_template(_kwargs)?|extra_body|padding|truncation|"
                     r"max_length|continue_final_message|tokenizer_kwargs|add_special_tokens")
"""Arguments of the call that applies a template, which are no template's."""
FIRST = 16
"""Rows of a file that are rendered, and after them those whose messages are unlike all before."""


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """
    Args:
        tokenizer: the run's.

    Raises:
        DataError: files of the tokenizer that are cut short, or its end of a sequence is none of its tokens.
    """
    folder, raw, tokens = tokenizer
    for path, text in ((folder / name, (folder / name).read_bytes() if name != "tokenizer.json" else raw)
                       for name in ("tokenizer.json", "tokenizer_config.json") if (folder / name).is_file()):
        if not (text[:64].lstrip().startswith(b"{") and text[-64:].rstrip().endswith(b"}")):
            raise DataError("the tokenizer cannot be read: its file is not whole", got=f"{len(text)} bytes",
                            who=str(path), fix="fetch the checkpoint again")
    rollout = config.rollout
    said = {**read(folder / "special_tokens_map.json"), **read(folder / "tokenizer_config.json")}
    end = token_text(said.get("eos_token"))
    _check_vocabulary(raw, (config_json(config)[1] or {}).get("vocab_size"), folder)
    if end is None and said.get("eos_token"):
        raise DataError("eos_token should be text", got=said["eos_token"], who=str(folder / "tokenizer_config.json"),
                        fix="write the token itself, not its id nor a list")
    if end is None or b'"added_tokens"' not in raw:
        return
    spelled = {json.dumps(end).encode(), json.dumps(end, ensure_ascii=False).encode()}
    if not any(one in raw for one in spelled) and end not in str(said.get("added_tokens_decoder")):
        raise DataError("the token that ends a sequence is none of the tokenizer's", got=end,
                        who=str(folder / "tokenizer_config.json"), fix="name one that tokenizer.json has as eos_token")
    stops = stops_of(folder)
    if stops and tokens and not stops & {*tokens.values()} and not any(
            str(one) in (said.get("added_tokens_decoder") or {}) for one in stops):
        raise DataError("no token that ends the model's answers is a special token of the tokenizer, which is another "
                        "model's", got=f"eos_token_id {', '.join(map(str, sorted(stops)))}, and {end} is "
                        f"{tokens.get(end, 'none')}", who=str(folder), fix="copy tokenizer.json and "
                        "tokenizer_config.json of this model there, or name its own eos_token_id")
    if rollout.rollout_skip_special_tokens and (lost := [stop for stop in rollout.rollout_stop if stop in tokens]) and (
            lost[0] != end and re.search(re.escape(json.dumps(lost[0]).encode()) + rb'[^{}]*"special":\s*true', raw)):
        raise DataError("nothing stops at a special token, as they are left out of the text", got=lost[0],
                        who=who(config, "rollout.rollout_stop", "rollout.rollout_skip_special_tokens"),
                        fix=f"--rollout-stop-token-ids {tokens[lost[0]]}")


def stops_of(folder: Path) -> set[int]:
    """Tokens at which a checkpoint's model stops, as its files have it."""
    ends = [read(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    return {one for ids in ends for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}


_MERGES = re.compile(rb'"merges":\s*\[(?:\s*"(?:[^" \\]|\\.)++ (?:[^" \\]|\\.)++",?)*+\s*("[^"]*"?|)')
"""Merges that are written as texts, and the first that is not two parts."""


def _check_vocabulary(raw: bytes, size: object, folder: Path) -> None:
    merges = raw.rfind(b'"merges"')
    if b'"added_tokens"' in raw and (b'"model"' not in raw or merges < 0 and re.search(rb'"type":\s*"BPE"', raw)):
        raise DataError("the tokenizer cannot be read: it has no vocabulary, or no merges", who=str(folder),
                        got="tokenizer.json", fix="fetch the checkpoint again")
    broken = _MERGES.match(raw, max(merges, 0))
    if broken and broken[1].startswith(b'"'):
        raise DataError("the tokenizer cannot be read: a merge is two parts with one space between them",
                        got=broken[1].decode(errors="replace"), who=str(folder / "tokenizer.json"),
                        fix="write merges as lists of two parts, or fetch the checkpoint again")
    last = re.findall(rb'":\s*(\d+)\s*\}?', raw[max(merges - 400, 0):merges]) if merges > 0 else []
    if last and isinstance(size, int) and int(last[-1]) >= size:
        raise DataError("the tokenizer has tokens beyond the model's vocabulary: it is another model's",
                        got=f"{int(last[-1])}, and config.json has a vocab_size of {size}", who=str(folder),
                        fix="copy tokenizer.json and tokenizer_config.json of this model there")


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
    """What tokenizer_config.json alone names is added when the tokenizer is loaded, behind all others."""
    folder = Path(str(config.checkpoint.hf_checkpoint))
    raw = (folder / "tokenizer.json").read_bytes() if (folder / "tokenizer.json").is_file() else b""
    found = {json.loads(content): int(number) for number, content in
             _ADDED.findall(raw, 0, max(raw.find(b'"normalizer"'), 0))}
    said = read(folder / "tokenizer_config.json")
    listed = said.get("additional_special_tokens")
    late = [one for one in map(token_text, listed if isinstance(listed, list) else ()) if one and one not in found
            and json.dumps(one).encode() not in raw and one not in str(said.get("added_tokens_decoder"))]
    late_ids = {one: max(found.values()) + 1 + i for i, one in enumerate(late)} if found else {}
    return Tokenizer(folder, raw, found | late_ids)


def token_text(token: object) -> str | None:
    """A token as tokenizer_config.json writes it, as text."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def check_rendered(config: RunConfig, shown: Shown, origin: str,
                   prompts: Sequence[tuple[int, str | list[dict]]], most: int | None, needed: int | None) -> None:
    """
    Args:
        shown: of the run's template and tokenizer.
        origin: the file, for messages.
        prompts: (line, text or chat messages) of rows.
        most: the limit on prompts' tokens beyond which they are left out; None where that is an error.
        needed: how many must be left, where these are all rows of the file.

    Raises:
        DataError: the template refuses messages, or too few of the prompts fit.
    """
    template = shown.template
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
            shown.messages(messages, text, f"{origin}, line {line}")
        shown.text(text, f"{origin}, line {line}")
        if limit is not None and len(text.encode()) > limit:  # a token is a byte or more
            long.append((line, text))
    if limit is None or not long or (most is not None and (needed is None or len(prompts) - len(long) >= needed)):
        return
    _fitting(config, origin, long, (limit, most, needed), len(prompts), context)


def check_appends(config: RunConfig, **history: Any) -> None:
    """
    Raises:
        DataError: see `check_history`.
    """
    template = ChatTemplate(config) if config.rollout.apply_chat_template else None
    if template is not None and template.text is not None:
        origin = config.rollout.chat_template_path or f"the chat template of {config.checkpoint.hf_checkpoint}"
        check_history(lambda messages: template.render(messages, origin), who=origin, **history)


def check_room(config: RunConfig, labels: Sequence[str], most: int, name: str, origin: str) -> None:
    """
    Args:
        labels: what the scorer `name` compares answers with.
        most: tokens of an answer.

    Raises:
        ConfigError: there is no room for one of them. A label of several words may be said in fewer.
    """
    if not labels or any(len(label.encode()) <= most or re.search(r"\s", label) for label in labels):
        return  # a token is a byte or more
    size, label = min(zip(_sizes(config, labels), labels, strict=False), default=(0, ""))
    if size > most:
        raise ConfigError(f"no answer has room for what {name!r} compares with", got=f"{size} tokens or more, as "
                          f"{label!r} has; max_response_len {most}", who=origin,
                          fix="raise --rollout-max-response-len, or that of the evaluation")


def _sizes(config: RunConfig, texts: Sequence[str], special: bool = False) -> list[int]:
    """Tokens of texts, where the run's tokenizer can be read; with `special` those that it puts around a text."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(str(config.checkpoint.hf_checkpoint)) / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the start says what is wrong with it; tokenizers raises nothing narrower
        return []
    return [len(tokenizer.encode(text, add_special_tokens=special).ids) for text in texts]


def _fitting(config: RunConfig, origin: str, long: Sequence[tuple[int, str]],
             limits: tuple[int, int | None, int | None], number: int, context: int | None) -> None:
    """The same for prompts that only their tokens can tell about."""
    (limit, most, needed), whole = limits, not config.rollout.apply_chat_template
    sizes = list(zip((line for line, _ in long), _sizes(config, [text for _, text in long], whole), strict=False))
    beyond = [(line, size) for line, size in sizes if size > limit]
    if beyond and most is None:
        raise DataError(f"the prompt has {beyond[0][1]} tokens and leaves no room for an answer",
                        got=f"a context of {context}", who=f"{origin}, line {beyond[0][0]}",
                        fix="shorten it, or leave long prompts out with --rollout-max-prompt-len N")
    if needed is not None and number - len(beyond) < needed:
        raise DataError("too few prompts are left for one rollout", got=f"{number - len(beyond)} of {number} rows have "
                        f"at most {limit} tokens, {needed} are needed", who=origin,
                        fix="raise --rollout-max-prompt-len, or write --num-rollout in place of --num-epoch")


class Shown:
    """What a rendered prompt shows to be wrong with its row, or with the template.

    Args:
        template: the run's; None where rows are not rendered.
        tokenizer: the run's.
    """

    def __init__(self, config: RunConfig, template: ChatTemplate | None, tokenizer: Tokenizer):
        folder, raw, tokens = tokenizer
        said, size = read(folder / "tokenizer_config.json"), (config_json(config)[1] or {}).get("vocab_size")
        begins = raw[max(raw.find(b'"post_processor"'), 0):max(raw.find(b'"decoder"'), 0)]
        bos = token_text(said.get("bos_token"))
        self._begun = bos if template is None and bos and (
            said.get("add_bos_token") is True or json.dumps(bos).encode() in begins) else None
        self.template, self._opens = template, template is not None and config.rollout.generate == "single-turn"
        self._beyond = [(token, one) for token, one in tokens.items() if isinstance(size, int) and one >= size]
        self._end, self._size = token_text(said.get("eos_token")), size

    def text(self, text: str, where: str) -> None:
        if beyond := next((pair for pair in self._beyond if pair[0] in text), None):
            raise DataError("the prompt holds a token that the model does not have", who=where,
                            got=f"{beyond[0]} is {beyond[1]}, and config.json has a vocab_size of {self._size}",
                            fix="resize the model's embeddings and save it anew, or leave the token out")
        if self._begun and text.startswith(self._begun):
            raise DataError("the prompt begins with the token that the tokenizer puts before every text", who=where,
                            got=self._begun, fix="leave it out of the rows, or it would stand there twice")
        if self._opens and self._end and text.rstrip().endswith(self._end):
            raise DataError("the chat template opens no answer: the prompt ends where the model is to go on", who=where,
                            got=repr(text[-32:]), fix="leave add_generation_prompt on, and name a template that heeds "
                            "it; a prompt that is meant so can be a row's text, without --apply-chat-template")

    def messages(self, messages: Sequence[Mapping], text: str, where: str) -> None:
        for place, message in enumerate(messages):
            role, content = str(message["role"]), message.get("content")
            meant = MEANT.get(role.strip().lower())
            if meant and role != meant and not re.search(rf"['\"]{re.escape(role)}['\"]", str(self.template.text)):
                raise DataError("the chat template does not know this role", got=role, who=where,
                                fix=f'write "{meant}"')
            if isinstance(content, list) and content and str(content) in text:
                raise DataError("the chat template writes the parts of a message as Python prints them", who=where,
                                got=str(content)[:40], fix='write the text itself: "content": "..."')
            said = content.rpartition("</think>")[2] if isinstance(content, str) else ""
            word = max(re.findall(r"\w+", said), key=len, default="")
            if word not in text and (role in ("system", "tool") or place >= len(messages) - 2 and role == "user"
                                     or place == len(messages) - 1 and role == "assistant"):
                raise DataError(f"the chat template leaves out what the {role} says", got=said[:40], who=where,
                                fix="look at it with `miles check-template`; it should write message.content of every "
                                "one of `messages`")
            mark = re.search(r"<\|?[^<>\s]+\|?>$", content.rstrip()) if isinstance(content, str) else None
            if mark and re.search(re.escape(content.rstrip()) + rf"\s*{re.escape(mark[0])}", text):
                raise DataError("the text ends with what the chat template writes behind it", got=mark[0], who=where,
                                fix="leave it out of the rows, or it would stand there twice")
            for call in message["tool_calls"] if isinstance(message.get("tool_calls"), list) else ():
                call = call.get("function", call) if isinstance(call, Mapping) else {}
                if str(call.get("name", "")) not in text:
                    raise DataError("the chat template leaves out the calls of tools", got=call["name"], who=where,
                                    fix="name one that writes message.tool_calls, or write calls into the content")
                said = call.get("arguments")
                if isinstance(said, str) and '"' in said and json.dumps(said, ensure_ascii=False) in text:
                    raise DataError("the arguments of a call are text, which the chat template quotes once more",
                                    got=said[:40], who=where, fix='write the object itself: "arguments": {...}')


class ChatTemplate:
    """The run's chat template; `text` is None where it has none that can be read.

    Raises:
        DataError: it is no Jinja.
    """

    def __init__(self, config: RunConfig):
        folder, rollout = Path(str(config.checkpoint.hf_checkpoint)), config.rollout
        said = read(folder / "tokenizer_config.json")
        path = Path(rollout.chat_template_path or folder / "chat_template.jinja")
        found = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else (
            read(folder / "chat_template.json").get("chat_template") or said.get("chat_template"))
        if isinstance(found, list):
            found = {one.get("name"): one.get("template") for one in found}
        found = found.get("default") if isinstance(found, Mapping) else found
        self.text = found if isinstance(found, str) else None
        tokens = {**read(folder / "special_tokens_map.json"), **said}
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
        self._check_arguments(config)

    def _check_arguments(self, config: RunConfig) -> None:
        import jinja2.meta

        origin = who(config, "rollout.apply_chat_template_kwargs")
        for name, value in (config.rollout.apply_chat_template_kwargs or {}).items():
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                raise DataError("an argument of the chat template is a text, and every text counts as true",
                                got=f'{name}: "{value}"', who=origin, fix=f"leave the quotes out: {value.lower()}")
            if not re.search(rf"\b{re.escape(name)}\b", self.text):
                if _CALLED.fullmatch(name):
                    raise DataError("this is no argument of a chat template, but of the call that applies it", got=name,
                                    who=origin, fix="leave it out; a template is named with --chat-template-path, and "
                                    "a limit with --rollout-max-prompt-len")
                known = jinja2.meta.find_undeclared_variables(_environment().parse(self.text)) - {*self._given}
                near = difflib.get_close_matches(name, known, 1, 0.8) or [
                    one for one in known if len(min(one, name, key=len)) > 4 and (one in name or name in one)]
                if near:
                    raise DataError("the chat template has no such argument", got=name, who=origin,
                                    fix=f"write {near[0]}")

    def render(self, messages: Sequence[Mapping], where: str, **given: Any) -> str:
        """The text, with the answer's opening where `given` or the run does not say otherwise.

        Raises:
            DataError: the template's own refusal.
        """
        plain = [{key: value for key, value in one.items() if value is not None} for one in messages]
        try:
            return self._template.render(messages=plain, **self._given | given)
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


def read(path: Path) -> Mapping:
    """A JSON object; nothing where there is none that can be read."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or the start speaks of it
        return {}
    return said if isinstance(said, Mapping) else {}
