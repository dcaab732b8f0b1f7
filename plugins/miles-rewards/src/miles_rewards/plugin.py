"""The plugin: options and hooks. Every scorer has a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError, RewardError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RewardsOptions:
    """What the graders in processes of their own may take."""

    grading_timeout: float = option(
        3.0, "CPU seconds for an answer, and half of rm_timeout for all answers to a prompt; longer ones score 0."
    )
    grading_processes: int = option(
        2, "Maximum number of processes that compare with SymPy, and that check instructions.")


class Rewards:
    """The rule-based scorers of radixark Miles and slime: deepscaler, dapo, f1, gpqa, ifbench and others; gsm8k."""

    provides = ("labels:deepscaler", "labels:gemma_math", "labels:dapo", "labels:boxed_dapo", "labels:f1",
                "labels:boxed_f1", "labels:gsm8k")

    def __init__(self, options: RewardsOptions, config: RunConfig):
        from miles_rewards.deepscaler import Comparison
        from miles_rewards.ifbench import Checkers

        for name in ("grading_timeout", "grading_processes"):
            if not getattr(options, name) > 0:
                raise ConfigError(f"{name} should be positive", code="option-not-positive", got=getattr(options, name),
                                  who=f"rewards.{name}")
        self._seed, self._config = config.rollout.rollout_seed, config
        group = max(config.rollout.n_samples_per_prompt, config.eval.n_samples_per_eval_prompt)
        seconds = min(options.grading_timeout, config.rollout.rm_timeout / 2 / group)  # a whole group has rm_timeout
        self._comparison = Comparison(seconds, options.grading_processes)
        self._checkers = Checkers(seconds, options.grading_processes)

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """The checkers of IFBench are needed where the run samples, which may be another machine than this one."""
        from miles_rewards.ifbench import INSTALL, installed

        if asks_ifbench(config) and not installed():
            note(f"the checkers of IFBench are not installed here: {INSTALL}")
        return config

    @hookimpl
    def begin(self) -> None:
        """
        Raises:
            ConfigError: a run that needs the checkers of IFBench starts without them.
        """
        from miles_rewards.ifbench import INSTALL, installed

        if asks_ifbench(self._config) and not installed():
            raise ConfigError("the checkers of IFBench are not installed", code="ifbench-not-installed",
                              who="rollout.rm_type", fix=INSTALL)

    @hookimpl("reward", name="deepscaler")
    def deepscaler(self, sample: Sample) -> float:
        """1.0 when the last \\boxed{...} after the thinking equals the label, as text or by SymPy."""
        from miles_rewards.deepscaler import after_thinking

        solution = after_thinking(sample.text)
        return _graded(sample, "deepscaler", lambda: self._comparison.right(solution, _label(sample)))

    @hookimpl("reward", name="gemma_math")
    def gemma_math(self, sample: Sample) -> float:
        """As deepscaler, after the last <channel|>, and without one in the whole response."""
        from miles_rewards.deepscaler import after_channel

        solution = after_channel(sample.text)
        return _graded(sample, "gemma_math", lambda: self._comparison.right(solution, _label(sample)))

    @hookimpl("reward", name="dapo")
    def dapo(self, sample: Sample) -> dict[str, float]:
        """`score` is 1 when the last "Answer:" line is the label's integer, else -1; `acc` is 1 or 0."""
        return _dapo(sample, sample.text)

    @hookimpl("reward", name="boxed_dapo")
    def boxed_dapo(self, sample: Sample) -> dict[str, float]:
        """As dapo, of what the last box holds."""
        return _dapo(sample, _boxed(sample))

    @hookimpl("reward", name="f1")
    def f1(self, sample: Sample) -> float:
        """The F1 of the tokens of response and label."""
        from miles_math.answer import without_end_tokens

        from miles_rewards.f1 import f1

        return f1(without_end_tokens(sample.text), _label(sample))

    @hookimpl("reward", name="boxed_f1")
    def boxed_f1(self, sample: Sample) -> float:
        """The F1 of the tokens of the last box and the label."""
        from miles_rewards.f1 import f1

        return f1(_boxed(sample), _label(sample))

    @hookimpl("reward", name="gsm8k")
    def gsm8k(self, sample: Sample) -> float:
        """1.0 when the number behind the last "####" is the label's."""
        from miles_rewards.gsm8k import gsm8k

        return _read(sample, lambda: gsm8k(sample.text, _label(sample)))

    @hookimpl("reward", name="gpqa")
    def gpqa(self, sample: Sample) -> float:
        """1.0 when the response chooses the right letter, or, where it chooses none, holds the right answer's text."""
        return _gpqa(sample, sample.text)

    @hookimpl("reward", name="boxed_gpqa")
    def boxed_gpqa(self, sample: Sample) -> float:
        """As gpqa, of what the last box holds."""
        return _gpqa(sample, _boxed(sample))

    @hookimpl("reward", name="ifbench")
    def ifbench(self, sample: Sample) -> float:
        """1.0 when the response follows every instruction of its row."""
        from miles_math.answer import without_end_tokens

        return self._ifbench(sample, without_end_tokens(sample.text))

    @hookimpl("reward", name="boxed_ifbench")
    def boxed_ifbench(self, sample: Sample) -> float:
        """As ifbench, of what the last box holds."""
        return self._ifbench(sample, _boxed(sample))

    @hookimpl("reward", name="random")
    def random(self, sample: Sample) -> float:
        """0.0 or 1.0, drawn by the run's seed, the prompt and the sample's position."""
        from miles_core.rng import key

        return float(key(self._seed, f"{sample.prompt.stream}/reward", sample.prompt.uid, sample.index) & 1)

    @hookimpl("reward", name="deterministic_random")
    def deterministic_random(self, sample: Sample) -> float:
        """0.0 or 1.0 by a hash of the sample's token ids and its response."""
        import hashlib

        content = f"{sample.tokens.tolist()}{sample.text}".encode("utf-8", "surrogatepass")
        return float(hashlib.sha256(content).digest()[0] % 2)

    @hookimpl
    def finish(self) -> None:
        """End the grading processes."""
        self._comparison.close()
        self._checkers.close()

    def _ifbench(self, sample: Sample, response: str) -> float:
        return _graded(sample, "ifbench", lambda: _read(
            sample, lambda: self._checkers.followed(response, sample.prompt.metadata)))


