"""A row becomes the sample that a perfect engine would have answered with: its tokens, and a mask of what is trained.

    loss = -log p(token | the tokens before it)    over the tokens of the answer, the end token included

Behaviour cloning in the words of policy gradients: advantages of 1, and log-probs of the "sampler" that are all 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.errors import ConfigError, DataError
from miles_core.reading import parse_json
from miles_core.types import Prompt, Sample, Status
from miles_sft.conversation import EncodedConversation, encode, render, special_tokens, within_tag

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_sft.plugin import SftOptions


def load_tokenizer(config: RunConfig) -> Any:
    """The run's tokenizer, with the run's chat template.

    Raises:
        ConfigError: no --hf-checkpoint.
        DataError: the tokenizer does not keep apart what is tokenised apart.
    """
    from miles_core import build

    if config.checkpoint.hf_checkpoint is None:
        raise ConfigError("sft needs a tokenizer", code="sft-tokenizer-missing", who="checkpoint.hf_checkpoint",
                          fix="pass --hf-checkpoint FOLDER")
    tokenizer = build.load_tokenizer(config)
    one = tokenizer("a", add_special_tokens=False)["input_ids"]
    if tokenizer.decode([*one, *one]).strip() != "aa":
        raise DataError("the tokenizer writes a space before every text, so prompt and answer cannot be joined",
                        code="sft-tokenizer-adds-space", who=config.checkpoint.hf_checkpoint,
                        fix="use one without a dummy prefix: byte-level BPE")
    return tokenizer


def to_sample(prompt: Prompt, tokenizer: Any, options: SftOptions, config: RunConfig, version: int) -> Sample:
    """The one sample of a row.

    A conversation whose last message is the assistant's is its own answer. Any other prompt keeps the token ids it came
    with and is followed by metadata[sft_response_key], else by the label.

    Args:
        version: the engine's weight version, which the sample's tokens are stamped with.

    Raises:
        DataError: no answer, nothing to train on, or a conversation that cannot be cut into encoded.
    """
    where = f"{prompt.stream} row {prompt.row}"
    arguments, tools = config.rollout.apply_chat_template_kwargs or {}, _tools(prompt, options.sft_tools_key, where)
    if tools:
        arguments = {**arguments, "tools": tools}
    figures = dict[str, float]()
    if prompt.messages and prompt.messages[-1].get("role") == "assistant":
        last_only = options.sft_last_turn_only or options.sft_loss_mask_type == "distill_qwen"
        encoded = encode(tokenizer, prompt.messages, arguments, where, last_only=last_only,
                         alone=options.sft_loss_mask_type == "qwen3", shown=options.sft_loss_mask_type == "qwen3_5")
        figures = _left_out(prompt.messages[-1:] if last_only else prompt.messages, encoded, tokenizer)
    else:
        response, text, before = _response(prompt, options.sft_response_key, where), prompt.text, prompt.token_ids
        if tools and prompt.messages:  # the prompt was rendered without them
            text = render(tokenizer, prompt.messages, arguments, where, opening=True)
            before = tokenizer(text, add_special_tokens=False)["input_ids"]
        if prompt.messages and response:  # a tag of the template's opening; one at the end of a text is the row's own
            question = render(tokenizer, prompt.messages, arguments, where, opening=False)
            response = within_tag(text.removeprefix(question), response)
        ids = list(tokenizer(response, add_special_tokens=False)["input_ids"])
        encoded = EncodedConversation([*before, *ids], [0] * len(before) + [1] * len(ids))
    _close(encoded, tokenizer, options.sft_append_eos)
    status = Status.COMPLETED
    limit = config.rollout.rollout_max_context_len
    if limit is not None and len(encoded.ids) > limit:
        encoded, status = EncodedConversation(encoded.ids[:limit], encoded.mask[:limit]), Status.TRUNCATED
    if 1 not in encoded.mask:
        raise DataError("nothing of the row is left to train on", code="sft-row-all-masked", who=where,
                        got=f"{len(encoded.ids)} tokens",
                        fix="check that the answer is not empty, and --rollout-max-context-len")
    start = encoded.mask.index(1)
    if start == 0:
        raise DataError("no tokens precede the answer, so its first token cannot be predicted", who=where,
                        fix="give the row a prompt", code="sft-answer-without-prompt")
    return _sample(prompt, encoded, start, status, version, tokenizer, figures)


def _left_out(messages: Sequence[Mapping[str, Any]], encoded: EncodedConversation, tokenizer: Any) -> dict[str, float]:
    """Of the answers among messages that have `reasoning_content`, and of those that have `tool_calls`, the share whose
    text is not trained on: a template that knows no such key leaves it out without a word, and Llama 3's what is said
    beside a call. Nothing where no answer has any."""
    answers = [message for message in messages if message.get("role") == "assistant"]
    parts = {"reasoning_left_out": [[one["reasoning_content"]] for one in answers if one.get("reasoning_content")],
             "calls_left_out": [[*map(_name, one["tool_calls"]), one.get("content")] for one in answers
                                if one.get("tool_calls")]}
    if not any(parts.values()):
        return {}
    trained = [token for token, bit in zip(encoded.ids, encoded.mask, strict=True) if bit]
    text = tokenizer.decode(trained, clean_up_tokenization_spaces=False)
    return {name: sum(any(isinstance(part, str) and part.strip() not in text for part in one) for one in several)
            / len(several) for name, several in parts.items() if several}


def _name(call: object) -> object:
    return (call.get("function") or call).get("name") if isinstance(call, Mapping) else None


def _sample(prompt: Prompt, encoded: EncodedConversation, start: int, status: Status, version: int,
            tokenizer: Any, figures: dict[str, float]) -> Sample:
    length = len(encoded.ids) - start
    return Sample(
        prompt=prompt,
        index=0,
        response_length=length,
        text=tokenizer.decode(encoded.ids[start:]),
        status=status,
        reward=0.0,
        metadata={"figures": figures} if figures else {},
        columns={
            "tokens": np.array(encoded.ids, np.int32),
            "loss_mask": np.array(encoded.mask[start:], np.uint8),
            "rollout_log_probs": np.zeros(length, np.float32),
            "versions": np.full(length, version, np.int32),
        },
    )


def _response(prompt: Prompt, key: str, where: str) -> str:
    response = prompt.metadata.get(key, prompt.label)
    if not isinstance(response, str):
        raise DataError("the row has no answer to train on", code="sft-answer-missing", who=where,
                        got=f"no text under {key!r} and no label" if response is None else type(response).__name__,
                        fix="name its key with --sft.sft-response-key or --label-key, or end the conversation with it")
    return response


def _tools(prompt: Prompt, key: str, where: str) -> list[object]:
    """The schemas of tools that a row's conversation may call: a list of objects, or its JSON."""
    tools = prompt.metadata.get(key)
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise DataError("the row's tools are not JSON", code="sft-tools-not-json", got=str(error), who=where,
                            fix="correct the row, or name another key with --sft.sft-tools-key") from None
    return tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else []


def _close(encoded: EncodedConversation, tokenizer: Any, append_eos: bool) -> None:
    """Cut what follows the last trained token, and end the answer with eos unless a special token ends it already."""
    if 1 not in encoded.mask:
        return
    stop = len(encoded.mask) - encoded.mask[::-1].index(1)
    special = set(special_tokens(tokenizer).values())
    following = encoded.ids[stop] if stop < len(encoded.ids) else None
    del encoded.ids[stop:], encoded.mask[stop:]
    if not append_eos or encoded.ids[-1] in special:
        return
    end = following if following in special else tokenizer.eos_token_id
    if end is not None:
        encoded.ids.append(end)
        encoded.mask.append(1)
