"""What a chat template makes of demonstrations and of tools: where answers begin and end, and how calls are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from os.path import commonprefix

from miles_core.backends.megatron.hf_files import SPECIAL
from miles_core.backends.megatron.hf_template import ChatTemplate, Tokenizer, read, stops_of, token_text
from miles_core.config.tables import RunConfig
from miles_core.errors import DataError

_MARK = re.compile("<\\|[^<>|\\s]+\\|>|</s>|<(?:end_of_turn|eos|eot)>|<\uff5c[^<>\uff5c]+\uff5c>|\\[/INST\\]")
"""How special tokens look."""
_FLAGGED = re.compile(SPECIAL.encode() + rb'[^{}]*"special":\s*true')
TOOL = {"name": "find", "description": "Find.", "parameters": {"type": "object", "properties": {}, "required": []}}
FIRST = 8  # rows that are looked at


class Demonstrations:
    """Rows whose own answers are learned.

    Args:
        last_only: of a conversation the last answer alone.
        closes: an answer that no special token ends is ended with the tokenizer's end of a sequence.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, last_only: bool, closes: bool):
        (folder, raw, self._ids), self._rollout = tokenizer, config.rollout
        self._last_only, self._template = last_only, ChatTemplate(config)
        said = {**read(folder / "special_tokens_map.json"), **read(folder / "tokenizer_config.json")}
        end = token_text(said.get("eos_token"))
        fast = said.pop("tokenizer_class", None) in ("PreTrainedTokenizerFast", "TokenizersBackend")
        said.pop("chat_template", None)
        self._stops = stops_of(folder) or {number for token, number in self._ids.items() if token == end}
        self._end, self._endless = end if closes else None, bool(self._ids) and not config.rollout.rollout_stop and (
            fast and end is None or not closes)  # other classes of tokenizers have an end of their own
        self._known = (raw, str(said).encode())
        listed = [one for value in said.values() for one in (value if isinstance(value, list) else [value])]
        flagged = {json.loads(one) for _, one in _FLAGGED.findall(raw, 0, max(raw.find(b'"normalizer"'), 0))}
        self._special = sorted(({token_text(one) for one in listed} | flagged) & {*self._ids}, key=len, reverse=True)

    def check(self, rows: Sequence[tuple[str, str | list[dict], object]]) -> None:
        """
        Args:
            rows: (where, text or chat messages, their answer where no message is).

        Raises:
            DataError: the template does not show where answers begin, or lets them end where no model would stop.
        """
        for where, prompt, answer in rows[:FIRST]:
            if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
                self._ends("", str(answer), where)
            elif self._template.text is not None:
                whole = self._shown(prompt, where, False)
                self._begins(prompt, whole, where)
                self._ends(str(prompt[-1].get("content") or "").rpartition("</think>")[2].strip(), whole, where)

    def _shown(self, messages: list[dict], where: str, opened: bool) -> str:
        return self._template.render(messages, where, add_generation_prompt=opened)

    def _begins(self, messages: list[dict], whole: str, where: str) -> None:
        last, user = len(messages) - 1, {"role": "user", "content": "."}
        other = whole if messages[last].get("tool_calls") else self._shown([*messages, user], where, False)
        rest = whole[len(commonprefix([whole, other])):].strip()
        if rest and self._shown(messages[:last], where, True).rstrip().endswith(rest):
            raise DataError("the chat template opens a further answer behind every conversation, asked for or not",
                            got=repr(whole[-40:]), who=where, fix="write the opening within {% if add_generation_prompt"
                            " %} ... {% endif %}, or name another template with --chat-template-path")
        first = last if self._last_only else [message["role"] for message in messages].index("assistant")
        for i in () if re.search(r"\{%-?\s*generation\s*-?%\}", str(self._template.text)) else {first, last}:
            for other in (self._shown(messages[:i], where, True), self._shown(messages[:i + 1], where, False)):
                if not whole.startswith(other):
                    same = len(commonprefix([whole, other]))
                    raise DataError(f"the chat template does not show where the answer of message {i} is: alone it is "
                                    "rendered differently", who=where, got=f"{other[same:][:30]!r}, and in the whole "
                                    f"{whole[same:][:30]!r}", fix="begin answers as the template opens them, train "
                                    "on the last answer alone, or name a template that only appends")

    def _ends(self, said: str, whole: str, where: str) -> None:
        """`said` is what the answer says; what stands behind it ends it."""
        tail = whole[whole.rfind(said) + len(said):] if said and said in whole else whole[-80:]
        tokens = re.findall("|".join(map(re.escape, self._special)) or "(?!)", tail)
        if any(stop in tail for stop in self._rollout.rollout_stop):
            return
        if tokens and tail.rpartition(tokens[-1])[2].strip():
            tokens = []
        mark = _MARK.search(tail) if said in whole and said and self._ids else None
        if not tokens and mark and not any(mark[0].encode() in one for one in self._known):
            raise DataError("the chat template ends answers with what is no token of the tokenizer: it is another "
                            "model's", got=mark[0], who=where, fix="name the model's own with --chat-template-path, or "
                            f"say that the text is meant with --rollout-stop '{mark[0]}'")
        if not tokens and self._endless:
            raise DataError("nothing ends the demonstrations, so that the model never learns to end", who=where,
                            fix="let the tokenizer's eos_token be appended, or name a template that ends answers")
        ends = {one: self._ids[one] for one in tokens or [str(self._end)] if one in self._ids}
        if ends and self._stops and not {*ends.values()} & {*self._stops, *self._rollout.rollout_stop_token_ids}:
            token, number = list(ends.items())[-1]
            raise DataError("the model learns to end with a token at which its exports do not stop", who=where,
                            got=f"{token} is {number}, and the end of a sequence {', '.join(map(str, self._stops))}",
                            fix=f"add {number} to eos_token_id of generation_config.json, or say that it is meant with "
                            f"--rollout-stop-token-ids {number}")


def how_called(config: RunConfig) -> dict[str, str]:
    """What the chat template says of tools: "asks", what it tells the model, and "text", itself; none if it is deaf.
    "opens" is a tag that it has every answer begin with, if it writes one."""
    template = ChatTemplate(config)
    plain, asks = (template.render([{"role": "user", "content": "."}], "the chat template, given a tool", tools=tools)
                   if config.rollout.apply_chat_template and template.text is not None else ""
                   for tools in (None, [{"type": "function", "function": TOOL}]))
    begun = re.search(r"<\w+>\s*$", plain)
    found = {"opens": begun[0].strip()} if begun else {}
    return found if plain == asks else found | {"asks": asks, "text": str(template.text)}
