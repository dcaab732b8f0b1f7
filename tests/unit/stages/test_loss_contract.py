"""Every policy loss that the core or an official plugin offers has the properties of miles_testing/losses.py."""

import pytest
import torch
from miles_testing.losses import PROPERTIES, holds, loss_contract

from miles_core.config.tables import Algorithm, RunConfig
from miles_core.plugins.bind import bind
from miles_core.plugins.scan import KNOWN
from miles_core.plugins.select import built_in, select
from miles_core.stages.defaults import Core

torch.set_num_threads(1)

LOSSES = [name for offers in KNOWN.values() for offer in offers for hook, _, name in [offer.partition(":")]
          if hook == "policy_loss" and name != "custom_loss"]  # which is whatever its path names
LEFT_OUT = {("cispo", "gradients_are_finite_differences"),  # its weight has no gradient
            ("sft", "a_ratio_of_one_is_the_policy_gradient"), ("sft", "no_advantage_is_no_gradient")}  # supervised


@pytest.fixture(scope="module")
def losses():
    named = [(plugin, "test") for plugin, offers in KNOWN.items() if any(o.startswith("policy_loss:") for o in offers)]
    core = [one for one in built_in() if one.manifest.name == "core"]
    return bind(select(named, core), RunConfig(), "trainer").policy_loss


PAIRS = {f"{name}-{one.__name__}": (name, one) for name in ("clip", *LOSSES) for one in PROPERTIES
         if (name, one.__name__) not in LEFT_OUT}


@pytest.mark.parametrize("pair", PAIRS)
def test_property(losses, pair):
    name, property = PAIRS[pair]
    holds(property, losses[name], examples=40)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_term_keeps_the_contract(losses, kind, unbiased):
    """Beside the surrogate; it is no policy gradient, and what it does does not depend on advantages."""
    core = Core(RunConfig(algorithm=Algorithm(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind,
                                              use_unbiased_kl=unbiased)))

    def whole(inputs):
        values, metrics = losses["clip"](inputs)
        coefficient, term = core.loss_terms(inputs)["kl_loss"]
        assert coefficient == 0.1
        return values + coefficient * term, {**metrics, "kl_loss": term.detach()}

    loss_contract(whole, uses_advantages=False, examples=5)
