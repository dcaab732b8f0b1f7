"""Resume: what a checkpoint holds beside the trainer's weights goes back to where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, MilesError, StateError
from miles_core.hosts import Handle
from miles_core.plugins import state
from miles_core.plugins.bind import Hooks
from miles_core.record.journal import Journal
from miles_core.stages.prompts import PromptSource
from miles_core.stages.step import Trainer
from miles_core.types import Rank


async def restore(roles: Sequence[Hooks], trainer: Handle, saved: dict, config: RunConfig, journal: Journal) -> None:
    """Give every plugin its state, in these roles and on each rank of the trainer.

    Raises:
        StateError: see `state.restore`.
    """
    plugins, drop = saved.get("plugins", {}), config.checkpoint.drop_plugin_state
    notes = state.restore(roles, plugins, drop)
    for note in [*notes, *await trainer.restore_plugins(plugins, drop)]:
        journal.message("info", note)


def restore_prompts(config: RunConfig, prompts: PromptSource | None, saved: dict, journal: Journal) -> bool:
    """Let the prompt source go on where the checkpoint was taken; False where it begins anew instead.

    Raises:
        StateError: the checkpoint's position is of another source, or this one cannot read it.
    """
    name = config.rollout.prompt_source
    before = saved.get("prompt_source", name)
    if prompts is None:
        return True
    if before in config.checkpoint.drop_plugin_state:
        journal.message("info", f"prompt source {name} begins anew: the position of {before} is left out, as "
                                "--drop-plugin-state says")
        return False
    who, anew = f"prompt source {name!r}", f"start {name} afresh with --drop-plugin-state {before}"
    if before != name:
        raise StateError("the saved position belongs to another prompt source", code="prompt-source-changed",
                         got=f"saved by {before!r}", who=who, fix=f"resume with --prompt-source {before}, or {anew}")
    try:
        prompts.load_state_dict(saved["prompts"])
    except MilesError:
        raise
    except Exception as error:
        raise StateError("its saved position cannot be loaded", code="prompt-position-unloadable",
                         got=f"{type(error).__name__}: {error}", who=who,
                         fix=f"resume with the version that saved it, or {anew}") from error
    then, data = saved["prompts"], getattr(prompts, "data", None)
    if isinstance(then, dict) and then.get("data", data) != data:
        journal.message("info", "resumed with other prompts: the content of --prompt-data is not what it was")
    return True


def check_same_data(config: RunConfig, prompts: PromptSource | None, state: dict) -> None:
    """
    Raises:
        CheckpointError: the groups under way in a checkpoint are of other prompts than this run's.
    """
    if prompts is None or state.get("data") != prompts.data:
        raise CheckpointError("the checkpoint's unfinished groups belong to another dataset",
                              who=f"--load {config.checkpoint.load}, --prompt-data {config.rollout.prompt_data}",
                              code="unfinished-groups-of-other-data", fix="resume with the prompts of that run, or "
                              "start a new run from its weights with --ref-load")


class Hosted:
    """A trainer of whatever kind and its plugins: what they remember is no matter of the trainer's author."""

    def __init__(self, trainer: Trainer, hooks: Hooks, rank: Rank, steps: int | None):
        self._trainer, self._hooks, self._rank, self._steps = trainer, hooks, rank, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def step(self, index: int) -> dict[str, float]:
        return self._trainer.step(index) | (self._hooks.timings() if index + 1 == self._steps else {})

    def close(self) -> None:
        try:
            if self._hooks.finish is not None:
                self._hooks.finish("closed")
        finally:
            self._trainer.close()

    def plugin_state(self) -> dict[str, dict]:
        """Rank -> state of the plugins in the trainer's role there."""
        return {str(self._rank.index): state.collect((self._hooks,))}

    def restore_plugins(self, saved: dict, drop: Sequence[str]) -> list[str]:
        """The inverse, from what `state.with_ranks` gave; returns what to announce."""
        return state.restore((self._hooks,), {name: one for name, one in saved.items() if name not in drop},
                             rank=self._rank)
