"""Every hook, in loop order: its kind, where it runs, how often, its arguments and what it must return.

    kind      how implementations combine
    named     parts under names; the run picks one by name (or the sole offer, or the documented default)
    chain     value in, value out, in the order of the run file
    gather    every result merged; a duplicate key is an error that names both owners
    observe   returns nothing and must not change its arguments
    around    takes the next callable first and returns its result; may change what it passes on

A plugin is a class whose methods, marked with `@hookimpl`, implement hooks; an implementation may take fewer
arguments than its hook, never others. `role` says which of the plugin's instances is called: driver, rollout or
trainer. A named hook marked `part` returns the part itself; the others are called for each unit in `per`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import click
    import numpy as np
    import torch

    from miles_core.columns import Column, Packed
    from miles_core.config import RunConfig
    from miles_core.config.surfaces import Surface
    from miles_core.evaluation import Evaluation
    from miles_core.plugins.select import Selected
    from miles_core.stages.gradients import Gradients
    from miles_core.stages.loss import LossInputs, Metrics, TokenWeights
    from miles_core.stages.models import Model
    from miles_core.stages.placement import Placement
    from miles_core.stages.prompts import PromptSource, Records
    from miles_core.stages.rollout import Engine, Generation, Request, Response
    from miles_core.stages.step import Trainer, TrainerAccess
    from miles_core.stages.sync import WeightSync
    from miles_core.types import Batch, Drop, Group, Prompt, Rank, Sample

API = 1
KINDS = ("named", "chain", "gather", "observe", "around")
ROLES = ("driver", "rollout", "trainer")

_spec, _impl = pluggy.HookspecMarker("miles"), pluggy.HookimplMarker("miles")
F = TypeVar("F", bound=Callable[..., Any])


@overload
def hookimpl(spec: F, /) -> F: ...
@overload
def hookimpl(spec: str | None = None, *, name: str | None = None, **refused: object) -> Callable[[F], F]: ...
def hookimpl(spec: Any = None, *, name: str | None = None, **refused: object) -> Any:
    """Mark a method as the implementation of the hook `spec`, the one of the method's own name when left out. Named
    hooks are offered under `name`, the plugin's name when left out; one plugin may offer several. pluggy's tryfirst,
    trylast, wrapper and hookwrapper are refused with a sentence at registration: order is what the run file says."""
    if callable(spec):
        return hookimpl()(spec)

    def mark(function: F) -> F:
        vars(function).update(miles_hook=(spec or function.__name__, name, tuple(refused)))
        return _impl(specname=spec or function.__name__)(function)

    return mark


def hookspec(kind: str, *, role: str, per: str, part: bool = False) -> Callable[[F], F]:
    """Declare a hook; see the module's docstring for the kinds."""

    def mark(function: F) -> F:
        vars(function).update(kind=kind, role=role, per=per, part=part)
        return _spec(function)

    return mark


@hookspec("gather", role="every", per="run")
def columns() -> Iterable[Column]:
    """Data that travels with samples: declared here, then carried from generator to trainer by the core."""


@hookspec("gather", role="plan", per="plan")
def option_surface() -> Iterable[Surface]:
    """Flags and keys of an installed program, that no plugin declares; called with default options."""


