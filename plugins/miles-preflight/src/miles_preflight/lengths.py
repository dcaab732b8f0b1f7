"""Prompt, answer and context: lengths that leave no room for each other."""

from __future__ import annotations

from collections.abc import Iterator

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError


def check_lengths(config: RunConfig) -> None:
    """Defaults yield to the context, so only what somebody said is held against it.

    Raises:
        ConfigError: names both lengths and who set them.
    """
    _least(config)
    if config.debug.debug_train_only:
        return
    context, source = context_of(config)
    if context is None:
        return
    for prompt, answer, keys in _pairs(config):
        set_keys = [key for key in keys if key.partition(".")[2] and (key in config.origin or key == "eval.datasets")]
        lengths = f"context {context}, {source}"
        for key, length in zip(keys, (prompt, answer), strict=True):
            if length is not None and key in set_keys and length >= context:
                other = "an answer" if key is keys[0] else "a prompt"
                raise ConfigError(f"{key.partition('.')[2]} takes the whole context and leaves no room for {other}",
                                  got=f"{length} of {lengths}", who=who(config, key), fix=f"below {context}")
        if prompt is not None and answer is not None and set(keys) <= set(set_keys) and prompt + answer > context:
            raise ConfigError("the longest prompt and the longest answer do not fit the context together",
                              got=f"{prompt} + {answer} = {prompt + answer}, {lengths}", who=who(config, *keys),
                              fix=f"make their sum at most {context}, or raise the context where the model allows it")


def context_of(config: RunConfig) -> tuple[int | None, str]:
    """Tokens that prompt and answer may have together, and who says so.

    Raises:
        ConfigError: --rollout-max-context-len is beyond what the model was made for, and what the servers are told.
    """
    path, constants = config_json(config)
    made = (constants or {}).get("max_position_embeddings")
    made = made if isinstance(made, int) and made > 0 else None
    override = config.surface("server").get("context_length") or 0
    most = made and max(made, override)  # an override, which the servers are told too
    own, key = config.rollout.rollout_max_context_len, "rollout.rollout_max_context_len"
    if own is not None and most is not None and own > most:
        raise ConfigError("rollout_max_context_len is beyond what the model was made for", got=f"{own} > {most}",
                          who=f"{who(config, key)}, {path}", fix=f"at most {most}")
    return (most, f"max_position_embeddings of {path}") if own is None else (own, who(config, key))


def _pairs(config: RunConfig) -> Iterator[tuple[int | None, int | None, tuple[str, str]]]:
    """(longest prompt, longest answer, their keys) of training and of each evaluation."""
    rollout, eval_ = config.rollout, config.eval
    prompt, answer = "rollout.rollout_max_prompt_len", "rollout.rollout_max_response_len"
    yield rollout.rollout_max_prompt_len, rollout.rollout_max_response_len, (prompt, answer)
    prompt = "eval.eval_max_prompt_len" if eval_.eval_max_prompt_len else prompt
    longest = eval_.eval_max_prompt_len or rollout.rollout_max_prompt_len
    if eval_.eval_prompt_data or eval_.datasets:
        if eval_.eval_max_response_len is not None:
            yield longest, eval_.eval_max_response_len, (prompt, "eval.eval_max_response_len")
        elif eval_.eval_max_prompt_len is not None:
            yield longest, rollout.rollout_max_response_len, (prompt, answer)
    for dataset in eval_.datasets:
        if isinstance(own := dataset.get("max_response_len"), int):
            yield longest, own, (prompt, "eval.datasets")


def _least(config: RunConfig) -> None:
    rollout, eval_ = config.rollout, config.eval
    answer = "rollout.rollout_max_response_len"
    longest = eval_.eval_max_response_len or rollout.rollout_max_response_len
    for least, most, keys in (
        (rollout.rollout_min_new_tokens, rollout.rollout_max_response_len, ("rollout.rollout_min_new_tokens", answer)),
        (eval_.eval_min_new_tokens or 0, longest, ("eval.eval_min_new_tokens", "eval.eval_max_response_len")),
    ):
        if least < 0 or least > most:
            raise ConfigError("an answer should have at least min_new_tokens tokens, and at most max_response_len",
                              got=f"{least} and {most}", who=who(config, *keys), fix="lower the first, or raise the "
                              "second")
