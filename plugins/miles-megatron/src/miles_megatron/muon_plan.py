"""What --optimizer muon and dist_muon ask of a run: values that they know, and matrices that are whole on a rank.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from miles_local.muon_options import LAYER_WISE, MOMENTUM, MUON, NUM_NS_STEPS, Precision, Scale

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

SHARDED = "use_distributed_optimizer"
KNOWN = {
    "muon_momentum": ("{} to {}".format(*MOMENTUM), lambda value: MOMENTUM[0] <= value <= MOMENTUM[1]),
    "muon_num_ns_steps": ("{} or more".format(*NUM_NS_STEPS), lambda value: value >= NUM_NS_STEPS[0]),
    "muon_scale_mode": ("one of " + ", ".join(get_args(Scale)), get_args(Scale).__contains__),
    "muon_fp32_matmul_prec": ("one of " + ", ".join(get_args(Precision)), get_args(Precision).__contains__),
    "decoupled_weight_decay": ("nothing: matrices decay apart from their gradients", bool),
    "optimizer_cpu_offload": ("nothing: Muon runs where the parameters are", lambda value: not value),
    SHARDED: ("nothing: it cuts parameters into stretches of any length, where Muon needs whole matrices, which "
              f"--optimizer {LAYER_WISE} divides among the ranks", lambda value: not value),
}
"""Fields of Megatron-core -> what to write, and whether a value is that."""


def whole_state(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """With Muon, the run without the distributed optimizer.

    Raises:
        ConfigError: that is asked for, or a value that Muon does not know.
    """
    options = config.surface("megatron")
    if config.optimizer.optimizer not in MUON or config.debug.debug_rollout_only:
        return config
    for name, (fix, fits) in KNOWN.items():
        if name in options and not fits(options[name]):
            raise ConfigError(f"Muon does not take this {name}", got=options[name], who=who(config, f"megatron.{name}"),
                              fix=f"write {fix}", code="muon-option")
    if SHARDED in options:
        return config
    whole = config.optimizer.optimizer != LAYER_WISE
    note(f"{SHARDED} is off: Muon moves whole matrices, " + (
        "so each data-parallel rank has all of the optimizer's state" if whole else
        "and data-parallel ranks divide parameters and their state"))
    return config.with_surface("megatron", **{SHARDED: False})
