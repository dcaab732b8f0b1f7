"""Mamba-2 (Dao and Gu, arXiv:2405.21060): the description of a layer's mixer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_megatron.specs import Attention, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.mixer."


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """Sizes of a Mamba-2 mixer; as `Attention.mixer` it makes the layers' module.

    Args:
        heads, head_dim: how many heads, and channels of one.
        groups: so many heads in turn share what writes to their states and what reads them; each group of channels
            has a norm of its own.
        state: channels of these two, so that a head's state is [state, head_dim].
        kernel: tokens that the convolution sees; bias: whether it has one.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    bias: bool

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels that pass the convolution: inputs of the heads, what writes to states, what reads them."""
        return self.inner, self.groups * self.state, self.groups * self.state

    @property
    def projected(self) -> tuple[int, ...]:
        """What a token's projection has: gates of the output, these three, and the heads' time steps."""
        return self.inner, *self.convolved, self.heads

    def __call__(self, config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
        """See specs.Attention.mixer."""
        from megatron.core.transformer import ModuleSpec

        from miles_specs_nemotron.mixer import MambaMixer

        return ModuleSpec(module=MambaMixer, params={"sizes": self, "column": modules.column, "row": modules.row})

    def rules(self, layers: tuple[int, ...]) -> tuple[Rule, ...]:
        """Of these layers' mixers."""
        names = {"A_log": "A_log", "dt_bias": "dt_bias", "D": "D", "norm_weight": "norm.weight",
                 "out_proj.weight": "out_proj.weight"}
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return (
            Rule(_OURS + "in_proj.weight", (_THEIRS + "in_proj.weight",), "sections", layers, sections=self.projected),
            *(Rule(f"{_OURS}conv_{kind}", (f"{_THEIRS}conv1d.{kind}",), "sections", layers, sections=self.convolved)
              for kind in kinds),
            *(Rule(_OURS + ours, (_THEIRS + theirs,), layers=layers) for ours, theirs in names.items()),
        )
