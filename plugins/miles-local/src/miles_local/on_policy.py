"""What every trainer's --true-on-policy-mode needs: values for which both sides compute the same, and a look at every
rollout. A plan imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from miles_core.types import Sample


def check_settings(config: RunConfig, more: Mapping[str, Mapping], holds: Mapping[str, Sequence[object]]) -> None:
    """
    Args:
        more: tables beside the run's, "" that of config.json. holds: TABLE.KEY -> values that will do where any is set.

    Raises:
        ConfigError: the first key with another value.
    """
    tables = asdict(config) | dict(more)
    for key, allowed in holds.items():
        table, _, name = key.rpartition(".")
        if (value := tables.get(table, {}).get(name)) not in (None, *allowed):
            raise ConfigError(f"true_on_policy_mode does not hold with this {key}", code="true-on-policy-unavailable",
                              got=value, who=who(config, key if table else "checkpoint.hf_checkpoint"),
                              fix=f"it holds with {' or '.join(map(str, allowed))}; or leave the mode out")


def check_equal(samples: Sequence[Sample], suspect: str) -> None:
    """Compare the columns `log_probs` (the trainer's) and `rollout_log_probs` (the engine's) where tokens are trained.

    Args:
        suspect: what may change one side alone.

    Raises:
        TrainError: at the first token whose two log-probs differ at all, or of which one is NaN.
    """
    import numpy as np

    for sample in samples:
        trainer, engine = sample.columns["log_probs"], sample.columns["rollout_log_probs"]
        unequal = np.flatnonzero((trainer != engine) & (sample.columns["loss_mask"] > 0))
        if unequal.size:
            first = int(unequal[0])
            raise TrainError(
                f"true_on_policy_mode: {unequal.size} of {sample.response_length} log-probs differ, first at response "
                f"token {first}", got=f"trainer {float(trainer[first])!r}, engine {float(engine[first])!r}",
                who=sample.name, code="true-on-policy-log-probs-differ",
                fix=f"look for what changes one side alone: {suspect}; or leave true_on_policy_mode out")
