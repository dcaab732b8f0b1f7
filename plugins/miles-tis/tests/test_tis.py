"""Weights and masks against hand-computed values and an independent loop, and the contract of losses with them."""

import dataclasses
import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_testing.batches import make_sample
from miles_testing.losses import Case, cases, inputs_of, loss_contract
from miles_tis.plugin import Tis, TisOptions
from miles_tis.weights import corrected, step_mean

from miles_core.config.load import load
from miles_core.config.tables import Algorithm, RunConfig
from miles_core.errors import ConfigError
from miles_core.stages.loss import TokenWeights, clipped_surrogate

torch.set_num_threads(1)


def weigh(case, mean=1.0, **options):
    """The correction of a case whose earlier weights are all 1."""
    ones = torch.ones(len(case.mask), dtype=torch.float64)
    return corrected(TokenWeights(ones, ones > 0, {}), inputs_of(case, torch.as_tensor(case.log_probs)),
                     TisOptions(**options), mean)


def of_ratios(*samples, advantage=1.0):
    """Samples of tokens with these ratios of trainer to engine; a negative one is masked."""
    ratios = np.concatenate([np.array(sample, float) for sample in samples])
    sample = np.repeat(np.arange(len(samples)), [len(s) for s in samples])
    engine = np.full(len(ratios), -1.0)
    old = engine + np.log(np.abs(ratios))
    return Case(old, old, engine, old, np.full(len(ratios), advantage), (ratios > 0).astype(float), sample,
                np.ones(len(samples)))


RATIOS = of_ratios([4.0, 0.25, 1.5], [1.5, 1.5, -9.0])


