"""The plugin: options and hooks. What a plan refuses is in checks.py, the servers in group.py, the scorer in judge.py.

The driver's instance runs the servers and writes their addresses into the run directory, where the scorer reads them:
roles share no objects, and an address changes with a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """The reward model, its servers, and how they are asked."""

    reward_model_path: str | None = option(None, "Hugging Face directory of the reward model, with its tokenizer.",
                                           flags=("--reward-model-path",))
    reward_model_kind: Literal["classifier", "generative"] = option(
        "classifier", "A head that scores (SGLang's /classify), or a model that is asked for a verdict.",
        flags=("--reward-model-kind",))
    reward_num_gpus: int = option(1, "GPUs of the group, beside those of trainer and engines.", within=(1,),
                                  flags=("--reward-num-gpus",))
    reward_num_gpus_per_engine: int = option(1, "GPUs of each of its servers.", within=(1,))
    server_command: list[str] = option([], "Command to start a server; default: this Python -m sglang.launch_server.")
    server_args: list[str] = option([], "Further words of that command, such as --mem-fraction-static 0.8.")
    server_start_timeout: float = option(900.0, "Seconds until a starting server must answer.")
    health_check_interval: float = option(3.0, "Seconds between two looks at each server.")
    health_check_timeout: float = option(30.0, "Seconds without an answer after which a server counts as dead.")
    max_restarts: int = option(3, "How often one server is restarted before the run ends.", within=(0,))
    batch_size: int = option(32, "Most answers in one request of a classifier.", within=(1,))
    concurrency: int = option(16, "Most requests at once.", within=(1,))
    request_timeout: float = option(30.0, "Seconds allowed for one attempt.")
    retries: int = option(4, "Further attempts of a request that failed.", within=(0,))
    class_index: int | None = option(None, "Which number of a classifier with several is the reward.", within=(0,))
    prompt_template: str | None = option(
        None, "What a generative model is asked, or a file with it; {response}, {prompt} and {label} are filled in.")
    score_pattern: str = option(
        r"(-?\d+(?:\.\d+)?)", "Regular expression whose last match in a verdict has the score in its first group.")
    verdict_tokens: int = option(512, "Most tokens of a verdict.", within=(1,))


class RewardModel:
    """Rewards from a reward model on SGLang servers of the run's own."""

    def __init__(self, options: RewardModelOptions, config: RunConfig):
        self.options, self.config = options, config
        self._group: Any = None
        self._judge: Any = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """
        Raises:
            ConfigError: no model, no tokenizer, no GPUs for it, or a question without places.
        """
        from miles_reward_model.checks import check

        check(self.options, config)
        return config

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """The servers, their GPUs, and the memory that the weights take on each."""
        from miles_reward_model.checks import lines

        return lines(self.options, config)

    @hookimpl
    def begin(self, run_dir: Path) -> None:
        """Start the servers and wait until each answers.

        Raises:
            EngineError: one of them does not come up; with the end of its log.
        """
        from miles_reward_model.group import Group

        if self._group is None and not self.config.debug.load_debug_rollout_data:
            self._group = Group(self.options, self.config, Path(run_dir))
            self._group.start()

    @hookimpl(name="reward_model")
    async def reward(self, samples: Sequence[Sample]) -> list[Any]:
        """The reward model's number for each answer of a group."""
        from miles_core.build import load_tokenizer
        from miles_reward_model.judge import Judge, special_tokens

        if self._judge is None:
            ends = special_tokens(load_tokenizer(self.config))
            self._judge = Judge(self.options, Path(str(self.config.checkpoint.run_dir)), ends)
        return list(await self._judge.score(samples))

    @hookimpl
    def finish(self) -> None:
        """End the servers, and the connections to them."""
        group, self._group = self._group, None
        judge, self._judge = self._judge, None
        if group is not None:
            group.stop()
        if judge is not None:
            judge.close()
