"""Modules that functions of Miles and slime import, where neither is installed: the names that make sense here.

`from miles.utils.types import Sample` stands at the head of nearly every such file. These modules exist in a process in
which a function is named by path, under `miles` and under `slime`; a package of that name that is installed wins.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import cast

from miles_compat.generation import GenerateFnInput, GenerateFnOutput, GenerateState, post
from miles_compat.sample import Sample


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained on, and the word under which it is counted otherwise."""

    keep: bool
    reason: str | None = None


def check_reward_nonzero_std(args: object, samples: Sequence[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ."""
    from statistics import pstdev

    rewards = [float(cast("float", sample.reward)) for sample in samples]
    keep = pstdev(rewards) > 1e-8
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_no_aborted(args: object, samples: Sequence[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Keeps groups that were finished, as no other gets here."""
    keep = all(sample.status != Sample.Status.ABORTED for sample in samples)
    return DynamicFilterOutput(keep, None if keep else "aborted")


class DataSource:
    """Base class of data sources; only get_samples(num_samples) is ever called."""


NAMES = MappingProxyType({
    "utils.types": (Sample,),
    "utils.http_utils": (post,),
    "rollout.base_types": (GenerateFnInput, GenerateFnOutput),
    "rollout.data_source": (DataSource,),
    "rollout.sglang_rollout": (GenerateState,),
    "rollout.inference_rollout.inference_rollout_common": (GenerateState,),
    "rollout.filter_hub.base_types": (DynamicFilterOutput,),
    "rollout.filter_hub.dynamic_sampling_filters": (check_reward_nonzero_std, check_no_aborted, DynamicFilterOutput),
})
"""Module below `miles` and `slime` -> what can be imported from it."""


def provide() -> None:
    """Have these modules for whatever is imported from now on."""
    for package in ("miles", "slime"):
        if package in sys.modules or _installed(package):
            continue
        for name, members in NAMES.items():
            parts = [package, *name.split(".")]
            for end in range(1, len(parts) + 1):
                _module(parts[:end])
            for member in members:
                setattr(sys.modules[".".join(parts)], cast("type", member).__name__, member)


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name without __init__.py is no package


def _module(parts: Sequence[str]) -> None:
    name = ".".join(parts)
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name, "What plugin compat has of this module of Miles.")
        module.__path__ = []
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
