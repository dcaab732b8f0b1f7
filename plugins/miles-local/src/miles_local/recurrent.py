"""Layers whose past is a state instead of keys and values: what a module of transformers finds in its cache of them.

A state has taken in every token before, so unlike keys and values it can neither be cut back to a position nor can it
ignore padding: sequences are computed without padding (`by_length`), every token is fed once, and a row begins with the
state after its own context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from miles_local.cache import Prefill

Key = tuple[str, int, int]
"""Kind ("conv" or "recurrent"), layer, and which of the layer's states of that kind."""


class States:
    """The states of the rows of one forward.

    Args:
        states: tensors [rows, ...], of which the first `count` rows are read and written; None to begin with empty
            ones, which `tensors` then holds.
        count: rows that are fed.
    """

    def __init__(self, states: dict[Key, torch.Tensor] | None, count: int):
        self.fresh = states is None
        self.tensors, self._count = {} if states is None else states, count

    def get(self, key: Key) -> torch.Tensor | None:
        """[count, ...] to read and to write in place; None where there is nothing yet."""
        return None if self.fresh else self.tensors[key][: self._count]

    def put(self, key: Key, state: torch.Tensor) -> torch.Tensor:
        """Replace a state [count, ...]; returns what is kept."""
        if self.fresh:
            self.tensors[key] = state.clone()
            return self.tensors[key]
        return self.get(key).copy_(state)

    def push(self, key: Key, new: torch.Tensor, width: int | None) -> torch.Tensor:
        """Append inputs [count, channels, Q] of a convolution that keeps `width`; returns these after what was kept.

        Before the first input come zeros, which are returned where there are fewer inputs than the convolution keeps.
        """
        before = self.get(key)
        width = (width or new.shape[-1]) if before is None else before.shape[-1]
        new = F.pad(new, (max(0, width - new.shape[-1]), 0)) if before is None else torch.cat([before, new], -1)
        self.put(key, new[..., -width:])
        return new


class Recurrent:
    """What transformers' cache does for such layers, over `self.states`: a part of the cache that a module gets."""

    states: States

    def get_conv_state(self, layer_idx, state_idx=0):
        return self.states.get(("conv", layer_idx, state_idx))

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **_):
        return self.states.push(("conv", layer_idx, state_idx), conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx, state_idx=0):
        return self.states.get(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **_):
        return self.states.put(("recurrent", layer_idx, state_idx), recurrent_states)

    def has_previous_state(self, layer_idx=None, state_idx=None):
        return not self.states.fresh

    def is_recording_past(self, layer_idx):
        return False


def by_length(sequences: Sequence[tuple[int, ...]], compute: Callable[[list[tuple[int, ...]]], Prefill]) -> Prefill:
    """A prefill of sequences of any lengths by prefills of equal ones.

    Args:
        compute: a prefill of sequences of one length, without padding.

    Returns:
        Keys, values and routing of the longest one's width, 0 and -1 behind the shorter ones.
    """
    groups: dict[int, list[int]] = {}
    for place, ids in enumerate(sequences):
        groups.setdefault(len(ids), []).append(place)
    parts = [(places, compute([sequences[place] for place in places])) for places in groups.values()]
    if len(parts) == 1:
        return parts[0][1]
    count, width = len(sequences), max(groups)

    def merged(of: Callable[[Prefill], torch.Tensor], axis: int | None = None, fill: float = 0) -> torch.Tensor:
        shape = list(of(parts[0][1]).shape)
        shape[0] = count
        if axis is not None:
            shape[axis] = width
        whole = torch.full(shape, fill, dtype=of(parts[0][1]).dtype, device=of(parts[0][1]).device)
        for places, part in parts:
            values = of(part)
            target = whole if axis is None else whole.narrow(axis, 0, values.shape[axis])
            target[places] = values
        return whole

    first = parts[0][1]
    return Prefill(
        logits=merged(lambda one: one.logits),
        k=[merged(lambda one, i=i: one.k[i], 2) for i in range(len(first.k))],
        v=[merged(lambda one, i=i: one.v[i], 2) for i in range(len(first.v))],
        states={key: merged(lambda one, key=key: one.states[key]) for key in first.states},
        routing=None if first.routing is None else merged(lambda one: one.routing, 1, -1),
    )
