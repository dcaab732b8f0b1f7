"""The plugin: options and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.reading import format_of
from miles_reasoning_gym.curriculum import Curriculum
from miles_reasoning_gym.tasks import of_path, tasks_of

if TYPE_CHECKING:
    from miles_core.stages.prompts import PromptSource, Records
    from miles_core.types import Group, Sample

NAME = "reasoning-gym"
HOW = {"tag": "{question}\n\nThink step by step. Then give the final answer, and nothing else, between <answer> and "
              "</answer>.",
       "boxed": "{question}\n\nThink step by step. Then give the final answer, and nothing else, in \\boxed{{}}.",
       "text": "{question}\n\nGive the final answer, and nothing else."}
"""Where the answer stands -> the prompt that asks for it."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymOptions:
    """Which tasks, how they are put, and when they become harder."""

    tasks: list[str | dict[str, object]] = option(
        [], "Tasks by name, or tables of name, weight, config (the task's own), curriculum and level; as flags, JSON.")
    answer: Literal["tag", "boxed", "text"] = option(
        "tag", "Where the answer stands: in the last <answer> tags, the last \\boxed{}, or the whole response.")
    prompt: str | None = option(
        None, "How a problem is put: a format of {question} and what its metadata hold; default: as answer needs it.")
    epoch: int = option(1000, "Prompts of an epoch, for --num-epoch.", within=(1,))
    curriculum_up: float = option(0.8, "Mean score from which a level rises.", within=(0, 1))
    curriculum_down: float = option(0.2, "Mean score up to which a level falls.", within=(-1, 1))
    curriculum_answers: int = option(64, "Answers after which a level is judged.", within=(1,))
    scoring_timeout: float = option(
        3.0, "CPU seconds for an answer, and half of rm_timeout for all answers to a prompt; longer ones score 0.",
        within=(0.01,))
    scoring_processes: int = option(2, "Maximum number of processes that score.", within=(1,))


