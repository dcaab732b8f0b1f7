"""FP8 once more, in numpy and from the formats' definitions alone: what the tests hold the plugin against."""

import numpy as np


def value(byte: int, exponent_bits: int, mantissa_bits: int, finite: bool) -> float:
    """What a byte of E4M3 (finite: S.1111.111 alone is no number) or E5M2 (as IEEE has it) stands for."""
    sign = -1.0 if byte >> 7 else 1.0
    exponent, mantissa = (byte >> mantissa_bits) & (2**exponent_bits - 1), byte & (2**mantissa_bits - 1)
    bias, top = 2 ** (exponent_bits - 1) - 1, exponent == 2**exponent_bits - 1
    if top and (mantissa == 2**mantissa_bits - 1 if finite else True):
        return sign * np.inf if not finite and mantissa == 0 else np.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


E4M3 = np.array([value(byte, 4, 3, True) for byte in range(256)])
E5M2 = np.array([value(byte, 5, 2, False) for byte in range(256)])


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Each number as the nearest one of the format, of two the one with the even mantissa."""
    positive = table[:128][np.isfinite(table[:128])]  # in order, as their bytes are
    size = np.minimum(np.abs(x), positive[-1])
    above = np.clip(np.searchsorted(positive, size), 1, len(positive) - 1)
    low, high = positive[above - 1], positive[above]
    even_above = above % 2 == 0
    up = (size - low > high - size) | ((size - low == high - size) & even_above)
    return np.copysign(np.where(up, high, low), x)


def scales(x: np.ndarray, rows: int | None, columns: int | None, powers: bool, table: np.ndarray = E4M3) -> np.ndarray:
    """One per tile, tile after tile."""
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    most = np.nanmax(table[np.isfinite(table)])
    found = np.ones((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(*found.shape):
        amax = np.abs(x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max().astype(np.float32)
        if amax and (scale := np.float32(amax / np.float32(most))):
            found[i, j] = 2.0 ** max(-126, np.ceil(np.log2(np.float64(scale)))) if powers else scale
    return found


def spread(scale: np.ndarray, shape: tuple[int, int], rows: int | None, columns: int | None) -> np.ndarray:
    """A scale for each element."""
    rows, columns = rows or shape[0], columns or shape[1]
    return np.repeat(np.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]


def rounded(x: np.ndarray, rows: int | None, columns: int | None, powers: bool = False,
            table: np.ndarray = E4M3) -> np.ndarray:
    """As FP8 holds it, float32."""
    each = spread(scales(x, rows, columns, powers, table), x.shape, rows, columns)
    return (nearest((x / each).astype(np.float32), table) * each).astype(np.float32)
