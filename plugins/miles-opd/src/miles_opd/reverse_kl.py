"""The reverse KL over a set of tokens, KL(student || teacher), as an estimate at each position.

    D = sum over v in S of w_v (log p_student(v) - log p_teacher(v))

S is made of the k likeliest tokens of one or both models. w is a distribution over S, proportional to the student's
probabilities, the teacher's, or uniform; over the symmetric difference (xor) it is these probabilities
themselves, or 1.
With S the whole vocabulary and the student's weights D is the reverse KL itself.
"""

from __future__ import annotations

import torch


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, member: torch.Tensor, mode: str,
               normalised: bool = True) -> torch.Tensor:
    """D at each of N positions, in float64; 0 where the set is empty.

    Args:
        student, teacher: [N, C] log-probs of C candidate tokens.
        member: [N, C] bool, which candidates the set has.
        mode: "student_p", "teacher_p" or "none".
        normalised: the weights sum up to 1.
    """
    student, teacher = student.to(torch.float64), teacher.to(torch.float64)
    logits = {"student_p": student, "teacher_p": teacher, "none": torch.zeros_like(student)}[mode]
    logits = logits.masked_fill(~member, -torch.inf)
    if normalised:
        logits = logits - logits.logsumexp(1, keepdim=True)
    weights = torch.where(member, logits.exp(), torch.zeros_like(logits))
    return torch.where(member, weights * (student - teacher), torch.zeros_like(student)).sum(1)


def chosen(student: torch.Tensor, teacher: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of two lists a set has, so that none is in it twice.

    Args:
        student, teacher: [N, K] token ids, the likeliest ones of each model, each once.
        strategy: "intersection", "union" or "xor".

    Returns:
        [N, K] bool of the student's list, and of the teacher's.
    """
    same = student[:, :, None] == teacher[:, None, :]
    in_teacher, in_student = same.any(2), same.any(1)
    if strategy == "intersection":
        return in_teacher, torch.zeros_like(in_student)
    return (torch.ones_like(in_teacher) if strategy == "union" else ~in_teacher), ~in_student
