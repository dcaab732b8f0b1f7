"""Attention of which the sizes that all layers share do not say all, as plans count it. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles_core.config.load import shape_json
from miles_core.config.tables import RunConfig
from miles_megatron.architecture import Architecture, architecture_of


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
        embedded: channels that the table of further embeddings has for a layer; words: its rows.
        streams: of the residual.
        shortcut: rank of that beside attention.
    """

    kinds: tuple[Heads, ...] = ()
    wide: int = 0
    embedded: int = 0
    words: int = 0
    streams: int = 1
    shortcut: int = 0

    @property
    def joining(self) -> int:
        """Parameters of a layer that predict and correct streams, and of the shortcut."""
        if self.streams == 1:
            return 0
        return (self.streams + 2 * self.shortcut + 3) * self.hidden + (self.streams + 1) * self.streams**2

    @property
    def attention(self) -> int:
        """See Architecture."""
        return sum(one.layers * self.heads * one.head_dim for one in self.kinds)

    @property
    def fewest(self) -> int:
        """Key-value heads of the layers that have fewest."""
        return min(one.groups for one in self.kinds)


@dataclass(frozen=True)
class Compressed(Architecture):
    """An architecture with compressed keys and several streams, whose attention each tensor-parallel rank has whole.

    Args:
        own: parameters of attention, and of what joins streams, in all layers together.
        streams: of the residual.
        rates: of each layer, how many keys become one; 0 where a query sees a window alone.
    """

    own: int = 0
    streams: int = 1
    rates: tuple[int, ...] = ()

    @property
    def attention(self) -> int:
        """See Architecture; a window is as good as nothing."""
        return int(self.heads * self.head_dim * sum(1 / rate for rate in self.rates if rate))


def sizes_of(config: RunConfig) -> Architecture:
    """`architecture_of`, with the heads of each layer where config.json has several kinds, and compressed keys."""
    size, hf_config = architecture_of(config), shape_json(config)[1] or {}
    if isinstance(widths := hf_config.get("intermediate_size"), list):
        size = replace(size, ffn=sum(widths) // len(widths))
    if not size.uncounted and hf_config.keys() >= _COMPRESSED and hf_config.keys() & {"compress_ratios", "layer_types"}:
        return _compressed(hf_config, size)
    if size.uncounted or not (counted := _counted(hf_config, size)):
        return size
    kinds = tuple(Heads(layers, *one) for one, layers in counted.items())
    wide = hf_config.get("num_kv_shared_layers") or 0 if hf_config.get("use_double_wide_mlp") else 0
    return OfLayers(**vars(size), kinds=kinds, wide=wide, embedded=hf_config.get("hidden_size_per_layer_input") or 0,
                    words=hf_config.get("vocab_size_per_layer_input") or size.vocab,
                    streams=hf_config.get("altup_num_inputs") or 1, shortcut=hf_config.get("laurel_rank") or 0)


def mean_ffn(size: Architecture) -> float:
    """Inner width of the average dense MLP."""
    return (size.ffn or 0) * (1 + (size.wide / size.layers if isinstance(size, OfLayers) else 0))


def embedded(size: Architecture) -> int:
    """Channels that the table of further embeddings has for a layer; 0 where there is none."""
    return size.embedded if isinstance(size, OfLayers) else 0


def streams_of(size: Architecture) -> int:
    """Of the residual."""
    return size.streams if isinstance(size, Compressed | OfLayers) else 1


def heads_of(size: Architecture) -> tuple[Heads, ...]:
    """Of all layers with attention that is not linear."""
    return size.kinds if isinstance(size, OfLayers) else (Heads(size.full, size.head_dim, size.groups),)


_COMPRESSED = {"q_lora_rank", "o_lora_rank", "o_groups", "hc_mult", "index_n_heads", "index_head_dim"}


def _compressed(hf_config: Mapping[str, Any], size: Architecture) -> Compressed:
    """DeepSeek-V4's, by the keys of the release (compress_ratios) and by those that transformers writes."""
    rates = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates |= hf_config.get("compress_rates") or {}
    every = hf_config.get("compress_ratios") or [rates[kind] for kind in hf_config["layer_types"]]
    hidden, wide, rank, streams = size.hidden, size.heads * size.head_dim, size.query_rank, hf_config["hc_mult"]

    def compressor(channels: int, rate: int, parts: int) -> int:
        return parts * channels * (2 * hidden + rate) + channels

    indexed = rates["compressed_sparse_attention"]
    heads, channels = hf_config["index_n_heads"], hf_config["index_head_dim"]
    indexer = compressor(channels, indexed, 2) + heads * (rank * channels + hidden)
    kinds = {0: 0, indexed: compressor(size.head_dim, indexed, 2) + indexer}
    joining = (2 + streams) * streams * (streams * hidden + 1) + 3
    each = (hidden + wide) * rank + (hidden + 1) * size.head_dim + size.heads + 2 * joining
    each += hf_config["o_lora_rank"] * (wide + hf_config["o_groups"] * hidden)
    rates_of_layers = tuple(every[:size.layers])
    own = size.layers * each + streams * (streams * hidden + 1) + 1
    own += sum(kinds.get(rate) or compressor(size.head_dim, rate, 1) for rate in rates_of_layers if rate)
    return Compressed(**vars(size) | {"near": 0}, own=own, streams=streams, rates=rates_of_layers)


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
