"""Options, and how the reverse KL reaches the advantages."""

import subprocess
import sys

import numpy as np
import pytest
from miles_opd.passes import metrics, penalty
from miles_opd.plugin import Opd, OpdOptions
from miles_testing.batches import make_batch, make_sample

from miles_core.config.tables import Algorithm, Rollout, RunConfig
from miles_core.errors import ConfigError

ESTIMATOR = "on_policy_distillation"
SERVER = {"opd_teacher_urls": ["http://a"]}


def config(estimator=ESTIMATOR, rm_type=(), temperature=1.0, **algorithm):
    return RunConfig(rollout=Rollout(rm_type=list(rm_type), rollout_temperature=temperature),
                     algorithm=Algorithm(advantage_estimator=estimator, **algorithm))


def made(**columns):
    return make_batch([0.0, 0.0], log_probs=[-1.0, -2.0], **columns)


def test_the_estimator_is_the_negative_reverse_kl(tmp_path):
    plugin = Opd(OpdOptions(opd_teacher_load=str(tmp_path), opd_kl_coef=0.5), config())
    found = plugin.advantage(made(opd_reverse_kl=[1.0, -3.0]))
    assert [row.tolist() for row in found] == [[-0.5, 1.5]] * 2


def test_on_top_of_another_estimator_it_comes_off_and_otherwise_nothing_changes(tmp_path):
    batch = made(opd_reverse_kl=[1.0, -3.0], advantages=[2.0, 2.0])
    alone = Opd(OpdOptions(opd_teacher_load=str(tmp_path)), config())
    assert alone.shape_advantages(batch).samples[0].columns["advantages"].tolist() == [2, 2]
    on_top = Opd(OpdOptions(opd_teacher_load=str(tmp_path), use_opd=True, opd_kl_coef=0.5), config("grpo"))
    assert [s.columns["advantages"].tolist() for s in on_top.shape_advantages(batch).samples] == [[1.5, 3.5]] * 2


def test_as_a_baseline_the_estimate_is_taken_off_the_sampled_token():
    """Sampled: -1 + 3 = 2; the estimate is 0.5. A masked row holds anything."""
    sample = make_sample(0, 0, 0.0, (1, 0), log_probs=[-1, 7], teacher_log_probs=[-3, 9], opd_reverse_kl=[0.5, 0])
    assert penalty(sample, "log_probs", baseline=True).tolist() == [1.5, 0]
    assert penalty(sample, "log_probs", baseline=False).tolist() == [0.5, 0]
    assert metrics([sample]) == {"rollout/opd_reverse_kl": 0.5, "rollout/teacher_log_probs": -3.0}
    assert metrics([make_sample(0, 0, 0.0, (0,), opd_reverse_kl=[0])]) == {}


def test_the_expected_gradient_of_a_position_is_that_of_the_reverse_kl_only_with_the_sampled_token():
    """Over all tokens: sum p A dlogp/dz is the slope of KL(p || q) with the baseline, and 0 for the estimate alone."""
    draw = np.random.default_rng(0)
    p, q = draw.dirichlet(np.ones(5), size=2)
    gap = np.log(p) - np.log(q)
    divergence = p @ gap
    jacobian = np.diag(p) - np.outer(p, p)  # d p_i / d z_j
    slope = jacobian @ gap
    np.testing.assert_allclose(jacobian @ (gap - divergence), slope, atol=1e-15)
    np.testing.assert_allclose(jacobian @ np.full(5, divergence), 0, atol=1e-15)


REFUSED = [
    ("needs a teacher", {}, {}),
    ("in the trainer or behind a server", {"opd_teacher_load": "/tmp", **SERVER}, {}),
    ("names no teacher.*--opd-teacher-urls", {"opd_type": "sglang", "opd_teacher_load": "/tmp"}, {}),
    ("names no teacher.*--opd-teacher-load", {"opd_type": "megatron", **SERVER}, {}),
    ("/no/where", {"opd_teacher_load": "/no/where"}, {}),
    ("count twice", {"opd_teacher_load": "/tmp", "use_opd": True}, {}),
    ("nothing to do.*--use-opd", {"opd_teacher_load": "/tmp"}, {"estimator": "grpo"}),
    ("old log-probs", {"opd_teacher_load": "/tmp"}, {"skip_actor_forward_only": True}),
    ("asks a server", {"opd_teacher_load": "/tmp"}, {"rm_type": [ESTIMATOR]}),
    ("never be queried.*--rm-type", SERVER, {}),
    ("temperature 1", SERVER, {"rm_type": [ESTIMATOR], "temperature": 0.7}),
    ("at least 0", {"opd_teacher_load": "/tmp", "opd_log_prob_top_k": -1}, {}),
    ("at least 0", {"opd_teacher_load": "/tmp", "opd_kl_coef": float("nan")}, {}),
    ("above 0", {"opd_teacher_load": "/tmp", "opd_teacher_timeout": 0}, {}),
    ("baseline needs top-k", {"opd_teacher_load": "/tmp", "opd_top_k_baseline": True}, {}),
]


@pytest.mark.parametrize("words, options, run", REFUSED, ids=[words for words, _, _ in REFUSED])
def test_bad_options_are_refused(words, options, run):
    with pytest.raises(ConfigError, match=words):
        Opd(OpdOptions(**options), config(**run))


def test_without_labels_every_answer_gets_nothing_but_the_teacher():
    run = config(rm_type=["teacher_only"])
    plugin = Opd(OpdOptions(opd_teacher_load="/tmp"), run)
    assert plugin.nothing(None) == 0.0


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_opd.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
