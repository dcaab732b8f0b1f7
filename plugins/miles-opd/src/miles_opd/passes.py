"""The column `opd_reverse_kl`: from the sampled tokens' log-probs, or by passes over the k likeliest tokens.

With top-k, what one model finds likely has to be known before the other can be asked about it. Tokens and log-probs
[R, k] ride in columns from one pass to the next, and are dropped after the last.

    only-student            student's top k; teacher at these
    only-teacher            teacher's top k; student at these
    intersection union xor  teacher's top k; student's top k, and at the teacher's; teacher at the student's

A teacher behind a server has said its top k before the first pass, and is asked about the student's after the last.
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
    needed = "opd_teacher_tokens" if options.teachers_top else "teacher_log_probs"
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
        self.access, self.options, self.strategy = access, options, options.opd_top_k_strategy

    def run(self, here: bool) -> None:
        """All passes; a teacher behind a server has filled the columns of the first already."""
        theirs = self.options.teachers_top > 0
        if here and theirs:
            self.access.forward("teacher", lambda rows: {
                **self._best(rows, "teacher"), "teacher_log_probs": rows.log_probs()})
        if self.strategy == "only-teacher":
            self.access.forward("actor", lambda rows: self._over_all(
                _at(rows, "teacher"), rows.rows["opd_teacher_top"]))
            return
        self.access.forward("actor", lambda rows: {
            **self._best(rows, "student"), **({"opd_student_at_teacher": _at(rows, "teacher")} if theirs else {})})
        if not here:
            self._ask()
            return
        self.access.forward("teacher", lambda rows: {
            **self._compared(rows.rows, _at(rows, "student")), **({} if theirs else {
                "teacher_log_probs": rows.log_probs()})})

    def _ask(self) -> None:
        """The last pass where the teacher is behind a server."""
        from miles_opd.asking import teacher_at_student

        samples = self.access.samples
        for sample, at_student in zip(samples, teacher_at_student(samples, self.options), strict=True):
            known = {name: torch.from_numpy(sample.columns[name]) for name in CARRIED if name in sample.columns}
            if "opd_student_top" in known:  # rows are trained on
                divergence = self._compared(known, torch.from_numpy(at_student))
                sample.columns |= {name: values.numpy() for name, values in divergence.items()}

    def _best(self, rows: ScoredRows, whose: str) -> Found:
        tokens, log_probs = rows.top_k(self.options.opd_log_prob_top_k)
        return {f"opd_{whose}_tokens": tokens, f"opd_{whose}_top": log_probs}

    def _compared(self, known: Mapping[str, torch.Tensor], teacher_at_student: torch.Tensor) -> Found:
        """The reverse KL at N rows, by all that is known but the teacher's log-probs [N, k] of the student's tokens."""
        if self.strategy == "only-student":
            return self._over_all(known["opd_student_top"], teacher_at_student)
        member = chosen(known["opd_student_tokens"], known["opd_teacher_tokens"], self.strategy)
        student = torch.cat([known["opd_student_top"], known["opd_student_at_teacher"]], 1)
        teacher = torch.cat([teacher_at_student, known["opd_teacher_top"]], 1)
        mode, normalised = self.options.opd_reward_weight_mode, self.strategy != "xor"
        return {"opd_reverse_kl": reverse_kl(student, teacher, torch.cat(member, 1), mode, normalised)}

    def _over_all(self, student: torch.Tensor, teacher: torch.Tensor) -> Found:
        everything = torch.ones_like(student, dtype=torch.bool)
        return {"opd_reverse_kl": reverse_kl(student, teacher, everything, self.options.opd_reward_weight_mode)}


def _at(rows: ScoredRows, whose: str) -> torch.Tensor:
    """[N, k] log-probs of the tokens that one model finds likeliest."""
    return rows.log_probs(rows.rows[f"opd_{whose}_tokens"].to(torch.int64))