def asks_ifbench(config: RunConfig) -> bool:
    """Whether a scorer of the run, or of an eval dataset, follows IFBench's instructions."""
    scorers = {*config.rollout.rm_type, *(dataset.get("rm_type") for dataset in config.eval.datasets)}
    return bool(scorers & {"ifbench", "boxed_ifbench"})


def _label(sample: Sample) -> str:
    """
    Raises:
        RewardError: the row has no label.
    """
    if sample.prompt.label is None or not sample.prompt.label.strip():
        raise RewardError(f"{sample.name} has no label to compare its answer with", code="rewards-label-missing",
                          who="rewards", fix="name the dataset's key of the ground truth with --label-key")
    return sample.prompt.label


def _boxed(sample: Sample) -> str:
    """What the last box of the response holds; nothing without one, as in radixark Miles."""
    from miles_rewards.boxes import last_box

    return last_box(sample.text) or ""


def _dapo(sample: Sample, response: str) -> dict[str, float]:
    from miles_rewards.dapo import dapo

    verdict = _read(sample, lambda: dapo(response, _label(sample)))
    sample.metadata["dapo_pred"] = verdict["pred"]
    return {"score": float(verdict["score"]), "acc": float(verdict["acc"])}


def _gpqa(sample: Sample, response: str) -> float:
    from miles_rewards.gpqa import gpqa

    prompt = sample.prompt
    label = prompt.label if prompt.raw_label is None else prompt.raw_label
    return _read(sample, lambda: gpqa(response, label, prompt.metadata))


def _read(sample: Sample, ask: Callable[[], T]) -> T:
    """
    Raises:
        RewardError: the row cannot be read as the scorer needs it.
    """
    try:
        return ask()
    except (ValueError, OverflowError) as error:
        raise RewardError(f"{sample.name} cannot be scored: what its row holds does not fit",
                          code="rewards-row-unsuitable", got=str(error)[:200], who="rewards",
                          fix="correct the row, or check --label-key and --metadata-key") from None


def _graded(sample: Sample, scorer: str, ask: Callable[[], bool]) -> float:
    """A verdict as a number. An answer that nobody can judge scores 0, and the figure SCORER_ungraded counts it."""
    from miles_math.processes import Ungradable

    figures = sample.metadata.setdefault("figures", {})
    figures[f"{scorer}_ungraded"] = 0.0
    try:
        return float(ask())
    except Ungradable as reason:
        figures[f"{scorer}_ungraded"] = 1.0
        sample.metadata[f"{scorer}_ungraded"] = str(reason)
        return 0.0
