"""The plugin: options and hooks. Formulas are in reverse_kl.py, the trainer's passes in passes.py, the client of a
teacher's server in server.py, the comparison of tokenizers in vocabulary.py; all imported when first used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.columns import Align, Column
from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.stages.models import Model

if TYPE_CHECKING:
    import numpy as np

    from miles_core.stages.advantage import Values
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch, Sample
    from miles_opd.server import Servers


@dataclass(frozen=True, kw_only=True)
class OpdOptions:
    """Who the teacher is and how far the student is from it."""

    use_opd: bool = option(
        False, "Subtract the reverse KL to the teacher from the advantages of any estimator.", flags=("--use-opd",)
    )
    opd_type: Literal["megatron", "sglang"] | None = option(
        None, "Teacher in the trainer or behind a server; default: the one that --opd-teacher-load or -urls names.",
        flags=("--opd-type",),
    )
    opd_kl_coef: float = option(1.0, "Weight of the reverse KL.", flags=("--opd-kl-coef",))
    opd_log_prob_top_k: int = option(
        0, "Compare the k most likely tokens at each position; 0 compares only the sampled token.",
        flags=("--opd-log-prob-top-k",),
    )
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = option(
        "only-student", "Model whose k most likely tokens are compared.", flags=("--opd-top-k-strategy",)
    )
    opd_reward_weight_mode: Literal["student_p", "teacher_p", "none"] = option(
        "student_p", "Weighting of these tokens.", flags=("--opd-reward-weight-mode",)
    )
    opd_top_k_baseline: bool = option(
        False, "Use the top-k estimate as a baseline of the sampled token's reverse KL instead of replacing it."
    )
    opd_teacher_load: str | None = option(
        None, "Checkpoint of a teacher in the trainer (Hugging Face, or torch_dist of the student's architecture).",
        flags=("--opd-teacher-load",),
    )
    opd_teacher_urls: list[str] = option(
        [], "SGLang servers that score: one URL, or NAME=URL for several teachers.", flags=("--opd-teacher-urls",)
    )
    opd_teacher_key: str = option(
        "opd_teacher", "Key of a prompt's metadata that names its teacher; without it: default.",
        flags=("--opd-teacher-key",),
    )
    opd_teacher_timeout: float = option(60.0, "Seconds allowed for one request, including retries.")
    opd_teacher_concurrency: int = option(64, "Maximum number of concurrent requests to servers.")

    @property
    def teachers_top(self) -> int:
        """How many of the teacher's own likeliest tokens the strategy looks at."""
        return 0 if self.opd_top_k_strategy == "only-student" else self.opd_log_prob_top_k

    def servers(self) -> Servers:
        """The teachers that are behind servers."""
        from miles_opd.server import Servers

        return Servers(self.opd_teacher_urls, key=self.opd_teacher_key, timeout=self.opd_teacher_timeout,
                       top_k=self.teachers_top, concurrency=self.opd_teacher_concurrency)


class Opd:
    """On-policy distillation: the student samples, and a teacher says of each token how likely it finds it."""

    provides = ("weights:opd_teacher_load",)

    def __init__(self, options: OpdOptions, config: RunConfig):
        from miles_opd.checks import checked

        self.options, self.config = checked(options, config), config
        self._servers: Servers | None = None

    @hookimpl
    def columns(self) -> Iterable[Column]:
        """What the teacher said, and the reverse KL; with top-k also tokens and their log-probs, between two passes."""
        yield Column("teacher_log_probs", Align.RESPONSE, missing="pad", owner="opd")
        yield Column("opd_reverse_kl", Align.RESPONSE, missing="pad", owner="opd")
        if self.options.opd_log_prob_top_k:
            for whose in ("student", "teacher"):
                yield Column(f"opd_{whose}_tokens", Align.RESPONSE, "int32", axes=("k",), missing="pad", owner="opd")
                yield Column(f"opd_{whose}_top", Align.RESPONSE, axes=("k",), missing="pad", owner="opd")
            yield Column("opd_student_at_teacher", Align.RESPONSE, axes=("k",), missing="pad", owner="opd")

    @hookimpl
    def models(self) -> dict[str, Model]:
        """The teacher, where the trainer holds it.

        Raises:
            ConfigError: it has another tokenizer than the student, or fewer tokens than top-k asks for.
        """
        from miles_opd.vocabulary import check_vocabulary

        student, teacher = self.config.checkpoint.hf_checkpoint, self.options.opd_teacher_load
        check_vocabulary(str(student), teacher, self.options.opd_log_prob_top_k)
        return {} if teacher is None else {"teacher": Model(teacher)}

    @hookimpl("reward", name="on_policy_distillation")
    async def ask(self, sample: Sample) -> float:
        """Let the sample's server score it; the number is 0, what was learnt is in the columns."""
        if sample.prompt.stream == "train":
            if self._servers is None:
                self._servers = self.options.servers()
            sample.columns |= await self._servers.score(sample)
        return 0.0

    @hookimpl("reward", name="teacher_only")
    def nothing(self, sample: Sample) -> float:
        """0 for every answer: a teacher in the trainer is all that is learnt from."""
        return 0.0

    @hookimpl
    def log_prob(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """After the log-probs, the teacher's, and the reverse KL of every trained token."""
        from miles_opd.passes import fill, metrics

        figures, begin = proceed(), time.perf_counter()
        fill(access, self.options, self._student)
        return figures | metrics(access.samples) | {"perf/teacher_log_probs_time": time.perf_counter() - begin}

    @hookimpl(name="on_policy_distillation")
    def advantage(self, batch: Batch) -> Values:
        """-opd_kl_coef x (log p_student - log p_teacher) of each token."""
        return [-penalty for penalty in self._penalties(batch)]

    @hookimpl
    def shape_advantages(self, batch: Batch) -> Batch:
        """With --use-opd: A_t - opd_kl_coef x reverse KL_t."""
        if self.options.use_opd:
            for sample, penalty in zip(batch.samples, self._penalties(batch), strict=True):
                sample.columns["advantages"] = sample.columns["advantages"] - penalty
        return batch

    @property
    def _student(self) -> str:
        """The column of the student's log-probs."""
        return "rollout_log_probs" if self.config.algorithm.use_rollout_logprobs else "log_probs"

    def _penalties(self, batch: Batch) -> list[np.ndarray]:
        from miles_opd.passes import penalty

        options = self.options
        return [options.opd_kl_coef * penalty(sample, self._student, baseline=options.opd_top_k_baseline)
                for sample in batch.samples]
