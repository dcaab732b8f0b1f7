"""torch_dist checkpoints that other programs wrote on Megatron-core: Megatron-LM itself, and Miles's converter.

Their weights are read and nothing else: optimizer state, random states and what Transformer Engine keeps beside its
layers are objects that would have to be unpickled. Names and cuts differ by how the program builds its layers:

    norms                 a layer of their own, or part of the linear layer behind them (Transformer Engine)
    layers                stacked along a first axis, or each under its number
    experts               stacked too, or each under its number with the halves of a gated layer apart
    embedding             with rows up to a multiple of --make-vocab-size-divisible-by
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from miles_local.checkpoint_index import Held

from miles_megatron import cpu

cpu.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, StateDict  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

RELEASE = "release"
"""In place of a number: the tracker's word, and perhaps the folder's name, for weights that were converted."""

_NUMBERED = re.compile(r"decoder\.layers\.\d+\.")
_SINGLE = re.compile(r"\.experts\.\d+\.|\.linear_fc1\.\w+_[wv]$")
_NORMS = (("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
          ("self_attention.linear_qkv.layer_norm_", "input_layernorm."))
_VERSION = b"checkpoint_version"


def wrote(iteration: Path) -> bool:
    """Whether the folder of one iteration is another program's; asked of one that lacks the run's own state.

    Megatron-LM writes a version into every common.pt, which is looked for without reading the pickle.
    """
    common = iteration / "common.pt"
    return common.is_file() and _VERSION in common.read_bytes()


class WithoutCommon(TorchCommonLoadStrategy):
    """Leaves common.pt alone, which holds the arguments of the program that wrote it as objects."""

    def load_common(self, _folder: str | Path) -> StateDict:
        return {}


def metadata(stored: Held) -> dict[str, bool]:
    """What tells Megatron-core to ask for names as they are stored."""
    return {"singleton_local_shards": any(map(_SINGLE.search, stored)),
            "non_homogeneous_layers": any(map(_NUMBERED.match, stored))}


@contextlib.contextmanager
def stacked_as(stored: Held | None, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, layers that are stacked there are stacked here, also of models whose layers may differ."""
    configs = [unwrap_model(chunk).config for chunk in chunks]
    before = [(config.moe_layer_freq, config.linear_attention_freq) for config in configs]
    if stored is not None and not any(map(_NUMBERED.match, stored)):
        for config in configs:
            config.moe_layer_freq, config.linear_attention_freq = 1, None
    try:
        yield
    finally:
        for config, (mixtures, linear) in zip(configs, before, strict=True):
            config.moe_layer_freq, config.linear_attention_freq = mixtures, linear


def rename(sharded: dict, stored: Held) -> None:
    """Ask for norms by the names that they are stored under."""
    for entry in nested_values(sharded):
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            continue
        for one, other in (*_NORMS, *(pair[::-1] for pair in _NORMS)):
            theirs = entry.key.replace(one, other)
            if entry.key not in stored and theirs in stored:
                entry.key = theirs
