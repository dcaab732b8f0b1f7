"""The plugin: options and hooks. How the engine is made is in serving.py, when it evaluates in dedicated.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.config import RunConfig, option
from miles_core.evaluation import Evaluation
from miles_core.hookspecs import hookimpl


@dataclass(frozen=True, kw_only=True)
class DedicatedEvalOptions:
    """The engine that evaluates, and what happens when it is slower than training."""

    eval_num_gpus: int | None = option(
        None, "GPUs of the servers that evaluate; default: one server's. 0: the run's own engine evaluates.",
        flags=("--eval-num-gpus",), within=(0,))
    eval_num_gpus_per_engine: int | None = option(
        None, "GPUs of each of them, as many as --rollout-num-gpus-per-engine.", flags=("--eval-num-gpus-per-engine",),
        within=(1,))
    eval_engine_addrs: list[str] = option(
        [], "Addresses of SGLang servers that already run and evaluate, HOST:PORT.", flags=("--eval-engine-addrs",))
    eval_overflow_policy: Literal["backpressure", "skip"] = option(
        "backpressure", "When one is due and the one before is under way: training waits, or it is skipped.",
        flags=("--eval-overflow-policy",))


class DedicatedEval:
    """Evaluates on an engine of its own, which keeps the weights of a version while training goes on."""

    def __init__(self, options: DedicatedEvalOptions, config: RunConfig):
        self._options = options

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """The servers' GPUs.

        Raises:
            ConfigError: there are none for them.
        """
        from miles_dedicated_eval.serving import derive

        return derive(config, self._options, note)

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """What evaluates, and what happens when that is slower than training."""
        from miles_dedicated_eval.serving import lines

        return lines(config, self._options)

    @hookimpl
    def evaluation(self, evaluation: Evaluation, parts: Any) -> Evaluation:
        """The run's eval datasets on an engine of their own."""
        from miles_dedicated_eval.dedicated import DedicatedEvaluation
        from miles_dedicated_eval.serving import engine_of, serves

        if not (evaluation.datasets and serves(parts.config, self._options)):
            return evaluation
        engine, placement = engine_of(parts, self._options)
        dedicated = DedicatedEvaluation(evaluation, engine, placement,
                                        skips=self._options.eval_overflow_policy == "skip")
        dedicated.serve()
        return dedicated
