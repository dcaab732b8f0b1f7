"""The chat template's part of a conversation: the prompt with its tools, and the suffixes between two drawn turns.

A suffix is rendered beside an assistant's turn that stands for the drawn one, and what follows that turn is taken:

    <|im_start|>user\\n.<|im_end|>\\n<|im_start|>assistant\\nMARK
    <|im_end|>\\n<|im_start|>tool\\n46<|im_end|>\\n<|im_start|>assistant\\n        this is the suffix

Its first token ends the assistant's turn; where the engine drew one that does, it is left out. So the newline that the
template writes after the end of a turn is part of the suffix, and no drawn text is ever rendered or tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError
from miles_core.stages.prompts import render
from miles_tools.history import DRAWN, after_a_turn, check_history

if TYPE_CHECKING:
    from miles_core.config import RunConfig


def load(config: RunConfig) -> Any:
    """The run's tokenizer, with the run's chat template.

    Raises:
        ConfigError: the prompts are not rendered by a template.
        DataError: there is no tokenizer, or no such template.
    """
    if not config.rollout.apply_chat_template:
        raise ConfigError("a conversation needs prompts that a chat template renders",
                          code="conversation-needs-template", who="rollout.apply_chat_template",
                          fix="add --apply-chat-template")
    from miles_core.build import load_tokenizer

    return load_tokenizer(config)


class Template:
    """A tokenizer's chat template with a run's arguments and tools.

    Args:
        arguments: further arguments of the template (--apply-chat-template-kwargs).
        tools: descriptions of functions, given to the template as `tools`.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, object],
                 tools: Sequence[Mapping[str, Any]] | None = None):
        self.tokenizer = tokenizer
        self._arguments = {**arguments, **({"tools": list(tools)} if tools else {})}
        # An image's and an end beside the one that the settings name, as Phi's <|end|>, are only added.
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | added
        self._special_ids = frozenset(self._special.values())

    def text(self, messages: Sequence[Mapping[str, Any]], where: str, *, opening: bool = True) -> str:
        """Messages as the template writes them, with the opening of an answer.

        Raises:
            DataError: no template, or one that refuses the messages.
        """
        arguments = {**self._arguments, "add_generation_prompt": opening}
        return render(self.tokenizer, messages, arguments, where)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, messages: Sequence[Mapping[str, Any]], where: str) -> list[int]:
        """The ids that a conversation begins with."""
        return self.encode(self.text(messages, where))

    def suffix(self, messages: Sequence[Mapping[str, Any]], after: int) -> list[int]:
        """The ids that follow a drawn turn: these messages, and the opening of the next turn.

        Args:
            after: the last drawn id.
        """
        return self.joining(self.encode(self.suffix_text(messages)), after)

    def suffix_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What `suffix` encodes."""
        return after_a_turn(lambda them: self.text(them, "a tool's answer"), messages, DRAWN)

    def joining(self, ids: Sequence[int], after: int, stops: Sequence[str] = ()) -> list[int]:
        """The ids of a suffix, less the end of the drawn turn where the engine drew one.

        Args:
            stops: texts that cut a turn short; one that is a special token is no end, but what the turn says.
        """
        ended = bool(ids) and ids[0] in self._special_ids and (after == ids[0] or self._ends(after, stops))
        return list(ids[1:] if ended else ids)

    def without_end(self, drawn: Sequence[int], stops: Sequence[str] = ()) -> list[int]:
        """A drawn turn less the special token that ended it; `stops` as in `joining`."""
        return list(drawn[:-1] if drawn and self._ends(drawn[-1], stops) else drawn)

    def _ends(self, token: int, stops: Sequence[str]) -> bool:
        stopped = token in map(self._special.get, stops) and token != self.tokenizer.eos_token_id  # that stays the end
        return token in self._special_ids and not stopped

    def harmless(self, text: str) -> str:
        """A text that the model did not write, with a space in whatever would be tokenised as a special token."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def shortened(self, text: str, most: int) -> str:
        """At most so many tokens of a text; a mark says that something was cut."""
        ids = self.encode(text)
        if len(ids) <= most:
            return text
        return f"{self.tokenizer.decode(ids[:most])}\n[cut: {most} of {len(ids)} tokens]"

    def check(self, role: str, *, rewriting: bool = False) -> None:
        """Refuse a template that leaves out answers of tools, or rewrites earlier turns; see `check_history`.

        Raises:
            DataError: names what is rewritten.
        """
        who = f"the chat template of {getattr(self.tokenizer, 'name_or_path', 'the tokenizer')}"
        check_history(lambda messages: self.text(messages, who), role, who, allowed=rewriting,
                      allow="--tools.allow-rewriting-template")
