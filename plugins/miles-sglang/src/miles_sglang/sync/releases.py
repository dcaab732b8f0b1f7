"""What SGLang's releases take from a weight sync in different words: all of that is here.

A server says which release it is in /server_info. It ignores fields that it does not know, so what is short is said in
the words of all. tests/sync/releases.json has the words of each release as its sources declare them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OLDEST = (0, 5, 16)
"""Of a server that does not say."""


def release(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Of /server_info's answer: (0, 5, 21) of "0.5.21.post1"."""
    return tuple(map(int, re.findall(r"\d+", str(info.get("version", "")))[:3])) or OLDEST


def takes_sessions(info: Mapping[str, Any]) -> bool:
    """Whether tensors are taken only between begin_weight_update and end_weight_update."""
    return release(info) >= (0, 5, 21)


def draft_fields(draft: bool) -> dict[str, object]:
    """Fields of update_weights_from_tensor that have the model loaded, and its draft or not."""
    return {"disable_draft_model": not draft, "selector": "all" if draft else "target"}  # until 0.5.20, and since


def adapter_fields(info: Mapping[str, Any], packed: str, ranks: int) -> dict[str, object]:
    """Fields of load_lora_adapter_from_tensors that hold the tensors, for this many tensor-parallel ranks."""
    if release(info) >= (0, 5, 17):
        return {"serialized_named_tensors": [packed] * ranks}
    return {"serialized_tensors": packed}
