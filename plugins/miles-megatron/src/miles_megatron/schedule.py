"""The learning rate's schedule after a resume."""

from __future__ import annotations

from miles_megatron import cpu

cpu.install()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402 - after install()


class Schedule(OptimizerParamScheduler):
    """Megatron's, which goes on after as many rollouts as were done, however many steps each of them takes now.

    Args:
        rollout_iters: optimizer steps of a rollout; the other arguments are Megatron's.
    """

    def __init__(self, rollout_iters: int, *args: object, **settings: object):
        self.rollout_iters = rollout_iters
        super().__init__(*args, **settings)

    def state_dict(self) -> dict:
        return super().state_dict() | {"rollout_iters": self.rollout_iters}

    def load_state_dict(self, state_dict: dict) -> None:
        before = state_dict.get("rollout_iters", self.rollout_iters)  # older checkpoints do not say
        done = round(state_dict["num_steps"] * self.rollout_iters / before)
        self.num_steps = 0  # Megatron adds the saved steps to those done already
        super().load_state_dict(state_dict | {"num_steps": done})
