"""What trainers share around the actor's step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from miles_local.objective import ActorStep

from miles_core.config.tables import Rollout, RunConfig


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
