"""The column `opd_reverse_kl`: from the sampled tokens' log-probs, or by passes over the k likeliest tokens.

With top-k, what one model finds likely has to be known before the other can be asked about it. Tokens and log-probs
[R, k] ride in columns from one pass to the next, and are dropped after the last.

    only-student            student's top k; teacher at these
    only-teacher            teacher's top k; student at these
    intersection union xor  teacher's top k; student's top k, and at the teacher's; teacher at the student's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from miles_core.errors import TrainError
from miles_opd.reverse_kl import chosen, reverse_kl

if TYPE_CHECKING:
    from miles_core.stages.step import ScoredRows, TrainerAccess
    from miles_core.types import Sample
    from miles_opd.plugin import OpdOptions

Found = Mapping[str, torch.Tensor]
CARRIED = ("opd_student_tokens", "opd_student_top", "opd_teacher_tokens", "opd_teacher_top", "opd_student_at_teacher")


def fill(access: TrainerAccess, options: OpdOptions, student: str) -> None:
    """Fill `opd_reverse_kl` of every sample, [R] float32, 0 where it is not trained on.

    Args:
        student: column of the student's log-probs of the sampled tokens.

    Raises:
        TrainError: a sample has not been to the teacher's server.
    """
    here = options.opd_type == "megatron"
    needed = "opd_teacher_tokens" if options.opd_log_prob_top_k else "teacher_log_probs"
    if not here and (left := next((s for s in access.samples if needed not in s.columns), None)) is not None:
        raise TrainError(f"no teacher's server has scored {left.name}", code="opd-sample-not-scored", who="plugin opd",
                         fix="saved rollouts need the column already; otherwise see --rm-type")
    if options.opd_log_prob_top_k:
        _TopK(access, options).run(here)
    elif here:
        access.forward("teacher", lambda rows: {"teacher_log_probs": rows.log_probs()})
    for sample in access.samples:
        columns, trained = sample.columns, sample.columns["loss_mask"] > 0
        if options.opd_log_prob_top_k:
            for name in CARRIED:
                columns.pop(name, None)
            divergence = columns.get("opd_reverse_kl", 0.0)
        else:
            divergence = columns[student] - columns["teacher_log_probs"] if trained.any() else 0.0
        columns["opd_reverse_kl"] = np.where(trained, divergence, 0).astype(np.float32)


def penalty(sample: Sample, student: str, *, baseline: bool) -> np.ndarray:
    """What comes off the advantage of each token, [R] float32: the reverse KL D.

    The top-k estimate of D looks at the context of a token and not at which one was drawn, so that as its advantage D
    has a gradient of 0 in expectation: it weights positions. As a `baseline` it leaves the expected gradient of the
    sampled token's reverse KL as it is and takes off most of its variance:

        log p_student(token) - log p_teacher(token) - D
    """
    columns = sample.columns
    if not baseline:
        return columns["opd_reverse_kl"]
    trained = columns["loss_mask"] > 0
    sampled = columns[student] - columns["teacher_log_probs"] if trained.any() else 0.0
    return np.where(trained, sampled - columns["opd_reverse_kl"], 0).astype(np.float32)


def metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the trained tokens: rollout/opd_reverse_kl and, for sampled tokens, rollout/teacher_log_probs."""
    means = {}
    for name in ("opd_reverse_kl", "teacher_log_probs"):
        rows = [s.columns[name][s.columns["loss_mask"] > 0] for s in samples if name in s.columns]
        if values := [row for row in rows if row.size]:
            means[f"rollout/{name}"] = float(np.concatenate(values).mean(dtype=np.float64))
    return means


class _TopK:
    def __init__(self, access: TrainerAccess, options: OpdOptions):
        self.access, self.k, self.mode = access, options.opd_log_prob_top_k, options.opd_reward_weight_mode
        self.strategy = options.opd_top_k_strategy

    def run(self, here: bool) -> None:
        """All passes; a teacher behind a server has filled the columns of the first already."""
        if self.strategy == "only-student":
            self.access.forward("actor", lambda rows: self._best(rows, "student"))
            self.access.forward("teacher", self._teacher_at_student)
            return
        if here:
            self.access.forward("teacher", lambda rows: {
                **self._best(rows, "teacher"), "teacher_log_probs": rows.log_probs()})
        if self.strategy == "only-teacher":
            self.access.forward("actor", self._student_at_teacher)
            return
        self.access.forward("actor", lambda rows: {
            **self._best(rows, "student"), "opd_student_at_teacher": _at(rows, "teacher")})
        self.access.forward("teacher", self._both)

    def _best(self, rows: ScoredRows, whose: str) -> Found:
        tokens, log_probs = rows.top_k(self.k)
        return {f"opd_{whose}_tokens": tokens, f"opd_{whose}_top": log_probs}

    def _teacher_at_student(self, rows: ScoredRows) -> Found:
        return {**self._over_all(rows.rows["opd_student_top"], _at(rows, "student")),
                "teacher_log_probs": rows.log_probs()}

    def _student_at_teacher(self, rows: ScoredRows) -> Found:
        return self._over_all(_at(rows, "teacher"), rows.rows["opd_teacher_top"])

    def _over_all(self, student: torch.Tensor, teacher: torch.Tensor) -> Found:
        everything = torch.ones_like(student, dtype=torch.bool)
        return {"opd_reverse_kl": reverse_kl(student, teacher, everything, self.mode)}

    def _both(self, rows: ScoredRows) -> Found:
        known = rows.rows
        member = chosen(known["opd_student_tokens"], known["opd_teacher_tokens"], self.strategy)
        student = torch.cat([known["opd_student_top"], known["opd_student_at_teacher"]], 1)
        teacher = torch.cat([_at(rows, "student"), known["opd_teacher_top"]], 1)
        normalised = self.strategy != "xor"
        return {"opd_reverse_kl": reverse_kl(student, teacher, torch.cat(member, 1), self.mode, normalised)}


def _at(rows: ScoredRows, whose: str) -> torch.Tensor:
    """[N, k] log-probs of the tokens that one model finds likeliest."""
    return rows.log_probs(rows.rows[f"opd_{whose}_tokens"].to(torch.int64))
