"""A conversation becomes tokens and a mask of the tokens that the assistant wrote.

With `{% generation %}` blocks the chat template says itself which tokens those are. Without them, answer i lies between
two renderings: of messages[:i] with the opening of an answer, and of messages[:i+1]. Both must be beginnings of the
whole conversation's text, which is verified; a template that rewrites earlier turns, such as one that strips their
reasoning, is refused with an error instead of training on tokens that would never be generated. Three ways around:

- A template whose opening of an answer ends with a tag, such as <think>, and that shows a finished answer without it:
  the last answer is written behind the opening, as a model would have to, its reasoning and the end of the tag first.
- `alone` renders every answer behind a user's message of its own, so that each keeps its reasoning.
- `shown` finds answers in the whole text by the line that opens one and by the end token.

The text is cut at these borders before it is tokenised, just as in sampling, where the prompt is tokenised alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import DataError
from miles_core.stages.prompts import for_template

_TAG = re.compile(r"<(\w+)>\s*$")
USER = {"role": "user", "content": "."}
"""Stands before an answer that is rendered by itself."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(slots=True)
class EncodedConversation:
    """Token ids of a conversation, and 1 for each that is trained on: both [T]."""

    ids: list[int]
    mask: list[int]


def encode(tokenizer: Any, messages: Sequence[Mapping[str, object]], arguments: Mapping[str, object], where: str,
           *, last_only: bool = False, alone: bool = False, shown: bool = False) -> EncodedConversation:
    """Tokens and mask of a conversation that ends with an answer; end tokens are trained on, what follows them is not.

    Where a template ends answers by the special token that begins the next turn, that one is the end.

    Args:
        arguments: further arguments of the chat template.
        where: the row, for messages.
        last_only: train on the last answer only; earlier ones are context.
        alone: render each answer as if it were the only one.
        shown: take answers as the whole conversation's text shows them, also where it leaves out their reasoning.

    Raises:
        DataError: no chat template, a refusal by the template, or one that rewrites earlier turns.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DataError("the tokenizer has no chat template", code="chat-template-missing", who=where,
                        fix="pass --chat-template-path FILE, or give the prompt as text")
    if isinstance(template, str) and _GENERATION.search(template):
        encoded = _by_generation_blocks(tokenizer, messages, arguments, where)
        return _last_answer(encoded) if last_only else encoded
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if shown:
        return _as_shown(tokenizer, messages, answers[-1:] if last_only else answers, arguments, where)
    if alone:
        return _each_alone(tokenizer, messages, answers[-1:] if last_only else answers, arguments, where)
    return _by_prefixes(tokenizer, messages, answers[-1:] if last_only else answers, arguments, where)


def _by_prefixes(tokenizer: Any, messages: Sequence[Mapping[str, object]], answers: Sequence[int],
                 arguments: Mapping[str, object], where: str) -> EncodedConversation:
    whole = render(tokenizer, messages, arguments, where, opening=False)
    encoded, at = EncodedConversation([], []), 0
    for i in answers:
        before = render(tokenizer, messages[:i], arguments, where, opening=True)
        after = render(tokenizer, messages[: i + 1], arguments, where, opening=False)
        written = _behind_tag(messages[i], before, whole, lambda: _behind_answer(
            tokenizer, messages[:-1], arguments, where)) if i == len(messages) - 1 else ""
        if written and before[:at] == whole[:at]:
            _append(encoded, tokenizer, before[at:], trained=False)
            _append(encoded, tokenizer, written, trained=True)
            return encoded
        if not (whole.startswith(before) and whole.startswith(after) and at <= len(before) < len(after)):
            raise DataError(
                f"the chat template renders message {i} differently when others follow, so the answer cannot be "
                "located", code="sft-template-not-incremental",
                who=where,
                fix="--loss-mask-type qwen3 renders each answer alone, --sft.sft-last-turn-only trains on the last; or "
                "--chat-template-path with a template that has {% generation %} blocks",
            )
        _append(encoded, tokenizer, whole[at : len(before)], trained=False)
        _append(encoded, tokenizer, whole[len(before) : len(after)], trained=True)
        at = len(after)
    return encoded


def _as_shown(tokenizer: Any, messages: Sequence[Mapping[str, object]], trained: Sequence[int],
              arguments: Mapping[str, object], where: str) -> EncodedConversation:
    """Answers between the line that opens one and the token that ends one; a tag in between is no part of them."""
    closed, opened = _turn(tokenizer, arguments, where)
    line, newline, tag = opened[len(closed):].partition("\n")
    whole = render(tokenizer, messages, arguments, where, opening=False)
    end = _end(tokenizer, arguments, where)
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    encoded, at, openings = EncodedConversation([], []), 0, bool(line and end) and whole.count(line + newline)
    for i in answers:
        start = whole.find(line + newline, at) + len(line + newline)
        start += len(tag) if whole.startswith(tag, start) else 0
        stop = whole.find(end, start) + len(end)
        if openings != len(answers) or not at < start < stop:
            raise DataError(f"the chat template's text shows no answer for message {i}", who=where,
                            got=f"{len(answers)} answers, and {line + newline!r} opens {openings:d} of them, "
                            f"{end!r} ends one", fix="leave --loss-mask-type out, or --chat-template-path with a "
                            "template that has {% generation %} blocks", code="sft-answer-not-in-text")
        _append(encoded, tokenizer, whole[at:start], trained=False)
        _append(encoded, tokenizer, whole[start:stop], trained=i in trained)
        at = stop
    _append(encoded, tokenizer, whole[at:], trained=False)
    return encoded


def _turn(tokenizer: Any, arguments: Mapping[str, object], where: str) -> tuple[str, str]:
    """A user's message as a whole conversation, and with the opening of an answer to it.

    Raises:
        DataError: the first is not the beginning of the second, such as where the end of a text is written behind it.
    """
    closed, opened = (render(tokenizer, [USER], arguments, where, opening=opening) for opening in (False, True))
    if not opened.startswith(closed):
        raise DataError("the chat template renders a message differently when an answer follows, so turns cannot be "
                        "told apart", code="sft-turns-not-apart", who=where, got=closed[-40:],
                        fix="--chat-template-path with a template that has {% generation %} blocks")
    return closed, opened


def _end(tokenizer: Any, arguments: Mapping[str, object], where: str) -> str:
    """The special tokens that end an answer, such as <|END_RESPONSE|><|END_OF_TURN_TOKEN|>; "" for none."""
    tokens = "|".join(map(re.escape, sorted(special_tokens(tokenizer), key=len, reverse=True)))
    end = re.search(f"(?:{tokens})+", _behind_answer(tokenizer, [USER], arguments, where))
    return end[0] if end else ""


def _behind_answer(tokenizer: Any, before: Sequence[Mapping[str, object]], arguments: Mapping[str, object],
                   where: str) -> str:
    """What the template writes behind an answer to these messages."""
    answered = render(tokenizer, [*before, {"role": "assistant", "content": "."}], arguments, where, opening=False)
    return answered.rpartition(".")[2]


def _each_alone(tokenizer: Any, messages: Sequence[Mapping[str, object]], trained: Sequence[int],
                arguments: Mapping[str, object], where: str) -> EncodedConversation:
    """Runs of messages between answers, and each answer, as they are rendered behind a user's message."""
    def behind(some: Sequence[Mapping[str, object]], *, opening: bool) -> str:
        return render(tokenizer, [USER, *some], arguments, where, opening=opening)

    several = sum(message.get("role") == "assistant" for message in messages) > 1
    first = _turn(tokenizer, arguments, where)[0] if several else ""
    opened, encoded, begun = behind([], opening=True), EncodedConversation([], []), 0
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        run = messages[begun:i]
        context = behind(run, opening=True) if begun else render(tokenizer, run, arguments, where, opening=True)
        if begun and (not context.startswith(first) or any(
                one.get("content") and behind([one], opening=True) == opened for one in run)):
            raise DataError(f"the chat template does not show what is before message {i} without the answer before it",
                            code="sft-context-not-shown", who=where, got=context[-40:],
                            fix="leave --loss-mask-type out, or --chat-template-path with a template that has "
                            "{% generation %} blocks")
        context = context[len(first):] if begun else context
        shown = behind([message], opening=False)
        answer = shown[len(opened):] if shown.startswith(opened) else _behind_tag(
            message, opened, shown, lambda: _behind_answer(tokenizer, [USER], arguments, where))
        if not answer:
            raise DataError(f"the chat template does not open answers as it renders message {i}",
                            code="sft-answer-opening-differs", who=where,
                            fix="--chat-template-path with a template that has {% generation %} blocks")
        _append(encoded, tokenizer, context, trained=False)
        _append(encoded, tokenizer, answer, trained=i in trained)
        begun = i + 1
    return encoded


