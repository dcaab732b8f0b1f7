"""What train.py takes where a launch script says nothing, as far as its trainers differ in it."""

from __future__ import annotations

from miles_core.config.load import with_values
from miles_core.config.tables import Optimizer, RunConfig

FLAG = "--script-defaults"
"""`miles run train.py` adds it; flags.toml has what it sets, of the optimizer what Megatron-LM has."""


def of_trainer(config: RunConfig) -> RunConfig:
    """The optimizer of Miles's FSDP trainer has the defaults of this version's."""
    if config.perf.trainer != "fsdp":
        return config
    names = [key.partition(".")[2] for key, origin in config.origin.items()
             if getattr(origin, "where", None) == FLAG and key.startswith("optimizer.")]
    return with_values(config, FLAG, **{f"optimizer__{name}": getattr(Optimizer(), name) for name in names})
