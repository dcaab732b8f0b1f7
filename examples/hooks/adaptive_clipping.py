"""Adaptive gradient clipping: a parameter's gradient is bounded by a share of the parameter (arXiv:2102.06171).

The norms are those of whole parameters, whatever ranks hold their pieces; the paper's are those of single units.
"""

from dataclasses import dataclass

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class ClippingOptions:
    """The bound."""

    share: float = option(0.01, "Largest norm of a gradient over the norm of its parameter.")
    floor: float = option(1e-3, "Smallest norm of a parameter that counts, so that zeros can learn.")


class AdaptiveClipping:
    """Chosen by --clip-gradients adaptive; reports the global norm before clipping."""

    name = "adaptive-clipping"

    def __init__(self, options: ClippingOptions):
        self.options = options

    @hookimpl("clip_gradients", name="adaptive")
    def clip(self, gradients):
        squares = {}
        for piece in gradients.pieces:
            for kind, tensor in (("gradient", piece.grad), ("weight", piece.weight)):
                mine = float(tensor.double().square().sum()) if piece.counts else 0.0
                squares[kind, piece.name] = squares.get((kind, piece.name), 0.0) + mine
        squares = gradients.sums(squares)
        for piece in gradients.pieces:
            most = self.options.share * max(squares["weight", piece.name] ** 0.5, self.options.floor)
            norm = squares["gradient", piece.name] ** 0.5
            if norm > most:
                piece.grad.mul_(most / norm)
        return sum(square for (kind, _), square in squares.items() if kind == "gradient") ** 0.5
