"""What every policy loss has to satisfy, whatever its formula: properties that authors of plugins run on their own.

    from miles_testing.losses import loss_contract

    def test_contract():
        loss_contract(my_policy_loss)

The cases are small: a few samples of a few tokens, some masked, in float64. Data and context parallelism are
simulated: each part of a case is a call of its own, the parts of a context-parallel group run in threads whose
`segment_sum` adds up over all of them, and gradients flow through that sum.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.stages.loss import LossInputs, Metrics, PolicyLoss

ROWS = ("log_probs", "old", "engine", "reference", "advantages")
TIMEOUT = 60.0


@dataclass(frozen=True)
class Case:
    """Tokens of a few samples; all arrays [N].

    Args:
        log_probs, old, engine, reference: of the current, the old, the engine's and the reference policy.
        sample: which sample each row belongs to, from 0 on.
        weights: one number per sample, of the reduction.
        dual: the dual-clip constant.
        entropy: of the current policy, where the loss reads it.
    """

    log_probs: np.ndarray
    old: np.ndarray
    engine: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    sample: np.ndarray
    weights: np.ndarray
    dual: float | None = None
    entropy: np.ndarray | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the arrays that may hold anything where the mask is 0."""
        return ROWS if self.entropy is None else (*ROWS, "entropy")

    def at(self, rows: np.ndarray) -> Case:
        """The case of some of its rows."""
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in (*self.rows, "mask", "sample")})


@dataclass(frozen=True)
class Outcome:
    """What a loss gave for a case: [N] values, [N] gradient of their weighted sum, [N] metrics."""

    values: np.ndarray
    gradient: np.ndarray
    metrics: dict[str, np.ndarray]


def make_case(lengths: Sequence[int], seed: int, dual: float | None = None, entropy: bool = False) -> Case:
    """Samples of these lengths; log-ratios spread over both sides of the clip band, a third of the rows masked."""
    draw = np.random.default_rng(seed)
    size, sample = sum(lengths), np.repeat(np.arange(len(lengths)), lengths)
    old = draw.normal(-2, 1, size)
    return Case(
        log_probs=old + draw.normal(0, 0.5, size), old=old, engine=old + draw.normal(0, 0.2, size),
        reference=old + draw.normal(0, 0.3, size), advantages=draw.normal(0, 1, len(lengths))[sample],
        mask=(draw.random(size) > 1 / 3).astype(float), sample=sample, weights=draw.uniform(0.1, 1, len(lengths)),
        dual=dual, entropy=draw.uniform(0.01, 3, size) if entropy else None,
    )  # fmt: skip


def cases(entropy: bool = False) -> st.SearchStrategy[Case]:
    """Cases of one to four samples of one to five tokens."""
    lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    return st.builds(make_case, lengths, st.integers(0, 2**32 - 1), st.sampled_from([None, 1.7]), st.just(entropy))


def evaluate(loss: PolicyLoss, case: Case, parts: Sequence[Sequence[np.ndarray]] | None = None) -> Outcome:
    """The loss of a case that is computed in parts, put together again.

    Args:
        parts: for each micro-batch the rows [n] of each of its context-parallel ranks; None for one of all rows.
    """
    leaf = torch.tensor(case.log_probs, requires_grad=True)
    values, total = np.zeros(len(leaf)), torch.zeros((), dtype=leaf.dtype)
    metrics: dict[str, np.ndarray] = {}
    for ranks in parts or [[np.arange(len(leaf))]]:
        for rows, (value, named) in zip(ranks, _together(loss, case, leaf, ranks), strict=True):
            assert value.shape == (len(rows),), "one value for each token; only the core reduces"
            for name, metric in named.items():
                assert metric.shape == (len(rows),), f"metric {name} has one value for each token"
                assert not metric.requires_grad, f"metric {name} has no gradient; detach it"
            total = total + (value * torch.as_tensor(case.weights[case.sample[rows]])).sum()
            values[rows] = value.detach()
            for name, metric in named.items():
                metrics.setdefault(name, np.zeros(len(leaf)))[rows] = metric
    gradient, = torch.autograd.grad(total, leaf)
    return Outcome(values, gradient.numpy(), metrics)


