"""A falling share of accepted drafts is a warning with remedies; anything else is silence."""

import pytest
from miles_sglang.acceptance import FALL, RATE, WINDOW
from miles_sglang.plugin import Sglang, SglangOptions


@pytest.fixture
def said(caplog):
    """(rates of successive rollouts) -> the rollouts that were warned at."""
    plugin = Sglang(SglangOptions())

    def run(*rates):
        for rollout, rate in enumerate(rates):
            plugin.metrics(rollout, {"rollout/reward": 1.0} | ({} if rate is None else {RATE: rate}))
        return [int(record.getMessage().split()[1].rstrip(":")) for record in caplog.records]

    return run


def test_a_fall_of_the_mean_warns_once_and_names_the_remedies(said, caplog):
    assert said(*[0.8] * WINDOW, *[0.59] * 20) == [2 * WINDOW - 2], "as soon as the mean is below 0.64, and not again"
    remedies = "--enable-mtp-training", "--sglang-speculative-num-steps", "--sglang-enable-draft-weights-cpu-backup"
    assert all(remedy in caplog.text for remedy in remedies)
    assert "accept 0.63 of the draft's tokens, after 0.80 at best" in caplog.text


def test_a_further_fall_warns_again(said):
    assert len(said(*[0.8] * WINDOW, *[0.5] * WINDOW, *[0.3] * WINDOW)) == 3


def test_noise_and_a_slow_start_and_engines_that_do_not_speculate_are_silent(said):
    wobble = [0.7 + 0.1 * (-1) ** i for i in range(30)]
    assert not said(*[0.1 * i for i in range(8)], *wobble, *[None] * 10)


def test_what_lies_between_two_speculating_rollouts_does_not_count(said):
    rates = [rate for _ in range(WINDOW) for rate in (0.8, None)]
    assert not said(*rates, *[0.8 * (1 - FALL) + 0.01] * WINDOW)
