"""The models of a rank: the resident actor with its optimizer, and named others that are swapped into it.

A model that does not train (the reference) is kept as host copies of its parameters. `resident(name)` copies them into
the one model that exists and puts the actor back afterwards, so memory holds one model's activations and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from miles_core.backends.megatron import cpu, optimizer, weights
from miles_core.backends.megatron.given import check_architecture, given_for
from miles_core.backends.megatron.model import build, transformer_config
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, NonFiniteError
from miles_core.plugins.bind import Hooks
from miles_core.stages.step import Resume

cpu.install()

from megatron.core.distributed import finalize_model_grads  # noqa: E402 - after install()
from megatron.core.transformer import TransformerConfig  # noqa: E402


class Models:
    """Builds the actor; `load` fills it.

    Raises:
        ConfigError: nobody offers the checkpoint's architecture.
    """

    def __init__(self, config: RunConfig, hooks: Hooks):
        from transformers import AutoConfig

        self.config = config
        self._source = Path(config.checkpoint.hf_checkpoint)
        hf = AutoConfig.from_pretrained(self._source, local_files_only=True)
        name = config.model.model_name or hf.model_type
        if name not in hooks.model_spec:
            raise ConfigError(f"no enabled plugin builds the architecture {name!r}",
                              got=", ".join(sorted(hooks.model_spec)), who=f"config.json of {self._source}",
                              fix="enable the plugin that offers this model_spec")
        family = hooks.model_spec[name](hf)
        spec, self.weight_map = family.model_spec(hf), family.weight_map(hf)
        cpu.initialize(seed=config.optimizer.seed)
        check_architecture(config.megatron, spec)
        layout = transformer_config(spec, given_for(TransformerConfig, config.megatron), bf16=config.perf.bf16)
        layout.finalize_model_grads_func = finalize_model_grads
        self.model = build(layout, spec)
        self._options = _options(config)
        [self.wrapped] = optimizer.wrap([self.model], layout, self._options)
        self._optimizer = self._scheduler = None
        self._others: dict[str, list[torch.Tensor]] = {}

    @property
    def output_weight(self) -> torch.Tensor:
        """[V, H] of the resident model."""
        return self.model.output_weight

    def load(self) -> Resume:
        """--load, else --ref-load, else --hf-checkpoint; and the reference where one is asked for.

        Raises:
            CheckpointError: names the folder and what is wrong with it.
        """
        given = self.config.checkpoint
        source = given.ref_load or given.hf_checkpoint
        reference = self.config.algorithm.use_kl_loss  # then there is a --ref-load (config/check.py)
        if reference:
            self._fill(source)
            self._others["ref"] = self._copy()
        if given.load and not _checkpoints().never_saved(given.load):
            # Made before loading, for the state to have a place; a fresh start makes it after, from the loaded weights.
            self._make_optimizer()
            iteration, state = _checkpoints().load(given.load, [self.wrapped], self._optimizer, self._scheduler)
            return Resume(iteration, state, f"{given.load} (rollout {iteration})")
        if not reference:  # else its weights are in place already
            self._fill(source)
        self._make_optimizer()
        return Resume(0, None, source)

    @contextmanager
    def resident(self, name: str) -> Iterator[None]:
        """Inside, the model holds the weights of `name`."""
        actor = self._copy()
        self._put(self._others[name])
        try:
            yield
        finally:
            self._put(actor)

    def zero_grad(self) -> None:
        """Before a step's first micro-batch."""
        optimizer.zero_gradients([self.wrapped], self._optimizer)

    def step(self) -> dict[str, float]:
        """Clip, update, move the schedule.

        Raises:
            NonFiniteError: a gradient is not finite; the optimizer has not seen it.
        """
        if names := optimizer.non_finite_gradients([self.wrapped]):
            raise NonFiniteError(f"the gradient of {names[0]} is not finite", got=f"{len(names)} parameter(s)",
                                 who="optimizer step", fix="the weights are unchanged and the last checkpoint is good; "
                                 "look at the step's samples, the learning rate and the precision")
        rate = self._optimizer.param_groups[0]["lr"]
        _, norm, _ = self._optimizer.step()
        self._scheduler.step(1)
        return {"train/grad_norm": float(norm), "train/lr-pg_0": rate}

    def save(self, folder: Path, rollout_id: int, state: dict) -> None:
        """A checkpoint after which rollout `rollout_id` is the next."""
        whole = not self.config.checkpoint.no_save_optim
        trained = (self._optimizer, self._scheduler) if whole else ()
        _checkpoints().save(folder, rollout_id, [self.wrapped], *trained, state=state)

    def export(self, folder: Path) -> None:
        """The actor as a Hugging Face directory."""
        dtype = next(self.model.parameters()).dtype
        weights.export_hf(folder, self._source, weights.hf_stream(self.model, self.weight_map), dtype)

    def _make_optimizer(self) -> None:
        self._optimizer, self._scheduler = optimizer.make_optimizer([self.wrapped], self._options)

    def _fill(self, source: str) -> None:
        folder = Path(source)
        if (folder / "config.json").is_file():
            weights.load_hf(folder, self.model, self.weight_map)
        else:
            _checkpoints().load(folder, [self.wrapped])

    def _copy(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _put(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, tensor in zip(self.model.parameters(), tensors, strict=True):
                parameter.copy_(tensor)


def _checkpoints() -> ModuleType:
    """checkpoint.py, which brings torch.distributed.checkpoint (0.7 CPU s, 50 MiB): only once a run loads or saves."""
    from miles_core.backends.megatron import checkpoint

    return checkpoint


def _options(config: RunConfig) -> optimizer.OptimizerOptions:
    given = config.optimizer
    rollouts = config.rollout.num_rollout or 1
    return optimizer.OptimizerOptions(
        lr=given.lr, min_lr=given.min_lr, lr_decay_style=given.lr_decay_style, lr_warmup_iters=given.lr_warmup_iters,
        lr_decay_iters=given.lr_decay_iters, train_iters=max(1, rollouts * config.rollout.num_steps_per_rollout),
        optimizer=given.optimizer, weight_decay=given.weight_decay,
        adam_beta1=given.adam_beta1, adam_beta2=given.adam_beta2,
        adam_eps=given.adam_eps, clip_grad=given.clip_grad, megatron=config.megatron,
    )  # fmt: skip
