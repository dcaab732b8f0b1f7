"""The kit of policy losses: each check has a loss that it catches. The losses themselves: unit/stages."""

from __future__ import annotations

import pytest
import torch
from miles_testing import losses
from miles_testing.losses import PROPERTIES, evaluate, loss_contract, make_case

torch.set_num_threads(1)

CASE = make_case([4, 1, 3, 5], 1)


def surrogate(inputs):
    """The ratio times the advantage, as it has to be."""
    distance, advantages = (torch.where(inputs.mask > 0, rows, 0.0)
                            for rows in (inputs.log_probs - inputs.old_log_probs, inputs.advantages))
    return -distance.exp() * advantages


def beside(change):
    """The surrogate, changed: (surrogate, inputs) -> loss."""
    return lambda inputs: (change(surrogate(inputs), inputs), {})


def measuring(metrics):
    """The surrogate with metrics: (surrogate, inputs) -> metrics."""
    return lambda inputs: (surrogate(inputs), metrics(surrogate(inputs).detach(), inputs))


def sound(inputs):
    """The share of rows whose log-prob is a number: 1 where nothing is poisoned."""
    return inputs.log_probs.detach().isfinite().double().mean()


def slope(rows):
    """0, with the gradient of these rows."""
    return rows - rows.detach()


def left(inputs):
    """The rows of masked tokens where they are numbers, else 0."""
    return torch.where((inputs.mask == 0) & inputs.log_probs.detach().isfinite(), inputs.log_probs, 0.0)


def own(inputs):
    """How many rows of each sample are here."""
    found = inputs.segment_sum(torch.zeros_like(inputs.mask))
    return found.index_add(0, inputs.sample, torch.ones_like(inputs.mask))


def cut_twice(value, inputs):
    """Twice as much where a micro-batch lacks samples and a rank rows."""
    everywhere = inputs.segment_sum(torch.ones_like(inputs.mask))
    return value * (2 if (everywhere == 0).any() and not torch.equal(everywhere, own(inputs)) else 1)


BROKEN = {
    "one value for each token; only the core reduces": ("cuts_are_exact", beside(lambda value, i: value.sum())),
    "metric mean has one value for each token": ("cuts_are_exact", measuring(lambda value, i: {"mean": value.mean()})),
    "metric p has no gradient": ("cuts_are_exact", measuring(lambda value, i: {"p": i.log_probs})),
    "a masked row has a loss": ("masked_rows_do_nothing", beside(lambda value, i: value + 1 - i.mask)),
    "a masked row has a gradient": ("masked_rows_do_nothing", lambda i: (torch.where(
        i.mask > 0, -(i.log_probs - i.old_log_probs).exp() * i.advantages, 0.0), {})),
    "what masked rows hold reaches others: another loss": (
        "masked_rows_do_nothing", beside(lambda value, i: value * sound(i))),
    "what masked rows hold reaches others: another gradient": (
        "masked_rows_do_nothing", beside(lambda value, i: value + slope(value) * sound(i))),
    "what masked rows hold reaches others: another metric share": (
        "masked_rows_do_nothing", measuring(lambda value, i: {"share": sound(i) * i.mask})),
    r"what masked rows hold reaches others: the metrics \['odd'\] come and go": (
        "masked_rows_do_nothing", measuring(lambda value, i: {"odd": value} if sound(i) < 1 else {})),
    "a masked sample reaches others: another loss": (
        "a_masked_sample_changes_nothing", beside(lambda value, i: value / (i.sample.max() + 1))),
    "a masked sample has a loss": (
        "a_masked_sample_changes_nothing", beside(lambda value, i: value + left(i).detach())),
    "a masked sample has a gradient": (
        "a_masked_sample_changes_nothing", beside(lambda value, i: value + slope(left(i)))),
    "cut into micro-batches: another loss": ("cuts_are_exact", beside(lambda value, i: value / i.segment_sum(
        torch.ones_like(i.mask)).sum())),
    "cut over context-parallel ranks: another loss": (
        "cuts_are_exact", beside(lambda value, i: value / own(i)[i.sample])),
    "cut both ways: another loss": ("cuts_are_exact", beside(cut_twice)),
    "rows in another order: another loss": (
        "order_does_not_matter", beside(lambda value, i: value * torch.arange(len(value)))),
    "on-policy the gradient is not -A": (
        "a_ratio_of_one_is_the_policy_gradient", beside(lambda value, i: -value)),
    "without advantages there is a gradient": (
        "no_advantage_is_no_gradient", beside(lambda value, i: value - i.log_probs * i.mask)),
    "the gradient is not the slope of the loss": (
        "gradients_are_finite_differences", beside(lambda value, i: value + slope(value))),
    "a NaN log-prob of a trained token does not show": (
        "a_nan_is_not_hidden", beside(lambda value, i: value.nan_to_num())),
}  # fmt: skip


@pytest.mark.parametrize("words", BROKEN)
def test_a_loss_that_breaks_a_property_is_caught(words):
    name, loss = BROKEN[words]
    property = next(one for one in PROPERTIES if one.__name__ == name)
    property(beside(lambda value, inputs: value), CASE)
    with pytest.raises(AssertionError, match=words):
        property(loss, CASE)


def test_every_property_has_a_loss_that_it_catches():
    assert {name for name, _ in BROKEN.values()} == {one.__name__ for one in PROPERTIES}


def test_the_contract_is_all_properties_but_those_that_are_left_out(monkeypatch):
    with pytest.raises(AssertionError, match="a NaN log-prob"):  # by the last one, so the others hold
        loss_contract(BROKEN["a NaN log-prob of a trained token does not show"][1], examples=1)
    asked = []
    monkeypatch.setattr(losses, "holds", lambda property, *_: asked.append(property.__name__))
    for arguments, less in (({}, set()), ({"stops_gradient": True}, {"gradients_are_finite_differences"}),
                            ({"uses_advantages": False}, {"a_ratio_of_one_is_the_policy_gradient",
                                                          "no_advantage_is_no_gradient"})):
        asked.clear()
        loss_contract(surrogate, **arguments)
        assert set(asked) == {one.__name__ for one in PROPERTIES} - less


def test_a_loss_may_read_the_entropy():
    def wider(inputs):
        entropy = torch.where(inputs.mask > 0, inputs.entropy, 0.0)
        band = 1 + inputs.eps_clip_high * (1 + entropy)
        return surrogate(inputs).clamp(min=-10), {"band": band * inputs.mask}

    loss_contract(wider, uses_entropy=True, examples=2)
    with pytest.raises(AssertionError, match="a masked row has a loss"):  # 0 times a NaN
        loss_contract(beside(lambda value, i: value * i.entropy.mean()), uses_entropy=True, examples=2)


def test_a_loss_that_raises_on_one_rank_does_not_hang_the_others():
    def uneven(inputs):
        if len(inputs.mask) == 2:
            raise ZeroDivisionError
        return inputs.segment_sum(inputs.log_probs)[inputs.sample], {}

    case = make_case([5], 0)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        evaluate(uneven, case, [[torch.arange(3).numpy(), torch.arange(3, 5).numpy()]])
