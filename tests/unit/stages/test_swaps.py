"""A swap of algorithms changes one word: every estimator plans and trains with every set of the shared options."""

import functools

import numpy as np
import pytest
import torch
from miles_testing.batches import make_sample

from miles_core.plugins.bind import bind
from miles_core.plugins.plan import prepare
from miles_core.stages.advantage import check, fill, whiten
from miles_core.stages.loss import LossInputs, TokenWeights, reduce
from miles_core.types import Batch, Group, Prompt

torch.set_num_threads(1)

ESTIMATORS = {"grpo": "clip", "gspo": "gspo", "cispo": "cispo", "reinforce_plus_plus": "clip",
              "reinforce_plus_plus_baseline": "clip", "rloo": "clip"}
OPTIONS = {
    "defaults": "",
    "kl loss": "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl",
    "unbiased kl": "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --use-unbiased-kl",
    "kl in the reward": "--kl-coef 0.1 --kl-loss-type k2 --gamma 0.9 --normalize-advantages",
    "dr grpo": "--disable-grpo-std-normalization --reduction constant",
    "raw rewards": "--disable-rewards-normalization --reduction constant --reduction-constant 7",
    "per token": "--calculate-per-token-loss --eps-clip-c 3 --entropy-coef 0.01",
    "the engine's log-probs": "--use-rollout-logprobs --kl-coef 0.1",
    "no old log-probs": "--skip-actor-forward-only --use-kl-loss",
    "tis": "--plugin tis --use-tis --normalize-advantages",
    "icepop": "--plugin tis --use-tis --tis-mode mask --tis-clip 1.1 --tis-clip-low 0.9",
    "mis": "--plugin tis --use-tis --tis-level sequence --tis-batch-normalize --use-rs --rs-level geometric"
           " --rs-upper-bound 1.1 --rs-veto-threshold 0.5 --use-opsm --num-steps-per-rollout 2",
    "metrics": "--plugin tis --use-rollout-logprobs",
}  # fmt: skip
RUN = ["--hf-checkpoint", "elsewhere/tiny", "--prompt-data", "data/train.jsonl", "--rollout-batch-size", "2",
       "--n-samples-per-prompt", "3", "--num-rollout", "1"]
PASS = ["--no-skip-actor-forward-only"]
"""Old log-probs that are not those of the step."""


@functools.cache
def planned(estimator, options):
    scored = [] if "--skip-actor" in OPTIONS[options] else PASS
    return prepare(None, [*RUN, *scored, "--advantage-estimator", estimator, *OPTIONS[options].split()])


def batch_for(config):
    """Two groups of three answers, one token in four masked, with the columns that the trainer would have filled."""
    draw, algorithm, groups = np.random.default_rng(0), config.algorithm, []
    for uid in range(2):
        samples = []
        for i in range(3):
            size = int(draw.integers(2, 6))
            old = draw.normal(-2, 1, size)
            columns = {"rollout_log_probs": old + draw.normal(0, 0.2, size)}
            if not (algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
                columns["log_probs"] = old
            if algorithm.use_kl_loss or algorithm.kl_coef:
                columns["ref_log_probs"] = old + draw.normal(0, 0.3, size)
            samples.append(make_sample(uid, i, float(i + uid), draw.random(size) < 0.75, **columns))
        groups.append(Group(Prompt(uid, uid, "", (0, 1)), samples))
    return Batch(0, groups)


def inputs_for(batch, config, log_probs):
    samples, algorithm = batch.samples, config.algorithm
    rows = {name: torch.cat([torch.as_tensor(s.columns[name]) for s in samples])
            for name in samples[0].columns if name != "tokens"}
    sample = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([s.response_length for s in samples]))
    old = rows["rollout_log_probs"] if algorithm.use_rollout_logprobs else rows.get("log_probs", log_probs.detach())
    return LossInputs(
        log_probs=log_probs, entropy=torch.ones_like(log_probs) if algorithm.entropy_coef else None, old_log_probs=old,
        rollout_log_probs=rows["rollout_log_probs"], ref_log_probs=rows.get("ref_log_probs"),
        advantages=rows["advantages"], mask=rows["loss_mask"].float(), sample=sample, rows=rows, samples=samples,
        segment_sum=lambda v: v.new_zeros(len(samples), *v.shape[1:]).index_add(0, sample, v),
        eps_clip=algorithm.eps_clip, eps_clip_high=algorithm.eps_clip_high, eps_clip_c=algorithm.eps_clip_c,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_plans_and_trains_with_every_set_of_options(estimator, options):
    plan = planned(estimator, options)
    assert plan.owner("policy_loss").name == ESTIMATORS[estimator]
    parts = [one for one in plan.selected if one.manifest.name not in ("local", "megatron")]
    config, hooks = plan.config, bind(parts, plan.config, "trainer")
    batch = batch_for(config)
    fill(batch, hooks.advantage[estimator](batch), estimator)
    if config.algorithm.normalize_advantages:
        whiten(batch)
    check(batch, estimator)
    step = type("Step", (), {"samples": batch.samples})

    def train():
        leaf = (torch.cat([torch.as_tensor(s.columns["rollout_log_probs"]) for s in batch.samples]) + 0.1)
        inputs = inputs_for(batch, config, leaf.requires_grad_())
        values, metrics = hooks.policy_loss[ESTIMATORS[estimator]](inputs)
        if hooks.token_weights:
            ones = torch.ones_like(values)
            found = hooks.token_weights(TokenWeights(ones, ones > 0, {}), inputs)
            values, metrics = torch.where(found.keep, values * found.weight, 0.0), {**metrics, **found.metrics}
        for coefficient, term in hooks.loss_terms(inputs).values():
            values = values + coefficient * term
        weights = torch.as_tensor(hooks.reduction[plan.owner("reduction").name](batch.samples))[inputs.sample]
        loss = reduce(values, weights, inputs.mask)
        loss.backward()
        return {"loss": loss.detach(), "gradient": leaf.grad, **metrics}

    metrics = hooks.train_step(train, step) if hooks.train_step else train()
    assert metrics["gradient"].abs().sum() > 0
    assert all(torch.isfinite(value).all() for value in metrics.values()), metrics


def test_the_plan_says_who_chose_the_loss(tmp_path):
    assert planned("gspo", "defaults").owner("policy_loss").origin == "namesake of the estimator"
    assert planned("rloo", "defaults").owner("policy_loss").origin == "the estimator brings none"
    named = prepare(None, [*RUN, "--advantage-estimator", "rloo", "--policy-loss", "cispo"])
    owner = named.owner("policy_loss")
    assert (owner.name, owner.plugin, owner.origin) == ("cispo", "cispo", "--policy-loss")


def test_a_swap_changes_one_word_of_the_plan():
    one, other = planned("grpo", "kl loss"), planned("rloo", "kl loss")
    differ = {key for key, value in one.to_json()["options"].items() if other.to_json()["options"].get(key) != value}
    assert differ == {"algorithm.advantage_estimator"}
