"""Muon's arithmetic, for every trainer: a matrix moves along its momentum made orthogonal (arXiv:2502.16982)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

QUINTIC = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
           (2.8366, -3.0525, 1.2012))
"""a, b, c of a s + b s^3 + c s^5, by which each step moves singular values towards 1: those of Megatron-LM's Muon."""
MOMENTUM = "momentum_buffer"
"""A matrix's state in an optimizer, as torch's and Megatron-LM's Muon call it."""


def orthogonalized(matrices: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """U p(S) V^T of matrices U S V^T, with p(S) around 1, by steps of Newton and Schulz.

    Args:
        matrices: [rows, columns], or a stack of them.
        dtype: of the products, and of what is returned.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = (matrices.mT if tall else matrices)[(None,) * (3 - matrices.ndim)].float()
    wide = (wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for a, b, c in itertools.islice(itertools.cycle(QUINTIC), steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if tall else wide).reshape(matrices.shape)


@dataclass(frozen=True, slots=True)
class Steps:
    """How Muon moves a matrix; names and meanings are those of Megatron-LM's --muon-*.

    Args:
        momentum: its decay. use_nesterov: what is orthogonalized is what the next momentum would be.
        scale_mode: an orthogonal matrix is multiplied by the root of its larger size ("spectral"), of outputs / inputs
            ("unit_rms_norm"), or of the latter, at least 1 ("shape_scaling"); and by extra_scale_factor.
        fp32_matmul_prec: of products: "medium" is bfloat16, "high" TF32 where the GPU has it, "highest" float32.
    """

    momentum: float
    use_nesterov: bool
    num_ns_steps: int
    scale_mode: str
    extra_scale_factor: float
    fp32_matmul_prec: str

    @classmethod
    def of(cls, options: object) -> Steps:
        """From options that have these names, each after `muon_`."""
        return cls(**{one.name: getattr(options, f"muon_{one.name}") for one in fields(cls)})

    def ahead(self, momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What is to be orthogonalized, once the momentum has seen the gradient (in place); of one shape, any."""
        momentum.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum) if self.use_nesterov else momentum

    def orthogonalized(self, matrices: torch.Tensor) -> torch.Tensor:
        """Of [rows, columns], or a stack of them, in bfloat16 or float32."""
        dtype = torch.bfloat16 if self.fp32_matmul_prec == "medium" else torch.float32
        return orthogonalized(matrices, self.num_ns_steps, dtype)

    def scale(self, outputs: int, inputs: int) -> float:
        """What the orthogonal matrix of a layer is multiplied by, beside the learning rate."""
        ratio = {"spectral": max(outputs, inputs), "unit_rms_norm": outputs / inputs,
                 "shape_scaling": max(1.0, outputs / inputs)}[self.scale_mode]
        return self.extra_scale_factor * math.sqrt(ratio)

    @contextmanager
    def products(self) -> Iterator[None]:
        """Inside, torch multiplies in the precision that is asked for."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.fp32_matmul_prec)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
