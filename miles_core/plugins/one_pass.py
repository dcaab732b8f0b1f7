"""Whether the pass for old log-probs is left out: it would compute what the rollout's only step computes anyway.

With one optimizer step per rollout the step starts from the weights that the pass would have scored with, so the old
log-probs are the step's own, detached, and its forward fills the column `log_probs` before the optimizer moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.plugins.resolve import chosen
from miles_core.plugins.select import Selected

WORD = "needs-no-log-prob-pass"
"""In a plugin's `provides`: its hooks of the trainer do not read `log_probs` before the step has filled it. Where that
depends on options, the plugin's `derive` sets `skip_actor_forward_only` to False."""
READERS = ("log_prob", "shape_advantages", "train_step", "microbatch", "token_weights", "loss_terms")


def one_pass(config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
    """Set `skip_actor_forward_only` where nothing needs scores before the step: for the hook `check` of a trainer."""
    if "algorithm.skip_actor_forward_only" in config.origin or any(_reasons(config, plugins)):
        return config
    note("one optimizer step per rollout: old log-probs are those of the step itself, without a pass before it "
         "(--no-skip-actor-forward-only for one)")
    return with_values(config, "one optimizer step per rollout", algorithm__skip_actor_forward_only=True)


def _reasons(config: RunConfig, plugins: Sequence[Selected]) -> Iterator[bool]:
    """Whether each thing that needs the pass is there; metrics of samples that no step computes need it, too."""
    algorithm, perf, rollout = config.algorithm, config.perf, config.rollout
    yield rollout.num_steps_per_rollout != 1 or config.debug.debug_rollout_only
    yield algorithm.use_rollout_logprobs or algorithm.kl_coef != 0
    yield perf.skip_zero_advantages
    shown = {(hook, chosen(config, hook)) for hook in ("advantage", "policy_loss", "reduction")}
    for plugin in plugins:  # of hooks with several parts only the one that the run has chosen is shown the columns
        sees = any(offer.hook in READERS or (offer.hook, offer.name) in shown for offer in plugin.manifest.offers)
        yield sees and WORD not in plugin.manifest.provides