@hookspec("chain", role="plan", per="plan")
def derive(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Fill in what follows from other settings: an engine's GPUs, a trainer's hosts. `note` adds a line to the plan."""


@hookspec("chain", role="plan", per="plan")
def check(config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
    """Refuse settings that would silently spoil the run, destroy something or fail late. `config` is complete."""


@hookspec("gather", role="plan", per="plan")
def plan_lines(config: RunConfig, plugins: Sequence[Selected]) -> Iterable[tuple[str, str]]:
    """(title, line) pairs that --plan prints beside the core's: layout, memory."""


@hookspec("gather", role="plan", per="run")
def diagnose() -> Iterable[object]:
    """Rules of `miles doctor`; called on an instance with default options."""


@hookspec("observe", role="every", per="run")
def finish(status: str) -> None:
    """How it ended: "completed", "failed", "interrupted", "restarting"; "closed" in trainers, which cannot know."""


# ------------------------------------------------------------------------------------------------------- rollout
@hookspec("named", role="plan", per="dataset", part=True)
def read_rows(path: str, most: int | None) -> Records:
    """1: rows of --prompt-data and eval datasets, chosen by the suffix of `path`. A plan reads about `most` bytes."""


@hookspec("named", role="rollout", per="run", part=True)
def prompt_source(config: RunConfig, tokenizer: Any, read: Callable[[str], Records]) -> PromptSource:
    """1: where prompts come from; `read` returns the rows of a path. Default "rows". (--data-source-path)"""


@hookspec("named", role="rollout", per="run", part=True)
def engine(config: RunConfig, tokenizer: Any, placement: Placement, hooks: Any) -> Engine:
    """2: generates tokens from tokens. `placement` provides the hosts of servers. Default "local"."""


@hookspec("chain", role="rollout", per="group")
def prepare_prompt(prompt: Prompt) -> Prompt | Drop:
    """2: changes a prompt before its group is sampled: tokens for images. Also a group that goes on passes."""


@hookspec("named", role="rollout", per="group")
async def generate(prompt: Prompt, generation: Generation) -> list[Sample]:
    """2: samples the group of a prompt with the engine. Default "single-turn". (--custom-generate-function-path)"""


@hookspec("chain", role="rollout", per="request")
def generate_request(request: Request, prompt: Prompt) -> Request:
    """2: changes an engine request, for instance its `want`."""


@hookspec("chain", role="rollout", per="response")
def generate_response(sample: Sample, response: Response) -> Sample:
    """2: copies values of the engine's answer into the sample's columns or metadata."""


@hookspec("named", role="rollout", per="sample")
def reward(sample: Sample, samples: Sequence[Sample]) -> float | dict[str, float] | list[float | dict[str, float]]:
    """3: a scorer of one `sample`, or of `samples`, a whole group; chosen by --rm-type. Returns a number each, or a
    dict with --reward-key. Plain functions run in a thread. Columns are read-only. (--custom-rm-path, --group-rm)"""


@hookspec("named", role="rollout", per="sample")
def combine_rewards(sample: Sample, weights: dict[str, float]) -> float:
    """3: combines `sample.rewards` into one number. Default "weighted-sum"."""


@hookspec("chain", role="rollout", per="group")
def filter_group(group: Group) -> Group | Drop:
    """4: keep a group, changed or not, or return Drop(reason), which is counted. (--dynamic-sampling-filter-path)"""


@hookspec("chain", role="rollout", per="group")
def unfinished(group: Group) -> Group:
    """5: a group that was cancelled, its samples finished or not. Return the part to continue later; without samples,
    the prompt is sampled again. With an implementation, over-sampling loses no token."""


@hookspec("chain", role="rollout", per="group")
def select_from_buffer(groups: list[Group], rollout_id: int) -> list[Group]:
    """1: which cancelled group continues now: the first of the returned ones; an empty list takes a new prompt.
    `groups` are oldest first. (--buffer-filter-path)"""


@hookspec("chain", role="rollout", per="run")
def evaluation(evaluation: Evaluation, parts: Any) -> Evaluation:
    """1 to 3 on eval datasets: when, by which engine, who waits for it. `parts` is build.Parts. (--eval-num-gpus)"""


@hookspec("chain", role="rollout", per="rollout")
def shape_rewards(groups: list[Group]) -> list[Group]:
    """5: changes the rewards of a whole rollout before advantages are computed. (--custom-reward-post-process-path)"""


# ------------------------------------------------------------------------------------------------------- trainer
@hookspec("named", role="trainer", per="run", part=True)
def trainer(config: RunConfig, hooks: Any, columns: Any, rank: Rank) -> Trainer:
    """6 to 8: the trainer of one rank. Default "megatron"."""


@hookspec("gather", role="trainer", per="run")
def models() -> dict[str, Model]:
    """Models that the trainer holds beside the actor, by name: reference, critic, teacher."""


@hookspec("around", role="trainer", per="rollout")
def log_prob(proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
    """6: around the scoring passes, which fill log_probs and ref_log_probs; `access.forward` makes further ones.
    (--custom-megatron-before-log-prob-hook-path)"""


@hookspec("named", role="trainer", per="rollout")
def advantage(batch: Batch) -> Sequence[float | np.ndarray]:
    """6: one number or [R] array per sample of `batch.samples`, groups unsplit. Chosen by --advantage-estimator."""


@hookspec("chain", role="trainer", per="rollout")
def shape_advantages(batch: Batch) -> Batch:
    """6: changes the column `advantages`, after the estimator and before --normalize-advantages."""


@hookspec("around", role="trainer", per="step")
def train_step(proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
    """7, 8: around the actor's optimizer step; `access.step` makes another model's.
    (--custom-megatron-before-train-step-hook-path)"""


@hookspec("around", role="trainer", per="micro-batch")
def microbatch(proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
    """7: around every forward, with its packed columns; `model` names which ("actor", "ref"). Routing replay."""


@hookspec("named", role="trainer", per="micro-batch")
def policy_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """7: [N] per-token loss and per-token metrics; never reduces. Chosen by --policy-loss."""


@hookspec("chain", role="trainer", per="micro-batch")
def token_weights(weights: TokenWeights, inputs: LossInputs) -> TokenWeights:
    """7: a factor and a mask for each token of the policy loss: TIS, IcePop, rejection. Denominators stay."""


@hookspec("gather", role="trainer", per="micro-batch")
def loss_terms(inputs: LossInputs) -> dict[str, tuple[float, torch.Tensor]]:
    """7: name -> (coefficient, [N] term), added to the policy loss. The core's own: kl_loss, entropy_loss."""


@hookspec("named", role="trainer", per="step")
def reduction(samples: Sequence[Sample]) -> np.ndarray:
    """7: [samples] weight of one token of each, fixed before any rejection. "sample" (default), "token", "constant"."""


@hookspec("named", role="trainer", per="step")
def clip_gradients(gradients: Gradients) -> float:
    """8: scale gradients in place before the optimizer; returns grad_norm. By --clip-gradients; default "norm"."""


@hookspec("chain", role="trainer", per="sync")
def export_weights(stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """9: changes the stream of the actor's names and tensors to the engine, as a generator that every rank runs."""


@hookspec("chain", role="trainer", per="run")
def save_weights(stream: Iterator[tuple[str, torch.Tensor]], folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Changes the stream of the actor's names and tensors into --save-hf, published once every rank has consumed it."""


# -------------------------------------------------------------------------------------------------------- driver
@hookspec("named", role="driver", per="command")
def commands() -> click.Command:
    """A command of `miles` under the offered name; `miles --help` shows the first line of the method's docstring."""


@hookspec("named", role="driver", per="run", part=True)
def weight_sync(config: RunConfig) -> WeightSync:
    """9: how weights get from the trainer to the engine. Default "in-process"."""


@hookspec("named", role="driver", per="run", part=True)
def placement(config: RunConfig) -> Placement:
    """Where ranks and servers run, and leases of the hardware. Default "local": processes of this machine."""


@hookspec("observe", role="driver", per="run")
def begin(plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
    """Trackers. `plan`: plan.json's and its "name"; `run_id`: of all starts; `resumed_from`: None from scratch."""


@hookspec("observe", role="driver", per="rollout")
def metrics(rollout_id: int, values: dict[str, float], run_dir: Path) -> None:
    """Trackers. All metrics of a rollout, or of an eval, by Miles's names; `rollout_id` is the step."""


@hookspec("observe", role="driver", per="rollout")
def samples(rollout_id: int, dataset: str | None, samples: Sequence[Sample], run_dir: Path) -> None:
    """The samples of a batch, or the answers to an eval `dataset`: tables, histograms, media in metadata."""
