"""Options of Megatron-core that the run sets and that nothing here reads: a run names them instead of ignoring them.

Which fields are read depends on the layers, the layout and the other options, and changes with every release. So reads
of Megatron-core's configurations are noted while the models are made and through the first step.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from miles_megatron import cpu
from miles_megatron.flags import megatron_lm_defaults
from miles_megatron.layout import KEYS
from miles_megatron.surface import surface

cpu.install()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402 - after install()
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

KINDS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
NAMES = frozenset(field.name for kind in KINDS for field in dataclasses.fields(kind))
_OF_A_DATACLASS = ("<string>", dataclasses.__file__)
"""Where the code of __eq__ and __repr__ is, which look at all fields."""

NEEDS = {"moe_": "num_moe_experts", "moe_shared_expert_": "moe_shared_expert_intermediate_size",
         "moe_router_num_groups": "moe_router_group_topk"}
"""Beginnings of fields that act where another is set, and only there; they are read before that one is."""

_read: set[str] = set()


def _noting(config: object, name: str) -> object:
    if name in NAMES and name not in _read:
        code = sys._getframe(1).f_code
        if code.co_name != "__post_init__" and code.co_filename not in _OF_A_DATACLASS:
            _read.add(name)
    return object.__getattribute__(config, name)


def begin() -> None:
    """Note reads from now on, in this process."""
    _read.clear()
    for kind in KINDS:
        kind.__getattribute__ = _noting


def end() -> frozenset[str]:
    """Note no more; the fields that were read, other than to validate a configuration."""
    for kind in KINDS:
        if "__getattribute__" in vars(kind):
            del kind.__getattribute__
    return frozenset(_read)


def unread(options: Mapping[str, object], read: frozenset[str], settings: TransformerConfig) -> list[str]:
    """The options among `options` that say something else than the default and were not read, or are idle.

    Sizes of the layout are left out: groups of ranks are made of them before there is a configuration.
    """
    defaults = megatron_lm_defaults()
    read -= {name for name in options if idle(name, settings)}
    return [name for name, value in options.items() if name in NAMES - read - {*KEYS.values(), "sequence_parallel"}
            and value != defaults.get(name, surface()[name].default)]


def idle(name: str, settings: TransformerConfig) -> bool:
    """Whether a field, read or not, acts only beside another that is not set."""
    return any(name.startswith(begin) and not getattr(settings, needed) for begin, needed in NEEDS.items())


def shapes(with_it: TransformerConfig, without: TransformerConfig, name: str) -> bool:
    """Whether a field of the first decides another field, as Megatron-core works some out when it validates."""
    names = (field.name for field in dataclasses.fields(with_it) if field.name != name)
    return any(repr(getattr(with_it, other)) != repr(getattr(without, other)) for other in names)
