"""What trainers share around the actor's step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from miles_local.objective import ActorStep, Objective, sample_weights, with_advantage, with_fillers
from miles_testing.losses import inputs_of, make_case

from miles_core.config.tables import Algorithm, Perf, Rollout, RunConfig
from miles_core.errors import TrainError
from miles_core.types import Sample


@pytest.mark.parametrize(("proceeds", "warns"), [((), True), ((0,), False), ((3,), False)])
def test_a_run_whose_actor_never_stepped_is_warned_of_at_its_end(caplog, proceeds, warns):
    asked = iter(range(4))

    def around(proceed, access):
        return proceed() if next(asked) in proceeds else {"left": 1.0}

    step = ActorStep(RunConfig(rollout=Rollout(num_rollout=2, num_steps_per_rollout=2)),
                     SimpleNamespace(train_step=around))
    found = []
    for number in range(4):
        assert not caplog.records, "not before the last step"
        access = SimpleNamespace(batch=SimpleNamespace(rollout_id=number // 2), index=number % 2)
        found.append(step(lambda number=number: {"made": float(number)}, access))
    assert found == [{"made": float(number)} if number in proceeds else {"left": 1.0} for number in range(4)]
    assert bool(caplog.records) == warns


def test_without_a_hook_the_actor_just_steps():
    step = ActorStep(RunConfig(), SimpleNamespace(train_step=None))
    assert step(lambda: {"made": 1.0}, SimpleNamespace(batch=SimpleNamespace(rollout_id=0), index=0)) == {"made": 1.0}


@pytest.mark.parametrize(("perf", "at_once", "rides"), [
    (Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=8), 4, 2), (Perf(micro_batch_size=1), 2, 2),
    (Perf(micro_batch_size=2), 2, 4), (Perf(micro_batch_size=3), 2, 6),
])
def test_what_trains_nothing_is_left_out_alike_on_any_number_of_ranks(perf, at_once, rides):
    """Where micro-batches have a fixed number of samples, fillers count in no metric; a sample would."""
    values = (0.0, 1.0, 0.0, 0.0, -1.0, 0.0, 0.0)
    prompt = SimpleNamespace()
    samples = [Sample(prompt, i, {"tokens": np.zeros(4 + i), "advantages": np.full(3, value),
                                  "loss_mask": np.ones(3, np.uint8)}) for i, value in enumerate(values)]
    taken = with_advantage(samples)
    assert [sample.index for sample in taken] == [1, 4]
    whole = with_fillers(taken, perf, at_once)
    assert len(whole) == rides and whole[:2] == taken
    assert all(one.index == 1 and not one.columns["loss_mask"].any() for one in whole[2:])


def test_a_step_whose_samples_all_train_nothing_has_one():
    silent = [SimpleNamespace(columns={"advantages": np.zeros(3), "loss_mask": np.ones(3, np.uint8)}) for _ in range(3)]
    [left] = with_advantage(silent)
    assert left is silent[0]


@pytest.mark.parametrize(("answer", "term", "code", "got"), [
    (lambda rows: None, None, "policy-loss-not-a-pair", "NoneType"),
    (lambda rows: rows, None, "policy-loss-not-a-pair", "Tensor"),
    (lambda rows: (rows.mean(), {}), None, "loss-not-per-token", "shape []"),
    (lambda rows: (rows, {"ratio": 1.0}), None, "loss-not-per-token", "float"),
    (lambda rows: (rows, {}), lambda rows: rows.mean(), "loss-not-per-token", "shape []"),
    (lambda rows: (rows, {}), lambda rows: rows[:, None], "loss-not-per-token", "shape [6, 1]"),
], ids=["nothing", "loss-alone", "scalar", "number-as-metric", "scalar-term", "column-term"])  # fmt: skip
def test_what_is_not_one_value_for_each_token_is_named(answer, term, code, got):
    """A term of another shape would be broadcast: a column of N values takes the policy loss N times."""
    hooks = SimpleNamespace(
        policy_loss={"mine": lambda inputs: answer(inputs.log_probs)}, token_weights=None,
        loss_terms=None if term is None else lambda inputs: {"mine": (0.1, term(inputs.log_probs))})
    objective = Objective(RunConfig(algorithm=Algorithm(policy_loss="mine")), hooks)
    case = make_case([4, 2], seed=0)
    with pytest.raises(TrainError) as caught:
        objective._per_token(inputs_of(case, torch.tensor(case.log_probs, requires_grad=True)))
    assert (caught.value.code, caught.value.got) == (code, got)
    assert "'mine'" in caught.value.who


@pytest.mark.parametrize(("answer", "got"), [
    ([0.5], "list (1,) for 2 samples"), (np.ones((2, 1)), "ndarray (2, 1) for 2 samples"),
    (None, "NoneType () for 2 samples"),
    ([0.5, float("nan")], "list (2,) for 2 samples"), ({0: 1.0, 1: 1.0}, "dict () for 2 samples"),
], ids=["count", "columns", "nothing", "nan", "dict"])
def test_a_reduction_that_is_no_number_for_each_sample_is_named(answer, got):
    samples = [Sample(SimpleNamespace(), i, {"loss_mask": np.ones(3, np.uint8)}) for i in range(2)]
    hooks = SimpleNamespace(reduction={"sample": lambda samples: answer})
    with pytest.raises(TrainError) as caught:
        sample_weights(RunConfig(), hooks, samples)
    assert caught.value.code == "reduction-not-per-sample" and caught.value.got == got


def test_the_weights_of_a_reduction():
    samples = [Sample(SimpleNamespace(), i, {"loss_mask": np.ones(3, np.uint8)}) for i in range(2)]
    hooks = SimpleNamespace(reduction={"sample": lambda samples: [1, 0.5]})
    assert sample_weights(RunConfig(), hooks, samples).tolist() == [1.0, 0.5]