class ReasoningGym:
    """Problems of the package reasoning-gym: prompts, evaluation sets, their scorers and a curriculum."""

    provides = ("made:gym",)

    def __init__(self, options: ReasoningGymOptions, config: RunConfig):
        self._options, self._config, self._tasks = options, config, tasks_of(options.tasks)
        self._prompt = HOW[options.answer] if options.prompt is None else options.prompt
        if not options.curriculum_down < options.curriculum_up:
            raise ConfigError("a level cannot rise and fall at the same score", code="reasoning-gym-curriculum-bounds",
                              got=f"up {options.curriculum_up:g}, down {options.curriculum_down:g}",
                              who="reasoning-gym.curriculum_down", fix="set it below curriculum_up")
        self._curriculum = Curriculum(
            {task.name: task.level for task in self._tasks if task.level is not None}, options.curriculum_up,
            options.curriculum_down, options.curriculum_answers)
        self._refuse(config)

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Draw a problem of each task before a model is loaded.

        Raises:
            ConfigError: a task refuses its config or has fewer levels; a filter would hide answers from the curriculum.
        """
        before = next(iter(plan.get("order", {}).get("filter_group", [NAME])))
        if self._curriculum.levels and before != NAME:
            raise ConfigError("a filter before reasoning-gym hides from the curriculum what it drops",
                              code="reasoning-gym-after-filter", who="plugins", got=before,
                              fix=f"name {NAME} before {before}: where every answer is right, groups are dropped, and "
                              "the level would never rise")
        from miles_reasoning_gym import problems
        from miles_reasoning_gym.source import row

        for task in self._tasks if self._config.rollout.prompt_source == NAME else ():
            if task.level is not None and (levels := problems.levels(task)) <= task.level:
                raise ConfigError("the curriculum has no such level", code="reasoning-gym-level-above", got=task.level,
                                  who=f"reasoning-gym.tasks, {task.name}", fix=f"it has 0 to {levels - 1}")
            row(((), ()), self._prompt, task, task.level, problems.number(self._config.rollout.rollout_seed, 0))

    @hookimpl
    def prompt_source(self, config: RunConfig, tokenizer: Any) -> PromptSource:
        """Problems of `tasks` without end, drawn by the run's seed and their number."""
        from miles_core.stages.prompts import rows_of
        from miles_reasoning_gym.source import GymPrompts

        return GymPrompts(self._tasks, self._curriculum, rows_of(config), self._prompt, tokenizer,
                          seed=config.rollout.rollout_seed, epoch=self._options.epoch)

    @hookimpl("read_rows", name="gym")
    def gym(self, path: str, most: int | None) -> Records:
        """Problems a to b - 1 of a task, chain_sum.gym@[0:256], or of a level, chain_sum:3.gym@[0:256].

        They are the same in every run, and their seeds are not those of training.
        """
        from miles_core.stages.prompts import rows_of
        from miles_reasoning_gym.rows import GymRows

        every = [rows_of(self._config, one) for one in (None, *self._config.eval.every)]
        keys = sorted({one.input_key for one in every}), sorted({one.label_key for one in every if one.label_key})
        return GymRows(path, of_path(path, self._tasks), keys, self._prompt, most)

    @hookimpl
    def reward(self, sample: Sample) -> float:
        """What the task gives the answer, mostly 1.0 or 0.0; 0.0 where scoring takes too long or the task fails."""
        from miles_math.processes import Ungradable

        from miles_reasoning_gym import problems

        options, rollout = self._options, self._config.rollout
        problem = problems.asked_of(sample)
        group = max(rollout.n_samples_per_prompt, self._config.eval.n_samples_per_eval_prompt)
        seconds = min(options.scoring_timeout, rollout.rm_timeout / 2 / group)
        figures = sample.metadata.setdefault("figures", {})
        figures["reasoning_gym_ungraded"], score = 0.0, 0.0
        try:
            score = problems.score(problems.processes(seconds, options.scoring_processes), problem, options.answer,
                                   sample.text)
        except Ungradable as reason:
            figures["reasoning_gym_ungraded"] = 1.0
            sample.metadata["reasoning_gym_ungraded"] = str(reason)
        figures[f"reasoning_gym/{problem['task']}"] = score
        if problem["level"] is not None:
            figures[f"reasoning_gym/{problem['task']}/level"] = float(problem["level"])
        return score

    @hookimpl
    def filter_group(self, group: Group) -> Group:
        """Tells the curriculum of every group, also of those that a filter after it drops."""
        problem = group.prompt.metadata.get("reasoning_gym")
        if problem is not None and problem["level"] is not None:
            self._curriculum.scored(group.prompt.uid, problem["task"], problem["level"],
                                    [sample.rewards[NAME] for sample in group.samples if NAME in sample.rewards])
        return group

    @hookimpl
    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """Levels move here, once in a rollout; rewards do not change."""
        self._curriculum.end_of_rollout(max((group.prompt.uid for group in groups), default=-1))
        return groups

    @hookimpl
    def finish(self) -> None:
        """End the processes that are idle."""
        from miles_reasoning_gym import problems

        problems.close()

    def _refuse(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: no task, a curriculum that could not measure, a path that names no problems.
        """
        rollout = config.rollout
        if rollout.prompt_source == NAME and not self._tasks:
            raise ConfigError("no task is named", code="reasoning-gym-no-task", who="reasoning-gym.tasks", got="none",
                              fix='tasks = ["chain_sum"]')
        if rollout.prompt_source == NAME and self._curriculum.levels and NAME not in rollout.rm_type:
            raise ConfigError("the curriculum moves by the scorer reasoning-gym, which the run does not use",
                              code="reasoning-gym-unscored", who="rollout.rm_type", got=", ".join(rollout.rm_type),
                              fix=f'rm_type = ["{NAME}"]')
        paths = [one["path"] for one in config.eval.every]
        for path in [*paths, *([rollout.prompt_data] if rollout.prompt_source == "rows" else [])]:
            if path is not None and format_of(path) == "gym":
                of_path(path, self._tasks)
