"""The models of a rank: the actor, others that train (a critic), and others that only score: the reference, a teacher.

Where a plugin freezes what the actor's directory holds and trains what it adds (the hook `build_model`), a model that
only scores and comes from the same directory is the actor in passes of another name, in which nothing added may act.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles_core.columns import Columns
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, HookError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.resolve import chosen
from miles_core.stages.models import Model
from miles_core.types import Prompt, Sample
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.module import Around, CausalModule, check_shared, keep_apart, read, shard
from miles_fsdp.parked import Parked
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.scored import Temperature
from miles_fsdp.server_kernels import prepare
from miles_fsdp.stored import beside, stored_prefix
from miles_fsdp.tensor_parallel import whole
from miles_fsdp.trained import Trained
from miles_fsdp.value import head_of

ACTOR = "actor"
SaveWeights = Callable[[Iterator[tuple[str, torch.Tensor]], Path], Iterator[tuple[str, torch.Tensor]]]


class Models:
    """Builds them from their directories.

    Args:
        start: the actor's Hugging Face directory.

    Raises:
        HookError: a plugin declares a model of a name that is taken.
        CheckpointError: a directory that holds no model.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, columns: Columns, ranks: Ranks, options: FsdpOptions,
                 start: str):
        self._config, self._hooks, self._columns, self._ranks, self._options = config, hooks, columns, ranks, options
        self.start, self._frozen, self._shared, self._parked = start, False, False, Parked()
        declared = {"ref": Model(str(config.checkpoint.ref_load))} if config.algorithm.needs_reference else {}
        for name, model in (hooks.models() if hooks.models else {}).items():
            if name in (ACTOR, "ref"):
                raise HookError(f"a plugin declares the model {name!r}, which is reserved", code="fsdp-model-reserved",
                                fix="rename it")
            declared[name] = model
        actor = Model(start, trainable=True)
        self.modules = {ACTOR: self._made(ACTOR, actor)}
        for name, model in declared.items():
            self.modules[name] = self.actor if self._is_base(model) else self._made(name, model)
        self.rollout_steps = config.rollout.num_steps_per_rollout or 1
        steps = (config.rollout.num_rollout or 1) * self.rollout_steps
        own = options
        if config.perf.bf16 and options.muon_fp32_matmul_prec is None:
            own = replace(options, muon_fp32_matmul_prec="medium")
        self.trained = {
            name: Trained(name, self.modules[name], replace(config.optimizer, **cast("Any", model.optimizer)),
                          own, steps)
            for name, model in {ACTOR: actor, **declared}.items() if model.trainable}

    @property
    def actor(self) -> CausalModule:
        return self.modules[ACTOR]

    @property
    def base(self) -> str | None:
        """The actor's directory, if some of what it holds does not train."""
        return str(Path(self.start).resolve()) if self._frozen else None

    @property
    def warm(self) -> bool:
        """Whether the actor began with the reference's weights."""
        return self.start == self._config.checkpoint.ref_load

    @property
    def dtype(self) -> torch.dtype:
        """What modules compute in, and engines get."""
        return torch.bfloat16 if self._config.perf.bf16 else torch.float32

    def place(self, name: str) -> CausalModule:
        """
        Raises:
            ConfigError: there is no such model.
        """
        if name not in self.modules:
            raise ConfigError(f"no model is named {name!r}", code="fsdp-model-unknown", got=", ".join(self.modules),
                              fix="declare it in the hook `models`, or add --use-kl-loss for the reference")
        return self.modules[name]

    def around(self, name: str) -> Around | None:
        """The bound hook `microbatch` for passes of a model."""
        hook = self._hooks.microbatch
        return None if hook is None else lambda proceed, packed: hook(proceed, packed, name)

    def _is_base(self, model: Model) -> bool:
        """Whether it is what the actor was before plugins added what trains of it."""
        scores = model.head == "policy" and not model.trainable
        return self._shared and scores and Path(self.start).resolve() == Path(model.source).resolve()

    def _made(self, name: str, declared: Model) -> CausalModule:
        config = self._config
        exact = config.algorithm.true_on_policy_mode
        temperature = Temperature(config.rollout.rollout_temperature or 1.0, config.perf.log_probs_chunk_size, exact)
        inputs = None if declared.head == "value" else getattr(self._hooks, "forward_inputs", None)
        model, head = self._built(name, declared, images=inputs is not None), None
        if declared.head == "value":
            head = head_of(Path(declared.source), model.config.get_text_config().hidden_size, config.optimizer.seed,
                           fresh=declared.source == config.checkpoint.hf_checkpoint)
            head.to(model.dtype).requires_grad_(declared.trainable)
        options = self._options
        module = CausalModule(model, temperature, options.attn_implementation, head, inputs,
                              options.torch_compile_backend if options.torch_compile else None)
        module.to(self._ranks.device)
        if exact:
            prepare(model, self._ranks.device)
        shard(module, self._ranks, options, low=declared.trainable and config.perf.bf16,
              offload=options.cpu_offload or not declared.trainable)
        samples = _two_samples(self._columns, module.reach)
        keep_apart(module, MicroBatch(self._columns, samples, self._ranks.device), self._ranks)
        check_shared(module, self._ranks.context.size)
        return module

    def _built(self, name: str, declared: Model, *, images: bool) -> PreTrainedModel:
        """Read, and changed by plugins; what trains is in float32, and what does not is as it computes."""
        trained, source = declared.trainable, declared.source
        model = read(source, self._options, torch.float32 if trained else self.dtype, body=declared.head == "value",
                     images=images)
        stored = list(model.requires_grad_(trained).parameters())
        if (build := getattr(self._hooks, "build_model", None)) is not None:  # a package declares it
            model = cast("PreTrainedModel", build(model, None, Path(source), name, None))
        for parameter in model.parameters():
            if trained and not parameter.requires_grad:
                parameter.data = parameter.data.to(self.dtype)
        if name == ACTOR:
            moving = {parameter.requires_grad for parameter in stored}
            self._frozen, self._shared = False in moving, True not in moving
        return model

    def step(self, name: str) -> dict[str, float]:
        """Of a model that trains. See Trained.step."""
        clipping = chosen(self._config, "clip_gradients")
        return self.trained[name].step(self._ranks, clipping, self._hooks.clip_gradients[clipping])

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's parameters and kept buffers under the names of its checkpoint, whole; every rank goes through.

        Those that train come first, so that who merges has what was added before the weights that it changes.
        """
        model = self.actor.model
        state = model.state_dict()  # first, as it shards again what a step that was refused has left whole
        named = dict(model.named_parameters(remove_duplicate=False))
        buffers = ((name, one) for name, one in state.items() if name not in named)
        parameters = sorted(model.named_parameters(), key=lambda pair: not pair[1].requires_grad)
        for name, tensor in (*parameters, *buffers):
            tensor = tensor.detach()
            one = tensor.to(self.dtype) if name in named else tensor
            if isinstance(one, DTensor):
                one = whole(one.to(self._ranks.device))
            for stored, plain in revert_weight_conversion(model, {name: one}).items():
                yield self._prefix + stored, plain

    def whole(self, stream: Iterator[tuple[str, torch.Tensor]], hook: SaveWeights | None,
              folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """What an export has: a stream as the hook save_weights leaves it, and behind it what the directory holds that
        is no part of the model, as it is there: a tower beside the text model, layers for drafting."""
        sent = set()
        for name, tensor in stream if hook is None else hook(stream, folder):
            sent.add(name)
            yield name, tensor
        if self._ranks.index == 0:
            yield from beside(Path(self.start), sent, {self._prefix + name for name in self.actor.model.state_dict()})

    @functools.cached_property
    def _prefix(self) -> str:
        return stored_prefix(self.actor.model, Path(self.start))

    def offload(self, tags: Sequence[str]) -> None:
        """See miles_core.stages.step.Trainer. Models that only score are in host memory anyhow."""
        if "gradients" in tags:
            for one in self.trained.values():
                one.module.zero_grad()
        self._parked.park(self._tensors(tags))
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes on this GPU

    def onload(self, tags: Sequence[str]) -> None:
        """The inverse."""
        self._parked.fetch(self._tensors(tags))

    def _tensors(self, tags: Sequence[str]) -> dict[str, torch.Tensor]:
        """What offload moves, by name."""
        named: dict[str, torch.Tensor] = {}
        for name, one in () if self._options.cpu_offload else self.trained.items():
            for parameter_name, parameter in one.module.named_parameters():
                if "weights" in tags:
                    named[f"{name} {parameter_name}"] = parameter
                if "optimizer" in tags:
                    state = one.optimizer.state.get(parameter, {})
                    named |= {f"{name} {parameter_name} {key}": state[key] for key in state if key != "step"}
        return named

    def close(self) -> None:
        """Give up what is sharded, while its process group is there."""
        for module in self.modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        self.modules.clear()


def _two_samples(columns: Columns, length: int = 5) -> list[Sample]:
    """What `keep_apart` asks with: so many tokens each, of which all but two are the answer."""
    def made(index: int) -> Sample:
        answer = length - 2
        values: dict[str, np.ndarray] = {
            "tokens": np.arange(5 * index, 5 * index + length, dtype=np.int32) % 64,
            "loss_mask": np.ones(answer, np.uint8),
            "rollout_log_probs": np.zeros(answer, np.float32), "versions": np.zeros(answer, np.int32)}
        return Sample(Prompt(index, index, "", (0, 1)), index, values, answer)

    return [made(0), made(1)]


def directory(path: str | None) -> bool:
    """Whether a path is a Hugging Face directory and no folder of checkpoints."""
    return path is not None and Path(path, "config.json").is_file()
