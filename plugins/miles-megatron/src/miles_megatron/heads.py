"""Heads of attention that differ from layer to layer, as plans count them. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from miles_core.config.architecture import Architecture, architecture_of, shape_json
from miles_core.config.tables import RunConfig


@dataclass(frozen=True)
class Heads:
    """Those of some layers with attention that is not linear.

    Args:
        layers: how many they are.
        head_dim, groups: channels of a head, and key-value heads.
        made: 2 where keys and values have a projection each, 1 where keys are values, 0 where both are a lower layer's.
    """

    layers: int
    head_dim: int
    groups: int
    made: int = 2


@dataclass(frozen=True)
class OfLayers(Architecture):
    """An architecture whose layers have several kinds of heads.

    Args:
        wide: layers with a dense MLP of twice the width.
        embedded: channels that the table of further embeddings has for a layer.
    """

    kinds: tuple[Heads, ...] = ()
    wide: int = 0
    embedded: int = 0

    @property
    def attention(self) -> int:
        """See Architecture."""
        return sum(one.layers * self.heads * one.head_dim for one in self.kinds)

    @property
    def fewest(self) -> int:
        """Key-value heads of the layers that have fewest."""
        return min(one.groups for one in self.kinds)


def sizes_of(config: RunConfig) -> Architecture:
    """`architecture_of`, with the heads of each layer where config.json has several kinds."""
    size, hf_config = architecture_of(config), shape_json(config)[1] or {}
    if size.uncounted or not (counted := _counted(hf_config, size)):
        return size
    kinds = tuple(Heads(layers, *one) for one, layers in counted.items())
    wide = hf_config.get("num_kv_shared_layers") or 0 if hf_config.get("use_double_wide_mlp") else 0
    return OfLayers(**vars(size), kinds=kinds, wide=wide, embedded=hf_config.get("hidden_size_per_layer_input") or 0)


def mean_ffn(size: Architecture) -> float:
    """Inner width of the average dense MLP."""
    return (size.ffn or 0) * (1 + (size.wide / size.layers if isinstance(size, OfLayers) else 0))


def embedded(size: Architecture) -> int:
    """Channels that the table of further embeddings has for a layer; 0 where there is none."""
    return size.embedded if isinstance(size, OfLayers) else 0


def heads_of(size: Architecture) -> tuple[Heads, ...]:
    """Of all layers with attention that is not linear."""
    return size.kinds if isinstance(size, OfLayers) else (Heads(size.full, size.head_dim, size.groups),)


def _counted(hf_config: Mapping[str, object], size: Architecture) -> Counter[tuple[int, int, int]]:
    """How many layers have which heads, of the releases' keys and of those that transformers writes (per_layer_config);
    empty where all have the same."""
    types = hf_config.get("layer_types")
    if not isinstance(types, list) or not {"per_layer_config", "global_head_dim"} & hf_config.keys():
        return Counter()
    shared, own = bool(hf_config.get("attention_k_eq_v")), hf_config.get("per_layer_config") or {}
    wide = {"head_dim": hf_config.get("global_head_dim") or size.head_dim}
    if shared and hf_config.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = hf_config["num_global_key_value_heads"]
    upper = size.layers - (hf_config.get("num_kv_shared_layers") or 0)
    counted: Counter[tuple[int, int, int]] = Counter()
    for number, kind in enumerate(types[:size.layers]):
        full = kind == "full_attention"
        one = own.get(str(number), {}) if own else wide if full else {}
        counted[one.get("head_dim", size.head_dim), one.get("num_key_value_heads", size.groups),
                0 if number >= upper else 1 if shared and full else 2] += 1
    return counted
