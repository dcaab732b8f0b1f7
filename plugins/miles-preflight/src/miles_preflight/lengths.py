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
    context, source = _context(config)
    if config.debug.load_debug_rollout_data:
        return
    for lengths, least, keys in _lengths(config):
        stated = {key: length for key, length in zip(keys, lengths, strict=True)
                  if length is not None and (key in config.origin or key == "eval.datasets")}
        if context is not None and stated and sum(stated.values()) + (len(stated) == 1) > context:
            raise ConfigError("the longest prompt and the longest answer do not fit the context together",
                              got=f"{' + '.join(map(str, stated.values()))} of {context}, {source}",
                              who=who(config, *stated), fix=f"make their sum at most {context}",
                              code="lengths-exceed-context")
        if not 0 <= least <= (lengths[1] or least):
            raise ConfigError("an answer should have at least min_new_tokens tokens, and at most max_response_len",
                              got=f"{least} and {lengths[1]}", who=who(config, keys[1]),
                              fix="lower the first, or raise the second", code="response-length-range-empty")


def _context(config: RunConfig) -> tuple[int | None, str]:
    """Tokens that prompt and answer may have together, and who says so."""
    path, constants = config_json(config)
    own, made = config.rollout.rollout_max_context_len, (constants or {}).get("max_position_embeddings")
    if own is not None:
        return own, who(config, "rollout.rollout_max_context_len")
    # What overrides the model's own the servers are told too.
    longest = max(made, config.surface("server").get("context_length") or 0) if isinstance(made, int) else None
    return longest or None, f"max_position_embeddings of {path}"


def _lengths(config: RunConfig) -> Iterator[tuple[tuple[int | None, int | None], int, tuple[str, str]]]:
    """((longest prompt, longest answer), fewest tokens, their keys) of training and of each evaluation."""
    rollout, eval_ = config.rollout, config.eval
    prompt, answer = rollout.rollout_max_prompt_len, rollout.rollout_max_response_len
    keys = ("rollout.rollout_max_prompt_len", "rollout.rollout_max_response_len")
    yield (prompt, answer), rollout.rollout_min_new_tokens, keys
    if eval_.eval_max_prompt_len:
        prompt, keys = eval_.eval_max_prompt_len, ("eval.eval_max_prompt_len", keys[1])
    if eval_.eval_max_response_len is not None:
        answer, keys = eval_.eval_max_response_len, (keys[0], "eval.eval_max_response_len")
    least = rollout.rollout_min_new_tokens if eval_.eval_min_new_tokens is None else eval_.eval_min_new_tokens
    for dataset in config.eval.every:
        own = dataset.get("max_response_len")
        yield (prompt, own or answer), least, (keys[0], "eval.datasets" if own else keys[1])