def inputs_of(case: Case, log_probs: torch.Tensor, segment_sum: Callable[..., Any] | None = None) -> LossInputs:
    """LossInputs of all rows of a case, with the default clip band."""
    rows = {name: torch.as_tensor(getattr(case, name)) for name in (*case.rows, "mask", "sample")}
    local = _local_sum(rows["sample"], len(case.weights))
    return LossInputs(
        log_probs=log_probs, entropy=rows.get("entropy"), old_log_probs=rows["old"], rollout_log_probs=rows["engine"],
        ref_log_probs=rows["reference"], advantages=rows["advantages"], mask=rows["mask"], sample=rows["sample"],
        segment_sum=segment_sum or local, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=case.dual,
        rows={"log_probs": rows["old"]},
    )  # fmt: skip


def _local_sum(sample: torch.Tensor, samples: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.new_zeros(samples, *values.shape[1:]).index_add(0, sample, values)


def _together(loss: PolicyLoss, case: Case, leaf: torch.Tensor,
              ranks: Sequence[np.ndarray]) -> list[tuple[torch.Tensor, Metrics]]:
    """One call for each rank, at the same time; a `segment_sum` of one is the sum of all."""
    slots, barrier = [torch.zeros(0)] * len(ranks), threading.Barrier(len(ranks))

    def call(rank: int) -> tuple[torch.Tensor, Metrics]:
        part = case.at(ranks[rank])
        local = _local_sum(torch.as_tensor(part.sample), len(case.weights))

        def segment_sum(values: torch.Tensor) -> torch.Tensor:
            slots[rank] = local(values)
            barrier.wait(TIMEOUT)
            total = sum(slots[1:], slots[0])
            barrier.wait(TIMEOUT)
            return total

        try:
            return loss(inputs_of(part, leaf[torch.as_tensor(ranks[rank])], segment_sum))
        except BaseException:
            barrier.abort()
            raise

    if len(ranks) == 1:
        return [call(0)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, range(len(ranks))))


def same(one: Outcome, other: Outcome, what: str, rows: np.ndarray | slice = slice(None)) -> None:
    """Equal up to rounding in float64, on all rows of `one` and on these of `other`; errors begin with `what`."""
    assert one.metrics.keys() == other.metrics.keys(), (
        f"{what}: the metrics {sorted(one.metrics.keys() ^ other.metrics.keys())} come and go")
    parts = {"loss": (one.values, other.values), "gradient": (one.gradient, other.gradient)}
    parts |= {f"metric {name}": (metric, other.metrics[name]) for name, metric in one.metrics.items()}
    for name, (wanted, got) in parts.items():
        np.testing.assert_allclose(got[rows], wanted, rtol=1e-10, atol=1e-10, err_msg=f"{what}: another {name}")


def masked_rows_do_nothing(loss: PolicyLoss, case: Case) -> None:
    """A row whose mask is 0 has no loss and no gradient and reaches no other row, whatever it holds."""
    masked = case.mask == 0
    poison = np.resize([np.nan, np.inf, -np.inf], len(masked))
    rows: dict[str, Any] = {name: np.where(masked, poison, getattr(case, name)) for name in case.rows}
    poisoned = dataclasses.replace(case, **rows)
    clean, dirty = evaluate(loss, case), evaluate(loss, poisoned)
    assert not dirty.values[masked].any(), "a masked row has a loss"
    assert not dirty.gradient[masked].any(), "a masked row has a gradient"
    trained = np.flatnonzero(~masked)
    metrics = {name: values[trained] for name, values in clean.metrics.items()}
    unmasked = Outcome(clean.values[trained], clean.gradient[trained], metrics)
    same(unmasked, dirty, "what masked rows hold reaches others", trained)


def a_masked_sample_changes_nothing(loss: PolicyLoss, case: Case) -> None:
    """A sample without a trained token leaves the loss, gradient and metrics of all others as they are."""
    more: dict[str, Any] = {name: np.append(getattr(case, name), [-1.0, -3.0]) for name in case.rows}
    wider = dataclasses.replace(
        case, **more, mask=np.append(case.mask, [0.0, 0.0]), weights=np.append(case.weights, 1.0),
        sample=np.append(case.sample, [len(case.weights)] * 2),
    )  # fmt: skip
    outcome = evaluate(loss, wider)
    same(evaluate(loss, case), outcome, "a masked sample reaches others", slice(len(case.mask)))
    assert not outcome.values[-2:].any(), "a masked sample has a loss"
    assert not outcome.gradient[-2:].any(), "a masked sample has a gradient"


