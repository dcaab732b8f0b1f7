"""An auxiliary loss: the policy stays close to the one that sampled, which the engine's log-probs stand for."""

from dataclasses import dataclass

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class CloseOptions:
    """How much it counts."""

    coefficient: float = option(0.1, "Weight of the term in the loss; 0 makes it a monitor.")


class StayClose:
    """Adds an estimate of KL(policy || sampler) for each token; train/stay_close is its mean."""

    name = "stay-close"

    def __init__(self, options: CloseOptions):
        self.options = options

    @hookimpl
    def loss_terms(self, inputs):
        from miles_core.kl import approximate_kl

        term = approximate_kl(inputs.log_probs, inputs.rollout_log_probs, "low_var_kl")
        return {"stay_close": (self.options.coefficient, term)}
