"""What --optimizer muon asks of a run: values that it knows, and state that is whole on each rank. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

SHARDED = "use_distributed_optimizer"
KNOWN = {
    "muon_momentum": ("0 to 1", lambda value: 0 <= value <= 1),
    "muon_num_ns_steps": ("1 or more", lambda value: value >= 1),
    "muon_scale_mode": ("spectral, unit_rms_norm or shape_scaling",
                        {"spectral", "unit_rms_norm", "shape_scaling"}.__contains__),
    "muon_fp32_matmul_prec": ("medium, high or highest", {"medium", "high", "highest"}.__contains__),
    "optimizer_cpu_offload": ("nothing: Muon runs where the parameters are", lambda value: not value),
    SHARDED: ("nothing: it cuts parameters into stretches of any length, where Muon needs whole matrices",
              lambda value: not value),
}
"""Fields of Megatron-core -> what to write, and whether a value is that."""


def whole_state(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """With Muon, the run without the distributed optimizer.

    Raises:
        ConfigError: that is asked for, or a value that Muon does not know.
    """
    options = config.surface("megatron")
    if config.optimizer.optimizer != "muon" or config.debug.debug_rollout_only:
        return config
    for name, (fix, fits) in KNOWN.items():
        if name in options and not fits(options[name]):
            raise ConfigError(f"Muon does not take this {name}", got=options[name], who=who(config, f"megatron.{name}"),
                              fix=f"write {fix}", code="muon-option")
    if SHARDED in options:
        return config
    note(f"{SHARDED} is off: Muon moves whole matrices, so each data-parallel rank has all of the optimizer's state")
    return config.with_surface("megatron", **{SHARDED: False})