def cuts_are_exact(loss: PolicyLoss, case: Case) -> None:
    """Micro-batches or data-parallel ranks of whole samples, and context-parallel ranks of any rows, change nothing."""
    whole, last = evaluate(loss, case), len(case.weights) // 2
    halves = [[np.flatnonzero(case.sample < last)], [np.flatnonzero(case.sample >= last)]]
    same(whole, evaluate(loss, case, halves), "cut into micro-batches")
    everywhere = np.arange(len(case.mask))
    same(whole, evaluate(loss, case, [[everywhere[::2], everywhere[1::2]]]), "cut over context-parallel ranks")
    both = [[rows[::3], np.setdiff1d(rows, rows[::3])] for rows, in halves]
    same(whole, evaluate(loss, case, both), "cut both ways")


def order_does_not_matter(loss: PolicyLoss, case: Case) -> None:
    """Rows that are packed in another order have the same loss, gradient and metrics."""
    order = np.random.default_rng(len(case.mask)).permutation(len(case.mask))
    moved = evaluate(loss, case.at(order))
    whole = evaluate(loss, case)
    wanted = Outcome(whole.values[order], whole.gradient[order], {k: v[order] for k, v in whole.metrics.items()})
    same(wanted, moved, "rows in another order")


def a_ratio_of_one_is_the_policy_gradient(loss: PolicyLoss, case: Case) -> None:
    """On-policy the gradient of a trained token is -A, times the weight of the reduction."""
    outcome = evaluate(loss, dataclasses.replace(case, old=case.log_probs, engine=case.log_probs))
    expected = -case.advantages * case.weights[case.sample] * case.mask
    np.testing.assert_allclose(outcome.gradient, expected, rtol=1e-10, atol=1e-12,
                               err_msg="on-policy the gradient is not -A times the sample's weight")


def no_advantage_is_no_gradient(loss: PolicyLoss, case: Case) -> None:
    """Where A is 0 nothing is learnt."""
    still = evaluate(loss, dataclasses.replace(case, advantages=np.zeros(len(case.mask))))
    assert not still.gradient.any(), "without advantages there is a gradient"


def gradients_are_finite_differences(loss: PolicyLoss, case: Case) -> None:
    """The gradient is that of the value."""
    step, weights = 1e-6, case.weights[case.sample]

    def total(log_probs: np.ndarray) -> float:
        return float(evaluate(loss, dataclasses.replace(case, log_probs=log_probs)).values @ weights)

    shifts = step * np.eye(len(case.mask))
    slopes = [(total(case.log_probs + shift) - total(case.log_probs - shift)) / (2 * step) for shift in shifts]
    np.testing.assert_allclose(evaluate(loss, case).gradient, slopes, rtol=1e-5, atol=1e-7,
                               err_msg="the gradient is not the slope of the loss (stops_gradient=True)")


def a_nan_is_not_hidden(loss: PolicyLoss, case: Case) -> None:
    """A NaN log-prob of a trained token shows in its loss, so that the step is refused."""
    for row in np.flatnonzero(case.mask)[:1]:
        broken = case.log_probs.copy()
        broken[row] = np.nan
        outcome = evaluate(loss, dataclasses.replace(case, log_probs=broken, engine=case.old))
        assert np.isnan(outcome.values[row]), "a NaN log-prob of a trained token does not show in the loss"


PROPERTIES = (
    masked_rows_do_nothing, a_masked_sample_changes_nothing, cuts_are_exact, order_does_not_matter,
    a_ratio_of_one_is_the_policy_gradient, no_advantage_is_no_gradient, gradients_are_finite_differences,
    a_nan_is_not_hidden,
)  # fmt: skip


def holds(property: Callable[[PolicyLoss, Case], None], loss: PolicyLoss, examples: int = 20,
          entropy: bool = False) -> None:
    """Run one property on generated cases, the same ones every time."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(cases(entropy))
    def check(case: Case) -> None:
        property(loss, case)

    check()


def loss_contract(loss: PolicyLoss, *, stops_gradient: bool = False, uses_advantages: bool = True,
                  uses_entropy: bool = False, examples: int = 20) -> None:
    """Every property that a policy loss has to have.

    Args:
        stops_gradient: the loss detaches part of itself, as CISPO does, so its gradient is not that of its value.
        uses_advantages: False for supervised losses.
        uses_entropy: the loss reads `inputs.entropy`; its plugin implies `algorithm.observe_training_entropy`.
    """
    left_out = {gradients_are_finite_differences} if stops_gradient else set()
    left_out |= set() if uses_advantages else {a_ratio_of_one_is_the_policy_gradient, no_advantage_is_no_gradient}
    for property in PROPERTIES:
        if property not in left_out:
            holds(property, loss, examples, uses_entropy)
