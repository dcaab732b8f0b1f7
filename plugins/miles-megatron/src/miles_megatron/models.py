"""The models of a rank: the actor, others that are built beside it, and others that are swapped into its place.

A model of the actor's architecture that does not train (the reference) is kept as host copies of its parameters,
pinned where there is a GPU; where it comes from the same place, what is frozen in the actor needs no copy.
`at(name)` copies them into the actor's place and puts the actor back afterwards, so memory holds one model's
activations and buffers. A model that trains (a critic) or has another architecture (a larger teacher) is its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, HookError
from miles_core.plugins.bind import Hooks
from miles_core.stages.models import Model
from miles_core.stages.step import Resume
from miles_core.types import Rank
from miles_megatron import cpu, engine_weights, estimate, weights
from miles_megatron.async_save import AsyncSave
from miles_megatron.disk_names import carried
from miles_megatron.layout import layout_of
from miles_megatron.model_on_rank import ModelOnRank, architecture, checkpoints, folder_of
from miles_megatron.offload import OPTIMIZER, WEIGHTS

MARGIN = 2 * 2**30
"""Bytes of a GPU that nothing is planned with."""


class Models:
    """Builds the models of this rank; `load` fills it.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
    """

    def __init__(self, config: RunConfig, hooks: Hooks, rank: Rank):
        self.config, self._outgoing = config, hooks.export_weights
        layout = layout_of(config)
        cpu.deterministic(bool(config.surface("megatron").get("deterministic_mode")))
        cpu.process_group(rank, config.perf.trainer_timeout)
        cpu.initialize(
            tensor=layout.tensor, pipeline=layout.pipeline, virtual_pipeline=layout.virtual_pipeline,
            context=layout.context, expert=layout.expert, expert_tensor=layout.expert_tensor,
            seed=config.optimizer.seed,
        )  # fmt: skip
        if hooks.megatron_init:
            hooks.megatron_init(config)
        paths = config.checkpoint
        self.has_reference = config.algorithm.needs_reference
        declared = {"ref": Model(paths.ref_load or paths.hf_checkpoint)} if self.has_reference else {}
        for name, model in (hooks.models() if hooks.models else {}).items():
            if name in ("actor", "ref"):
                raise HookError(f"a plugin declares the model {name!r}, which is reserved", code="model-name-reserved",
                                fix="rename it")
            declared[name] = model
        # Of a Hugging Face directory, and of what another program saved, the weights are taken: a start, not a resume.
        self._start = paths.load if paths.load and checkpoints().weights_alone(paths.load) else None
        start = self._start or paths.ref_load or paths.hf_checkpoint
        self.actor = ModelOnRank("actor", Model(start, trainable=True), config, hooks, layout)
        self.on_rank = {"actor": self.actor}
        self._swapped: dict[str, str] = {}
        self._apart = False
        for name, model in declared.items():
            folder = Path(model.source)
            other = (folder / "config.json").is_file() and self.actor.spec != architecture(folder, config, hooks)[0]
            if model.trainable or model.head == "value" or other:
                self.on_rank[name] = ModelOnRank(name, model, config, hooks, layout)
            else:
                self._swapped[name] = model.source
        self._copies: dict[str, list[torch.Tensor]] = {}
        self.async_save = AsyncSave(config.perf.trainer_timeout)

    @property
    def trained(self) -> dict[str, ModelOnRank]:
        """The models that have an optimizer."""
        return {name: one for name, one in self.on_rank.items() if one.declared.trainable}

    def load(self) -> Resume:
        """--load, else --ref-load, else --hf-checkpoint; and the others from where they are declared to come.

        Raises:
            CheckpointError: names the folder and what is wrong with it.
        """
        paths = self.config.checkpoint
        resume = paths.load and not self._start and not checkpoints().never_saved(
            paths.load, own=paths.load == paths.save)
        source_in_actor = frozen = None  # the source whose weights the actor's place holds
        for name, source in self._swapped.items():
            self.actor.fill(source)
            self._copies[name], source_in_actor = self.actor.copy(moving=self._shares(name)), source
            frozen = self._frozen() if self._shares(name) else frozen
        for one in self.on_rank.values():
            filled = one is self.actor and source_in_actor == one.declared.source
            if not filled and not (resume and one.declared.trainable):
                one.fill(one.declared.source)
            if one.declared.trainable:
                # Before a checkpoint is loaded, for the state to have a place; else after the weights, which it copies.
                one.make_optimizer()
        if self.config.perf.colocate and self.config.perf.offload_train is not False:
            for one in self.on_rank.values():
                one.memory.reserve()
        if not resume:
            foreign = self._start and checkpoints().of_another_program(self._start)
            note = " (weights alone: another program saved it)" if foreign else ""
            return Resume(0, None, self.actor.declared.source + note)
        parts = {name: (one.wrapped, one.optimizer, one.scheduler) for name, one in self.trained.items()}
        iteration, state = checkpoints().load(paths.load, parts)
        if frozen is not None and self._frozen() != frozen:
            self._unshare()
        return Resume(iteration, state, f"{paths.load} (rollout {iteration})")

    def close(self) -> None:
        """End the save under way, and take the wrapped models apart: hooks of their gradients hold them, through
        autograd's nodes, where Python's collector sees no cycle. Memory and the threads of process groups would stay as
        long as the process."""
        self.async_save.close()
        for one in self.trained.values():
            for chunk in one.wrapped:
                vars(chunk).clear()

    def place(self, name: str) -> ModelOnRank:
        """The ModelOnRank of a name, or the actor, into whose place that model is swapped for its passes.

        Raises:
            ConfigError: there is no such model.
        """
        if name not in self.on_rank and name not in self._swapped:
            raise ConfigError(f"no model is named {name!r}", code="model-unknown",
                              got=", ".join([*self.on_rank, *self._swapped]),
                              fix="declare it in the hook `models`, or add --use-kl-loss for the reference")
        return self.on_rank.get(name, self.actor)

    @contextmanager
    def at(self, name: str) -> Iterator[ModelOnRank]:
        """The ModelOnRank that holds the weights of `name` inside.

        Raises:
            ConfigError: there is no such model.
        """
        place = self.place(name)
        if name in self.on_rank:
            yield place
            return
        moving = self._shares(name)
        key = "the actor's moving weights" if moving else "the actor"
        actor = self.actor.copy(self._copies.get(key), moving)
        if not cpu.no_cuda():  # pinning takes longer than the copy itself; without a GPU it is only memory
            self._copies[key] = actor
        self.actor.put(self._copies[name], moving)
        folder, self.actor.folder = self.actor.folder, folder_of(self._swapped[name], self.config)
        try:
            yield self.actor
        finally:
            self.actor.folder = folder
            self.actor.put(actor, moving)

    def _shares(self, name: str) -> bool:
        """Whether a model that is swapped in has the actor's frozen weights."""
        return not self._apart and self._swapped[name] == self.actor.declared.source

    def _frozen(self) -> list[float]:
        """Numbers that are others if what is frozen in the actor is."""
        return [float(number) for one in self.actor.parameters() if not one.requires_grad
                for number in (one.sum(dtype=torch.float64), torch.linalg.vector_norm(one, dtype=torch.float64))]

    def _unshare(self) -> None:
        """What is frozen now has trained before the checkpoint: models that come from the start get it as it was."""
        actor, sharing = self.actor.copy(), [name for name in self._swapped if self._shares(name)]
        self.actor.fill(self.actor.declared.source)
        self._apart = True
        for name in sharing:
            self._copies[name] = self.actor.copy()
        self.actor.put(actor)

    def offload(self, tags: Sequence[str]) -> None:
        """See stages/step.py. Models that are swapped in are in host memory anyhow."""
        state = [tag for tag in tags if tag == OPTIMIZER]
        for one in self.on_rank.values():
            one.memory.offload([tag for tag in tags if tag != OPTIMIZER])
        empty_cache()  # before other copies start, which giving memory back would wait for
        for one in self.on_rank.values():
            one.memory.offload(state, wait=False)
        if state and (WEIGHTS in tags or not self._room()):
            for one in self.on_rank.values():
                one.memory.settle()
            empty_cache()

    def _room(self) -> bool:
        """Whether an engine's weights and a sync's buckets fit beside optimizer state that has not left yet."""
        if cpu.no_cuda() or self._served is None:
            return False
        buckets = 2 * self.config.perf.update_weight_buffer_size
        return torch.cuda.mem_get_info()[0] > 1.1 * self._served + buckets + MARGIN

    @functools.cached_property
    def _served(self) -> float | None:
        """Bytes of an engine's weights on one GPU; None where config.json does not say."""
        size = estimate.dimensions_of(self.config)
        return size and engine_weights.weights(self.config, size) / self.config.perf.rollout_num_gpus_per_engine

    def onload(self, tags: Sequence[str]) -> None:
        """See stages/step.py."""
        for one in self.on_rank.values():
            one.memory.onload(tags)

    def save(self, folder: Path, rollout_id: int, state: dict) -> None:
        """A checkpoint after which rollout `rollout_id` is the next; --async-save goes on with it after this."""
        paths, parts = self.config.checkpoint, {}
        whole, beside = not paths.no_save_optim, self.async_save if paths.async_save else None
        for name, one in self.trained.items():
            one.settle()
            one.memory.arrived()
            parts[name] = (one.wrapped, one.optimizer, one.scheduler) if whole else (one.wrapped, None, None)
        checkpoints().save(folder, rollout_id, parts, state=state, async_save=beside)

    def stream(self, *, stacked: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor under its Hugging Face names; every rank goes through it. See weights.hf_stream."""
        self.actor.settle()
        return weights.hf_stream(self.actor.chunks, self.actor.weight_map, stacked=stacked)

    def for_engine(self, *, stacked: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """`stream` as the hook export_weights leaves it, which sees tensors as checkpoints have them."""
        if self._outgoing is None:
            return self.stream(stacked=stacked)
        plain = self.stream()
        outgoing = self._outgoing(plain)
        if outgoing is plain:  # the plugins leave this run's alone
            return self.stream(stacked=stacked)
        if stacked and any(rule.experts for rule in self.actor.weight_map.rules):
            weights.one_by_one("a plugin changes the stream (hook export_weights)")
        return outgoing

    def export(self, folder: Path, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The actor's stream as a Hugging Face directory; one rank writes it."""
        whole = itertools.chain(stream, carried(self.actor.folder, self.actor.weight_map))
        weights.export_hf(folder, self.actor.folder, whole, beside=True,
                          config=weights.export_keys(self.actor.folder, self.actor.weight_map))


def empty_cache() -> None:
    """What is free on this GPU is so for other processes, too."""
    if not cpu.no_cuda():
        torch.cuda.empty_cache()
