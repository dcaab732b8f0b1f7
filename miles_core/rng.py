"""Keyed random draws: every draw is a function of its key, never of a global generator or of what came before."""

from __future__ import annotations

import hashlib


def key(seed: int, stream: str, *where: int) -> int:
    """A 64-bit key for (run seed, stream, prompt, sample, turn, ...).

    Args:
        stream: what the draws are for, such as "train" or "eval/gsm8k"; streams never share draws.
        where: any integers that name the draw's place.
    """
    text = "\x1f".join([str(seed), stream, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
