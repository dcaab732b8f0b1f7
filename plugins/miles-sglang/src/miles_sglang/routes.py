"""Routes, the experts of each token, in an answer of /generate: base64 of int32, and nearly all of its bytes.

They are decoded and narrowed while the answer arrives, so that neither its text nor their int32 is ever a whole. A
server that Miles starts has narrowed them itself (server_extension/routes).
"""

from __future__ import annotations

import numpy as np
import pybase64

BEGIN = b'"routed_experts":"'
"""How routes begin in an answer; a text that holds these characters has backslashes between them."""
SMALL, LARGE = np.iinfo(np.uint8), np.iinfo(np.int16)
NARROW = {-1 - dtype.itemsize: dtype for dtype in (SMALL.dtype, LARGE.dtype)}
"""The first int32 of routes that a server has narrowed -> what follows it."""
_WHOLE = 16
"""Characters of base64 that are a whole number of int32, and of what is narrower."""


class Body:
    """The bytes of an answer as they arrive: `rest`, its JSON with an empty text of routes, and `routes`."""

    def __init__(self) -> None:
        self.rest = bytearray()
        self._inside = self._over = False
        self._left, self._parts, self._dtype = b"", list[np.ndarray](), None

    @property
    def routes(self) -> np.ndarray | None:
        """[rows x layers x topk] uint8 or int16, flat; None where the answer has none, or says so otherwise."""
        return np.concatenate(self._parts) if self._over and self._parts else None

    def feed(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            ValueError: routes that are none.
        """
        if not self._inside:
            searched = len(self.rest)
            self.rest += data
            if self._over or (begin := self.rest.find(BEGIN, max(0, searched - len(BEGIN)))) < 0:
                return
            begin += len(BEGIN)
            data, self._inside = bytes(self.rest[begin:]), True
            del self.rest[begin:]
        end = data.find(b'"')
        self._decode(data if end < 0 else data[:end], end >= 0)
        if end >= 0:
            self._inside, self._over = False, True
            self.rest += data[end:]

    def _decode(self, text: bytes, last: bool) -> None:
        text = self._left + text
        whole = len(text) if last else len(text) - len(text) % _WHOLE
        if whole:
            data = memoryview(pybase64.b64decode(memoryview(text)[:whole], validate=True))
            if self._dtype is None:
                self._dtype, data = _begun(data)
            self._parts.append(_narrowed(np.frombuffer(data, self._dtype)))
        self._left = text[whole:]


def decoded(text: str) -> np.ndarray:
    """Routes from their base64, as uint8, or where that is too small, or -1 says that there are none, as int16.

    Raises:
        ValueError: it is no base64, or no numbers of experts.
    """
    dtype, data = _begun(memoryview(pybase64.b64decode(text, validate=True)))
    return _narrowed(np.frombuffer(data, dtype))


def _begun(data: memoryview) -> tuple[np.dtype, memoryview]:
    """How numbers are written, and those of them that are here."""
    dtype = NARROW.get(int.from_bytes(data[:4], "little", signed=True))
    return (np.dtype(np.int32), data) if dtype is None else (dtype, data[4:])


def _narrowed(experts: np.ndarray) -> np.ndarray:
    if not experts.size or experts.dtype == SMALL.dtype:
        return experts.astype(SMALL.dtype, copy=False)
    if experts.dtype == np.int32 and experts.view(np.uint32).max() <= SMALL.max:  # a negative one is larger than others
        return experts.astype(SMALL.dtype)
    if experts.min() < -1 or experts.max() >= LARGE.max:
        raise ValueError(f"experts {experts.min()} to {experts.max()} are no numbers of experts")
    return experts.astype(LARGE.dtype, copy=False)
