"""One model on this rank: its chunks, where its weights come from, and what steps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError, NonFiniteError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.reading import reading
from miles_core.stages.models import Model
from miles_megatron import cpu, gradients, hf_config, optimizer, unread, value, weights
from miles_megatron.config_overrides import check_architecture, overrides_for
from miles_megatron.host_memory import host_copy, synchronise
from miles_megatron.layout import Layout
from miles_megatron.model import (
    ALWAYS_OFF,
    LOCAL_ONLY_OFF,
    ROUTER_LOSSES,
    build,
    routers_learn,
    transformer_config,
)
from miles_megatron.module_specs import modules_of
from miles_megatron.offload import Offload

cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402 - after install()
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker  # noqa: E402


class ModelOnRank:
    """A model that is in memory, and its optimizer if it trains.

    Args:
        declared: source, head and whether it trains.
        layout: of the trainer; all models share it.
    """

    def __init__(self, name: str, declared: Model, config: RunConfig, hooks: Hooks, layout: Layout):
        self.name, self.declared, self.config = name, declared, config
        self.folder = folder_of(declared.source, config)
        self.spec, self.weight_map = architecture(self.folder, config, hooks)
        check_architecture(config.surface("megatron"), self.spec)
        fields = overrides_for(TransformerConfig, config.surface("megatron"))
        if hooks.transformer_config is not None:
            fields = hooks.transformer_config(fields, self.folder, name)
        self.fields, self.layout = fields, layout
        self.settings = self._settings(fields)
        self.settings.finalize_model_grads_func = finalize_model_grads
        make = value.build if declared.head == "value" else build
        stages = range(layout.virtual_pipeline) if layout.virtual_pipeline else (None,)
        chunks = [make(self.settings, self.spec, stage) for stage in stages]
        if declared.head == "value":
            self.weight_map = value.weight_map(self.weight_map)
        if hooks.weight_map is not None:
            self.weight_map = hooks.weight_map(self.weight_map, self.folder, name)
        if hooks.build_model is not None:
            chunks = [hooks.build_model(chunk, self.spec, self.folder, name, self.weight_map) for chunk in chunks]
        self.chunks = [chunk.to(cpu.device()) for chunk in chunks]
        if declared.trainable and (self.settings.recompute_granularity or layout.pipeline > 1):
            _wake(self.chunks[0])
        for chunk in self.chunks:
            chunk.weight_map = self.weight_map
        self.clip_groups = gradients.clip_groups(self.chunks)
        self.options = _options(config, declared)
        self.clipping = chosen(config, "clip_gradients")
        self.clip = hooks.clip_gradients[self.clipping]
        self.optimizer = self.scheduler = None
        self.memory = Offload(self)
        if declared.trainable:
            self.wrapped = optimizer.wrap(self.chunks, self.settings, self.options)
            prepare = modules_of(self.settings).wrapped
            for chunk in self.chunks if prepare is not None else ():
                prepare(chunk)
        else:
            low = self.settings.bf16
            self.wrapped = [optimizer.rounded(self.settings, chunk) if low else chunk for chunk in self.chunks]

    def _settings(self, fields: Mapping[str, object]) -> TransformerConfig:
        layout = self.layout
        return transformer_config(
            self.spec, fields, bf16=self.config.perf.bf16, tensor=layout.tensor,
            pipeline=layout.pipeline, virtual_pipeline=layout.virtual_pipeline, context=layout.context,
            expert=layout.expert, expert_tensor=layout.expert_tensor, sequence_parallel=layout.sequence_parallel,
        )  # fmt: skip

    def without_effect(self, read: frozenset[str]) -> list[str]:
        """Options of Megatron-core that the run sets and that change nothing, going by what was read of them."""
        stated = {*self.spec.constants, *ALWAYS_OFF, *LOCAL_ONLY_OFF}  # compared with the checkpoint, or warned of
        names = unread.unread(self.config.surface("megatron"), read, self.settings)
        names = [name for name in names if name not in stated]
        without = {name: {key: value for key, value in self.fields.items() if key != name} for name in names}
        return [name for name in names if name not in self.fields or unread.idle(name, self.settings)
                or not unread.shapes(self._settings(self.fields), self._settings(without[name]), name)]

    @property
    def head(self) -> torch.Tensor:
        """[V / tensor, H] of the output layer, or [1, H] of the value head; on the last pipeline stage only."""
        chunk, valued = self.chunks[-1], self.declared.head == "value"
        tied = chunk.share_embeddings_and_output_weights and chunk.pre_process
        layer = chunk.value_head if valued else None if tied else chunk.output_layer
        if layer is not None:
            # The layer itself is never called, so what DDP hangs on its call (gathering its weight) is done here.
            for hook in layer._forward_pre_hooks.values():
                hook(layer, ())
        return layer.weight if valued else chunk.output_weight

    @property
    def head_gradients(self) -> torch.Tensor | None:
        """[V / tensor, H] buffer of the head's gradient, where DDP does not wait for the parameter's own."""
        return getattr(self.head, "main_grad", None) if self.settings.no_sync_func is None else None

    def fill(self, source: str) -> None:
        """Weights from a Hugging Face directory or a torch_dist checkpoint.

        Raises:
            CheckpointError: names the folder and what is wrong with it.
        """
        folder = Path(source)
        if (folder / "config.json").is_file():
            if self.declared.head == "value":
                value.load(folder, self.chunks, self.weight_map, seed=self.config.optimizer.seed,
                           fresh=source == self.config.checkpoint.hf_checkpoint)
            else:
                weights.load_hf(folder, self.chunks, self.weight_map)
        else:
            part = self.name if self.declared.head == "value" else "actor"  # any policy is another run's actor
            checkpoints().load(folder, {part: (self.wrapped, None, None)})

    def make_optimizer(self) -> None:
        """After the weights are in place: the optimizer copies them to its float32 masters."""
        self.optimizer, self.scheduler = optimizer.make_optimizer(self.wrapped, self.options)

    def zero_grad(self) -> None:
        """Before a step's first micro-batch."""
        optimizer.zero_gradients(self.wrapped, self.optimizer)

    def step(self) -> dict[str, float]:
        """Clip, update, move the schedule.

        Raises:
            NonFiniteError: a gradient is not finite; the optimizer has not seen it.
            HookError: the clipping answers with no number.
        """
        if names := optimizer.non_finite_gradients(self.wrapped):
            raise NonFiniteError(f"the gradient of {names[0]} is not finite", got=f"{len(names)} parameter(s)",
                                 who=f"optimizer step of the {self.name}", code="gradient-not-finite",
                                 fix="the weights are unchanged and the last checkpoint is good; "
                                 "look at the step's samples, the learning rate and the precision")
        self.memory.arrived()
        rates = optimizer.rates(self.optimizer)
        clipped = gradients.MegatronGradients(self.name, self.optimizer, self.chunks, self.options.clip_grad,
                                             self.clip_groups)
        norms = gradients.update(self.optimizer, clipped, self.clip, self.clipping)
        self.scheduler.step(1)
        return norms | rates

    @property
    def balances(self) -> bool:
        """See model.routers_learn."""
        return routers_learn(self.settings)

    @contextmanager
    def router_losses(self, tokens: int) -> Iterator[None]:
        """Inside, load-balancing and z losses of the routers are means over the step's `tokens`.

        Megatron multiplies each micro-batch's by its tokens and counts on dividing all gradients by the total at the
        end of the step; here nothing is divided at the end.
        """
        coefficients = {name: getattr(self.settings, name) for name in ROUTER_LOSSES if getattr(self.settings, name)}
        for name, whole in coefficients.items():
            share = [one / tokens for one in whole] if isinstance(whole, list) else whole / tokens
            setattr(self.settings, name, share)
        get_moe_layer_wise_logging_tracker().clear()  # it has as many layers as who came first in this process
        try:
            yield
        finally:
            for name, whole in coefficients.items():
                setattr(self.settings, name, whole)

    def settle(self) -> None:
        """Weights that are still being gathered after a step (--overlap-param-gather) are there when this returns."""
        if self.optimizer is not None:
            for chunk in self.wrapped:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of all chunks, in order."""
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def tensors(self, moving: bool = False) -> Iterator[torch.Tensor]:
        """What a checkpoint holds of the model: parameters, then persistent buffers.

        Args:
            moving: without parameters that are frozen.
        """
        yield from (parameter for parameter in self.parameters() if parameter.requires_grad or not moving)
        yield from (buffer for chunk in self.chunks for _, buffer in weights.kept_buffers(chunk))

    def copy(self, into: Sequence[torch.Tensor] | None = None, moving: bool = False) -> list[torch.Tensor]:
        """The weights in host memory.

        Args:
            into: an earlier copy to write over.
            moving: see `tensors`.
        """
        self.settle()
        copies = [host_copy(one, None if into is None else into[i]) for i, one in enumerate(self.tensors(moving))]
        synchronise()
        return copies

    def put(self, tensors: list[torch.Tensor], moving: bool = False) -> None:
        """The inverse of `copy`."""
        with torch.no_grad():
            for ours, tensor in zip(self.tensors(moving), tensors, strict=True):
                ours.copy_(tensor, non_blocking=True)
        synchronise()


def _wake(chunk: torch.nn.Module) -> None:
    """Have the output of a frozen embedding ask for a gradient.

    A layer whose activations are recomputed passes its own parameters a gradient only if its input gets one, and a
    pipeline stage sends back what the one before it waits for.
    """
    def woken(_module: torch.nn.Module, _inputs: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output

    if chunk.pre_process:
        chunk.embedding.register_forward_hook(woken)


def architecture(folder: Path, config: RunConfig, hooks: Hooks):
    """(ModelSpec, WeightMap) of a Hugging Face directory's config.json, by the plugin that offers its model_type.

    Raises:
        ConfigError: no enabled plugin does; of the actor the plan has seen to it (plugins/resolve.py).
    """
    with reading(f"{folder}/config.json", CheckpointError):
        hf = hf_config.read(folder)
    ours = Path(config.checkpoint.hf_checkpoint) == folder
    name = (ours and config.model.model_name) or hf.model_type
    if name not in hooks.model_spec:
        raise ConfigError(f"no enabled plugin builds the architecture {name!r}", who=str(folder),
                          got=f"there are {', '.join(sorted(hooks.model_spec))}", code="architecture-not-built",
                          fix="enable the plugin that does with --plugin: docs/model-families.md")
    family = hooks.model_spec[name](hf)
    return family.model_spec(hf), family.weight_map(hf)


def checkpoints() -> ModuleType:
    """checkpoint.py, which brings torch.distributed.checkpoint (0.7 CPU s, 50 MiB): only once a run loads or saves."""
    from miles_megatron import checkpoint

    return checkpoint


def folder_of(model: str, config: RunConfig) -> Path:
    """The folder with config.json: that of a model's source itself, else that of --hf-checkpoint."""
    source = Path(model)
    return source if (source / "config.json").is_file() else Path(config.checkpoint.hf_checkpoint)


def _options(config: RunConfig, declared: Model) -> optimizer.OptimizerOptions:
    optimizer_ = dataclasses.replace(config.optimizer, **declared.optimizer)
    rollouts = config.rollout.num_rollout or 1
    return optimizer.OptimizerOptions(
        lr=optimizer_.lr, min_lr=optimizer_.min_lr, lr_decay_style=optimizer_.lr_decay_style,
        lr_warmup_iters=optimizer_.lr_warmup_iters, lr_warmup_fraction=optimizer_.lr_warmup_fraction,
        lr_decay_iters=optimizer_.lr_decay_iters,
        train_iters=max(1, rollouts * config.rollout.num_steps_per_rollout),
        rollout_iters=config.rollout.num_steps_per_rollout,
        optimizer=optimizer_.optimizer, weight_decay=optimizer_.weight_decay,
        adam_beta1=optimizer_.adam_beta1, adam_beta2=optimizer_.adam_beta2,
        adam_eps=optimizer_.adam_eps, clip_grad=optimizer_.clip_grad, megatron=config.surface("megatron"),
    )  # fmt: skip