def _behind_tag(message: Mapping[str, object], opened: str, whole: str, end: Callable[[], str]) -> str:
    """What a model would write behind an opening that ends with a tag, if `whole` does not show it there; else "".

    What ends the answer is what `whole` has behind it, and what other answers `end` with is no part of it: the answer
    "end" is in <|im_end|> as well.
    """
    tag = _TAG.search(opened)
    content = str(message.get("content") or "").strip()
    if tag is None or whole.startswith(opened) or message.get("tool_calls") or not content:
        return ""
    answer = content.rpartition(f"</{tag[1]}>")[2].strip()
    written = within_tag(opened, content, str(message.get("reasoning_content") or "").strip())
    start = whole.removesuffix(end()).rfind(answer)
    return written + whole[start + len(answer):] if answer and start >= 0 else ""


def within_tag(opened: str, content: str, reasoning: str = "") -> str:
    """An answer as it goes on from an opening that ends with a tag: without the tag, and with one that closes it.

    An answer without reasoning closes the tag first. Behind other openings it stays as it is.
    """
    tag = _TAG.search(opened)
    if tag is None:
        return content
    if f"</{tag[1]}>" in content:
        return content.removeprefix(f"<{tag[1]}>").lstrip("\n")
    return f"{reasoning}\n</{tag[1]}>\n\n{content}"


