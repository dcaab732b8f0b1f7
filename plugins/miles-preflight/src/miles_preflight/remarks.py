"""What a plan says of data and settings that may be meant, and often are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import cast

from miles_core.config.tables import RunConfig
from miles_preflight.chat_template import Tokenizer, read, token_text

Looked = tuple[str, list[str], bool]
"""Of the beginning of a prompt file: who names it, its prompts as JSON, and whether it has no others."""


def remark(config: RunConfig, files: Sequence[Looked], tokenizer: Tokenizer, note: Callable[[str], None]) -> None:
    """
    Args:
        files: the training prompts, then those of evaluations.
    """
    if config.optimizer.lr == 0 and config.rollout.num_rollout != 0 and not config.debug.debug_rollout_only:
        note("lr 0: no step changes a weight")
    _ends(tokenizer, note)
    (origin, prompts, whole), *evaluations = files
    different = set(prompts)
    batch = cast("int", config.rollout.rollout_batch_size)  # a plan that lacks it is refused
    if len(different) < len(prompts):
        note(f"{len(prompts) - len(different)} of the first {len(prompts)} prompts repeat another one ({origin})")
    if whole and 0 < len(prompts) < batch:
        note(f"{len(prompts)} rows for a rollout_batch_size of {batch}: a rollout repeats prompts ({origin})")
    for origin, eval_prompts, _ in evaluations:
        if common := sum(prompt in different for prompt in eval_prompts):
            note(f"{common} of the first {len(eval_prompts)} evaluation prompts are trained on ({origin})")


def _ends(tokenizer: Tokenizer, note: Callable[[str], None]) -> None:
    folder, _, tokens = tokenizer
    special_tokens = {**read(folder / "special_tokens_map.json"), **read(folder / "tokenizer_config.json")}
    end = token_text(special_tokens.get("eos_token"))
    stops = read(folder / "generation_config.json").get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    if end in tokens and stops != [None] and tokens[end] not in stops:
        note(f"answers end at {end} ({tokens[end]}), which the tokenizer names, and at {json.dumps(stops)[1:-1]}, "
             "which generation_config.json names")