@pytest.mark.parametrize(("options", "weights", "kept"), [
    ({}, [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    ({"use_tis": True}, [2, 0.25, 1.5, 1.5, 1.5], [1, 1, 1, 1, 1]),
    ({"use_tis": True, "tis_clip_low": 0.5}, [2, 0.5, 1.5, 1.5, 1.5], [1, 1, 1, 1, 1]),
    ({"use_tis": True, "tis_clip_low": 0.5, "tis_mode": "truncate"}, [2, 0.25, 1.5, 1.5, 1.5], [1, 1, 1, 1, 1]),
    ({"use_tis": True, "tis_clip_low": 0.5, "tis_mode": "mask"}, [4, 0.25, 1.5, 1.5, 1.5], [0, 0, 1, 1, 1]),
    ({"use_tis": True, "tis_level": "sequence"}, [1.5, 1.5, 1.5, 2, 2], [1, 1, 1, 1, 1]),
    ({"use_tis": True, "tis_level": "geometric"}, [1.5 ** (1 / 3)] * 3 + [1.5, 1.5], [1, 1, 1, 1, 1]),
    ({"use_rs": True, "rs_lower_bound": 0.5}, [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]),
    ({"use_rs": True, "rs_level": "sequence"}, [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]),
    ({"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.2}, [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]),
    ({"rs_veto_threshold": 0.3}, [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]),
    ({"use_tis": True, "use_rs": True, "rs_upper_bound": 3.0}, [2, 0.25, 1.5, 1.5, 1.5], [0, 1, 1, 1, 1]),
])  # fmt: skip
def test_by_hand(options, weights, kept):
    """Ratios 4, 1/4, 1.5 (product 1.5) and 1.5, 1.5 (product 2.25, mean 1.5) and a masked one."""
    found = weigh(RATIOS, **options)
    assert found.weight[:5].tolist() == pytest.approx(weights)
    assert found.keep[:5].tolist() == [bool(k) for k in kept]


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, [False, False, True, True]), (1.0, [True] * 4)])
def test_opsm_leaves_out_mistakes_that_the_policy_has_moved_away_from(advantage, kept):
    """The mean of old - new is 0.2 in the first sample and -0.2 in the second; delta is 0.1."""
    case = of_ratios([1.0, 1.0], [1.0, 1.0], advantage=advantage)
    case = dataclasses.replace(case, log_probs=case.old + [-0.4, 0.0, 0.4, 0.0])
    found = weigh(case, use_opsm=True, opsm_delta=0.1)
    assert found.keep.tolist() == kept
    assert found.metrics["opsm_clipfrac"].tolist() == [0.0 if k else 1.0 for k in kept]


def test_metrics_by_hand():
    """One sample, ratios 2 and 1/2: x = log 2 and -log 2."""
    found = weigh(of_ratios([2.0, 0.5]), use_tis=True, tis_clip=1.5, tis_clip_low=0.6).metrics
    k3 = [2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    expected = {
        "tis": [2, 0.5], "tis_abs": [1, 0.5], "tis_clipfrac": [1, 1], "ois": [1, 1],
        "mis_tis_weight_before_bound": [2, 0.5], "mis_tis_weight_after_bound": [1.5, 0.6],
        "mis_tis_clip_fraction_low": [0, 1], "mis_tis_clip_fraction_high": [1, 0],
        "mis_is_ratio_mean_after_tis_rs": [1.5, 0.6], "mis_kl": [-math.log(2), math.log(2)], "mis_k3_kl": k3,
        "mis_chi2_token": [3, -0.75], "mis_chi2_seq": [0, 0], "mis_training_log_ppl": [1, 1],
        "mis_rollout_log_ppl": [1, 1], "mis_training_ppl": [math.e] * 2, "mis_rollout_ppl": [math.e] * 2,
        "mis_log_ppl_diff": [0, 0], "mis_log_ppl_abs_diff": [0, 0], "mis_ppl_ratio": [1, 1],
    }  # fmt: skip
    assert {name: metric.tolist() for name, metric in found.items()} == {
        name: pytest.approx(values, abs=1e-12) for name, values in expected.items()}


def reference(case, options):
    """Weight and mask of each trained token, in plain floats."""
    low = options.tis_clip_low if options.rs_lower_bound is None else options.rs_lower_bound
    high = options.tis_clip if options.rs_upper_bound is None else options.rs_upper_bound
    found = {}
    for i in np.flatnonzero(case.mask):
        rows = [j for j in np.flatnonzero(case.mask) if case.sample[j] == case.sample[i]]
        x = [case.old[j] - case.engine[j] for j in rows]
        ratio = {"token": math.exp(case.old[i] - case.engine[i]), "sequence": math.exp(sum(x)),
                 "geometric": math.exp(sum(x) / len(x))}
        weight, keep = 1.0, True
        if options.use_tis:
            weight = ratio[options.tis_level]
            inside = options.tis_clip_low <= weight <= options.tis_clip
            if options.tis_mode == "mask":
                keep = inside
            elif weight > options.tis_clip:
                weight = options.tis_clip
            elif options.tis_mode == "clip" and weight < options.tis_clip_low:
                weight = options.tis_clip_low
        if options.use_rs:
            keep = keep and low <= ratio[options.rs_level] <= high
        if options.rs_veto_threshold is not None:
            keep = keep and min(x) >= math.log(options.rs_veto_threshold)
        if options.use_opsm:
            moved = sum(case.old[j] - case.log_probs[j] for j in rows) / len(rows)
            keep = keep and not (case.advantages[i] < 0 and moved > options.opsm_delta)
        found[i] = weight, keep
    return found


LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")


@given(cases(), st.builds(
    TisOptions, use_tis=st.booleans(), tis_level=st.sampled_from(LEVELS), tis_mode=st.sampled_from(MODES),
    tis_clip=st.floats(1.01, 1.5), tis_clip_low=st.floats(0, 0.95), use_rs=st.booleans(),
    rs_level=st.sampled_from(LEVELS), rs_upper_bound=st.none() | st.floats(1.1, 1.6),
    rs_lower_bound=st.none() | st.floats(0.1, 0.9), rs_veto_threshold=st.none() | st.floats(0.5, 0.9),
    use_opsm=st.booleans(), opsm_delta=st.floats(0.01, 0.3)))
@settings(deadline=None, max_examples=150)
def test_agrees_with_the_independent_loop(case, options):
    found = weigh(case, **dataclasses.asdict(options))
    assert found.metrics and not any(m.requires_grad for m in (found.weight, *found.metrics.values()))
    for i, (weight, keep) in reference(case, options).items():
        assert float(found.weight[i]) == pytest.approx(weight, rel=1e-12)
        assert bool(found.keep[i]) == keep


def weighted(options):
    """The clipped surrogate with the correction, as the trainer puts them together."""
    def loss(inputs):
        values, metrics = clipped_surrogate(inputs)
        ones = torch.ones_like(values)
        found = corrected(TokenWeights(ones, ones > 0, {}), inputs, options)
        return torch.where(found.keep, values * found.weight, 0.0), {**metrics, **found.metrics}

    return loss


SETS = [{"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_clip": 1.2, "tis_clip_low": 0.8}
        for level, mode in itertools.product(LEVELS, MODES)]
SETS += [{}, {"use_opsm": True, "opsm_delta": 0.05},
         {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.7, "rs_upper_bound": 1.4,
          "rs_veto_threshold": 0.8}]  # fmt: skip


@pytest.mark.parametrize("options", SETS, ids=str)
def test_a_corrected_loss_keeps_the_contract(options):
    loss_contract(weighted(TisOptions(**options)), examples=6)


def samples_of(case):
    """The samples of a case, as the trainer holds them."""
    rows = [np.flatnonzero(case.sample == i) for i in range(len(case.weights))]
    return [make_sample(0, i, 0.0, case.mask[r], log_probs=case.old[r], rollout_log_probs=case.engine[r])
            for i, r in enumerate(rows)]


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(case=cases())
@settings(deadline=None, max_examples=40)
def test_normalised_weights_have_mean_1_over_the_step_however_it_is_cut(level, case):
    options = {"use_tis": True, "tis_level": level, "tis_clip": 1.2, "tis_batch_normalize": True}
    mean = step_mean(samples_of(case), TisOptions(**options))
    trained = np.flatnonzero(case.mask)
    if not trained.size:
        assert mean == 1.0
        return
    whole = weigh(case, mean, **options)
    if level == "sequence":
        trained = np.array([np.flatnonzero((case.sample == i) & (case.mask > 0))[0]
                            for i in np.unique(case.sample[trained])])
    assert float(whole.weight[trained].mean()) == pytest.approx(1, rel=1e-6)
    assert whole.metrics["mis_batch_norm_factor"][0].item() == pytest.approx(mean)
    for one in range(len(case.weights)):  # each sample a micro-batch of its own
        rows = np.flatnonzero(case.sample == one)
        part = weigh(case.at(rows), mean, **options)
        torch.testing.assert_close(part.weight, whole.weight[rows])


def test_the_hook_looks_at_the_whole_step_before_it_begins():
    case = of_ratios([1.5, 1.0], [0.5])
    plugin = Tis(TisOptions(use_tis=True, tis_batch_normalize=True), RunConfig())
    ones = torch.ones(3, dtype=torch.float64)
    given = TokenWeights(2 * ones, torch.tensor([True, True, False]), {"mine": ones})

    def proceed():
        found = plugin.token_weights(given, inputs_of(case, torch.as_tensor(case.log_probs)))
        assert found.weight.tolist() == pytest.approx([3.0, 2.0, 1.0], rel=1e-6)  # the mean is 1
        assert found.keep.tolist() == [True, True, False] and "mine" in found.metrics
        return {"train/loss": 0.5}

    assert plugin.train_step(proceed, SimpleNamespace(samples=samples_of(case))) == {"train/loss": 0.5}
    assert plugin._mean == pytest.approx(1.0, rel=1e-6)


def test_without_old_log_probs_the_current_ones_stand_in():
    case = of_ratios([2.0, 0.5])
    bare = dataclasses.replace(inputs_of(case, torch.as_tensor(case.old)), rows={})
    ones = torch.ones(2, dtype=torch.float64)
    found = corrected(TokenWeights(ones, ones > 0, {}), bare, TisOptions(use_tis=True))
    assert found.weight.tolist() == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize(("options", "algorithm", "message"), [
    ({"tis_clip": 0.5, "tis_clip_low": 0.7}, {}, "tis_clip_low and tis_clip"),
    ({"tis_clip_low": -0.1}, {}, "bounds of a ratio"),
    ({"rs_upper_bound": 0.5, "rs_lower_bound": 0.6}, {}, "rs_lower_bound and rs_upper_bound"),
    ({"use_tis": True}, {"use_rollout_logprobs": True}, "twice"),
    ({"tis_batch_normalize": True}, {}, "tis_batch_normalize is for use_tis"),
    ({"use_tis": True, "tis_batch_normalize": True, "tis_level": "geometric"}, {}, "token or sequence"),
    ({"use_tis": True, "tis_batch_normalize": True}, {"skip_actor_forward_only": True}, "whole step"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        Tis(TisOptions(**options), RunConfig(algorithm=Algorithm(**algorithm)))


@pytest.mark.parametrize("flag", ["--use-tis", "--tis-clip", "--tis-clip-low", "--use-opsm", "--opsm-delta"])
def test_every_flag_of_todays_miles_sets_its_option(flag):
    words = [flag] if flag.startswith("--use") else [flag, "0.625"]
    loaded = load(None, ["--plugin", "tis", *words]).config
    assert loaded.options["tis"] == {flag[2:].replace("-", "_"): True if len(words) == 1 else 0.625}


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_tis.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