def _append(encoded: EncodedConversation, tokenizer: Any, text: str, *, trained: bool) -> None:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
    trained_count = 0
    if trained:
        trained_count = without_trailing_space(tokenizer, ids)
    elif ids and encoded.mask[-1:] == [1]:  # what follows may end the answer: GLM's <|user|> and <|observation|>
        special = special_tokens(tokenizer).values()
        trained_count = int(encoded.ids[-1] not in special and ids[0] in special)
    encoded.ids += ids
    encoded.mask += [1] * trained_count + [0] * (len(ids) - trained_count)


def without_trailing_space(tokenizer: Any, ids: Sequence[int]) -> int:
    """How many ids remain when the blank text that a template writes after an answer's end token is left out."""
    special = special_tokens(tokenizer).values()
    last = max((i for i, token in enumerate(ids) if token in special), default=None)
    if last is not None and not tokenizer.decode(ids[last + 1 :]).strip():
        return last + 1
    return len(ids)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Token -> id of every special one. transformers lists those that have a name; Llama's <|eot_id|> may have none."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def _by_generation_blocks(tokenizer: Any, messages: Sequence[Mapping[str, object]], arguments: Mapping[str, object],
                          where: str) -> EncodedConversation:
    try:
        encoded = tokenizer.apply_chat_template(for_template(messages), tokenize=True, return_dict=True,
                                                return_assistant_tokens_mask=True,
                                                **{**arguments, "add_generation_prompt": False})
    except Exception as error:
        raise _refused(error, where) from error
    ids, mask = list(encoded["input_ids"]), list[int]()
    for bit, run in itertools.groupby(encoded["assistant_masks"]):
        size = len(list(run))  # a block may hold the line break behind an answer's end token
        trained = without_trailing_space(tokenizer, ids[len(mask):len(mask) + size]) if bit else 0
        mask += [1] * trained + [0] * (size - trained)
    return EncodedConversation(ids, mask)


def _last_answer(encoded: EncodedConversation) -> EncodedConversation:
    """The same with the last run of trained tokens only."""
    stop = max((i + 1 for i, bit in enumerate(encoded.mask) if bit), default=0)
    start = stop
    while start and encoded.mask[start - 1]:
        start -= 1
    return EncodedConversation(encoded.ids, [int(start <= i < stop) for i in range(len(encoded.ids))])


def render(tokenizer: Any, messages: Sequence[Mapping[str, object]], arguments: Mapping[str, object], where: str,
           *, opening: bool) -> str:
    """The text of messages, with the opening of an answer or as they are.

    Raises:
        DataError: the template refuses them.
    """
    try:
        options = {**arguments, "add_generation_prompt": opening}
        return str(tokenizer.apply_chat_template(for_template(messages), tokenize=False, **options))
    except Exception as error:
        raise _refused(error, where) from error


def _refused(error: Exception, where: str) -> DataError:
    return DataError("the chat template rejects the messages", got=f"{type(error).__name__}: {error}", who=where,
                     fix="check the roles and contents of the row", code="sft-template-failed")
