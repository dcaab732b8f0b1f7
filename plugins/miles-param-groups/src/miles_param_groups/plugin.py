"""The plugin: options and hooks. What a pattern matches is in patterns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_param_groups.patterns import Choice

if TYPE_CHECKING:
    import torch
    from miles_megatron.specs import WeightMap

    from miles_core.plugins.select import Selected

ROUTERS = (r"\.mlp\.(router|gate)\.(weight|bias)$", r"\.block_sparse_moe\.gate\.weight$")
"""The gates of experts: Megatron's names, and those of transformers' modules."""


@dataclass(frozen=True, kw_only=True)
class ParamGroupsOptions:
    """Regular expressions, each looked for anywhere in the names that a parameter has."""

    only_train_params_name_list: list[str] = option(
        [], "Parameters that match one of these train, and no others.", flags=("--only-train-params-name-list",))
    freeze_params_name_list: list[str] = option(
        [], "Parameters that match one of these do not train.", flags=("--freeze-params-name-list",))
    moe_router_freeze_gate: bool = option(
        False, "The routers of experts do not train.", flags=("--moe-router-freeze-gate",))
    lr_mult: list[str] = option(
        [], "PATTERN=FACTOR: the learning rate of parameters that match the pattern is lr and min_lr times the factor.",
        flags=("--lr-mult",))


class ParamGroups:
    """Freezes parameters, and gives some a learning rate of their own."""

    conflicts = ("lora",)
    provides = ("hf-modules", "needs-no-log-prob-pass")

    def __init__(self, options: ParamGroupsOptions, config: RunConfig):
        self.choice = Choice.of(only=options.only_train_params_name_list, lr_mult=options.lr_mult, frozen=[
            *options.freeze_params_name_list, *(["|".join(ROUTERS)] if options.moe_router_freeze_gate else [])])
        self._config = config
        self._chunks: list[torch.nn.Module] = []

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
        """Say so where none of the options is given."""
        if not self.choice:
            note("plugin param-groups: no effect, as none of its options is given")
        return config

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """What trains, and the learning rates under the names of their metrics."""
        rate = config.optimizer.lr
        return [("param groups", text) for text in self.choice.lines(rate)]

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, model: str, weight_map: WeightMap | None) -> torch.nn.Module:
        """Freeze and mark the actor's parameters, once all of its parts on this rank are there."""
        if model != "actor" or not self.choice or next(chunk.parameters()).is_meta:
            return chunk
        if weight_map is None:
            self.choice.apply(dict(chunk.named_parameters()), {})
            return chunk
        from miles_megatron.layout import layout_of

        self._chunks.append(chunk)
        if len(self._chunks) == (layout_of(self._config).virtual_pipeline or 1):
            from miles_param_groups.megatron import everywhere, parameters

            mine = parameters(self._chunks, weight_map)
            self.choice.apply(mine, everywhere(mine, weight_map))
        return chunk
