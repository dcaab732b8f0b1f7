"""The plugin: options and hooks. Names are in names.py, the layers in layers.py, both imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from miles_megatron.layout import layout_of

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import chosen

if TYPE_CHECKING:
    import torch
    from miles_megatron.model import LanguageModel
    from miles_megatron.specs import ModelSpec, WeightMap

    from miles_core.columns import Packed
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.stages.step import TrainerAccess
    from miles_mtp.layers import Predictors
    from miles_mtp.names import Layers


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """The layers, and how they train."""

    num_layers: int | None = option(
        None, "Multi-token-prediction layers; default: as many as the checkpoint has, else 1.",
        flags=("--mtp-num-layers",),
    )
    enable_training: bool = option(
        False, "Train the layers; otherwise they stay unchanged.", flags=("--enable-mtp-training",)
    )
    loss_scaling_factor: float = option(
        0.2, "Weight of their loss relative to the policy loss.", flags=("--mtp-loss-scaling-factor",)
    )
    seed: int | None = option(None, "Of layers that the checkpoint does not have; default: the run's.")
    names: Literal["auto", "mtp", "nextn", "mimo"] = option(
        "auto", "What the checkpoint calls their tensors; auto: as it does, for fresh layers mtp if one, else nextn."
    )


class Mtp:
    """Multi-token prediction: layers that draft for speculative decoding, kept and trained beside the policy."""

    provides = ("needs-no-log-prob-pass",)

    def __init__(self, options: MtpOptions, config: RunConfig):
        _check(options, config)
        self.options, self.config = options, config
        self._names: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()
        self._predictors: Predictors | None = None
        self._last: tuple[torch.Tensor, Packed] | None = None

    @hookimpl
    def weight_map(self, weight_map: WeightMap, folder: Path, model: str) -> WeightMap:
        """The layers' tensors belong to the actor; other models leave them in the checkpoint."""
        from miles_megatron.weights import instances

        layers = self._layers(folder)
        added = layers.added(weight_map)
        own = {name for _, _, names in instances(weight_map) for name in names}
        names = frozenset(name for _, _, names in instances(added) for name in names) - own
        if model != "actor":
            return replace(weight_map, ignored=added.ignored | names)
        self._names, self._prefixes = names, layers.prefixes(weight_map)
        return added

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, spec: ModelSpec, folder: Path, model: str) -> torch.nn.Module:
        """The layers on the actor's last stage, clipped apart: so the policy's step is what it is without them."""
        # Of every model, not the actor's alone: Megatron's table of router losses is as long as the first one says. And
        # not before it is built: Megatron would tie an embedding of its own on the last stage to it.
        cast("LanguageModel", chunk).config.mtp_num_layers = self._layers(folder).count
        if model != "actor" or not chunk.post_process:
            return chunk
        from miles_mtp.layers import Predictors

        seed = self.config.optimizer.seed if self.options.seed is None else self.options.seed
        self._predictors = Predictors(cast("LanguageModel", chunk), spec, self._layers(folder).names.hidden_first, seed)
        chunk.mtp = self._predictors
        for parameter in self._predictors.parameters():
            parameter.requires_grad_(self.options.enable_training)
            parameter.clip_group = "mtp"
        return chunk

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """Keep what the actor's forward ends in, for the layers to begin with."""
        import torch

        hidden = proceed(packed)
        trained = self._predictors is not None and self.options.enable_training  # on the last stage
        if trained and model == "actor" and torch.is_grad_enabled():
            self._last = hidden.detach(), packed
        return hidden

    @hookimpl
    def loss_terms(self, inputs: LossInputs) -> dict[str, tuple[float, torch.Tensor]]:
        """mtp_loss: minus the log-probability that the layers give each trained token, meaned over the layers."""
        if not self.options.enable_training:
            return {}
        if not inputs.samples:  # made-up tokens, by which the core finds out what terms there are
            return {"mtp_loss": (self.options.loss_scaling_factor, inputs.mask)}
        from miles_mtp.layers import token_losses

        predictors = cast("Predictors", self._predictors)  # build_model and microbatch come first
        hidden, packed = cast("tuple[torch.Tensor, Packed]", self._last)
        self._last = None
        return {"mtp_loss": (self.options.loss_scaling_factor, token_losses(predictors, hidden, packed))}

    @hookimpl
    def train_step(self, proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
        """Where the embedding is on another pipeline stage the layers get a copy for the step."""
        if not self.options.enable_training or layout_of(self.config).pipeline == 1:
            return proceed()
        from miles_mtp.layers import embedding_on_last_stage

        with embedding_on_last_stage(cast("Sequence[LanguageModel]", access.chunks("actor")), self._predictors):
            return proceed()

    @hookimpl
    def export_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The local engine does not speculate, and takes no tensor that it does not know."""
        if chosen(self.config, "engine") != "local":
            return stream
        own = {name.rpartition(".")[0] for name in self._names}  # with scales, where the stream is quantised already
        return ((name, tensor) for name, tensor in stream
                if name.rpartition(".")[0] not in own and not name.startswith(self._prefixes))

    @hookimpl(name="add-mtp")
    def convert(self, source: Path, out: Path) -> str:
        """A Hugging Face directory with layers of multi-token prediction added to it."""
        from miles_mtp.fresh import add

        seed = self.config.optimizer.seed if self.options.seed is None else self.options.seed
        return add(source, out, self.options.num_layers, self.options.names, seed)

    def _layers(self, folder: Path) -> Layers:
        from miles_mtp.names import layers_of

        return layers_of(folder, self.options.num_layers, self.options.names)


def _check(options: MtpOptions, config: RunConfig) -> None:
    if options.num_layers is not None and options.num_layers < 1:
        raise ConfigError("at least one layer is needed", code="mtp-no-layers", got=options.num_layers,
                          who="--mtp-num-layers",
                          fix="leave it out to keep those of the checkpoint, or run without plugin mtp")
    if options.loss_scaling_factor < 0:
        raise ConfigError("the weight of a loss should not be negative", got=options.loss_scaling_factor,
                          who="--mtp-loss-scaling-factor", code="mtp-loss-weight-negative", fix="use 0.2, for example")
    sync = str(config.perf.weight_sync)
    layered = config.surface("server").get("enable_multi_layer_eagle")
    if options.enable_training and layered and not sync.startswith("disk"):
        raise ConfigError("SGLang can update a draft of several layers only from files", got=sync,
                          who="plugin mtp, --weight-sync", fix="--weight-sync disk", code="mtp-draft-needs-files")
