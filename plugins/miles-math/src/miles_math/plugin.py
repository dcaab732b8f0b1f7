"""The plugin: options and hooks. Finding answers is in answer.py, comparing them in grading.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError, RewardError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """How answers are found and compared."""

    boxed_only: bool = option(
        True, "Scorer math accepts only answers in \\boxed{...}; off: else the last number or expression."
    )
    format_pattern: str | None = option(
        None, "Regular expression for whole responses in scorer format; default: it ends in its only box."
    )
    grading_timeout: float = option(
        3.0, "CPU seconds for an answer, and half of rm_timeout for all answers to a prompt; longer ones score 0."
    )
    grading_processes: int = option(2, "Maximum number of processes that compare answers.")


class Math:
    """Scorers of mathematical answers, graded by math-verify: math, boxed_math and format."""

    provides = ("labels:math", "labels:boxed_math")

    def __init__(self, options: MathOptions, config: RunConfig):
        import re

        from miles_math.grading import Grader

        for name in ("grading_timeout", "grading_processes"):
            if not getattr(options, name) > 0:
                raise ConfigError(f"{name} should be positive", code="option-not-positive", got=getattr(options, name),
                                  who=f"math.{name}")
        try:
            self._pattern = None if options.format_pattern is None else re.compile(options.format_pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError("format_pattern is not a regular expression", got=options.format_pattern,
                              who="math.format_pattern", code="math-pattern-invalid", fix=str(error)) from None
        self.options = options
        group = max(config.rollout.n_samples_per_prompt, config.eval.n_samples_per_eval_prompt)
        seconds = min(options.grading_timeout, config.rollout.rm_timeout / 2 / group)  # a whole group has rm_timeout
        self._grader = Grader(seconds, options.grading_processes)

    @hookimpl("reward", name="math")
    def math(self, sample: Sample) -> float:
        """1.0 when the answer in the last \\boxed{...} equals the label; see the option boxed_only."""
        return self._score(sample, boxed_only=self.options.boxed_only)

    @hookimpl("reward", name="boxed_math")
    def boxed_math(self, sample: Sample) -> float:
        """1.0 when the answer in the last \\boxed{...} equals the label."""
        return self._score(sample, boxed_only=True)

    @hookimpl("reward", name="format")
    def format(self, sample: Sample) -> float:
        """1.0 when the response has the form that was asked for, right or wrong."""
        from miles_math.answer import ends_in_its_only_box, without_end_tokens

        if self._pattern is None:
            return float(ends_in_its_only_box(sample.text))
        return float(self._pattern.fullmatch(without_end_tokens(sample.text)) is not None)

    @hookimpl
    def finish(self) -> None:
        """End the grading processes."""
        self._grader.close()

    def _score(self, sample: Sample, *, boxed_only: bool) -> float:
        from miles_math.processes import Ungradable

        if sample.prompt.label is None or not sample.prompt.label.strip():
            raise RewardError(f"{sample.name} has no label to compare the answer with", who="math",
                              fix="set --label-key to the dataset's ground-truth key", code="math-label-missing")
        try:
            return float(self._grader.grade(sample.text, sample.prompt.label, boxed_only=boxed_only))
        except RewardError as error:
            error.add_note(f"while scoring {sample.name}")
            raise
        except Ungradable as reason:
            sample.metadata["math_ungraded"] = str(reason)
            return 0.0
