"""Models beside the actor, by the official plugins that have them: a critic that trains, teachers that score.

What they say is transformers' own; every layout trains like one rank; a resume is exact; they learn.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches
from miles_megatron.value import STD
from miles_testing import kill_resume, toy_run
from miles_testing.kill_resume import KillResume

from miles_core.plugins.plan import prepare
from miles_core.record.events import read

pytestmark = pytest.mark.integration

TEACHER = Path(__file__).parents[2] / "examples" / "arithmetic" / "tiny-qwen3"
PPO = ["--advantage-estimator", "ppo", "--lambd", "0.9", "--kl-coef", "0.1"]
OPD = ["--advantage-estimator", "on_policy_distillation"]
SMALL = ["--rollout-max-response-len", "41", "--num-steps-per-rollout", "2", "--lr", "1e-3", "--max-tokens-per-gpu",
         "96", "--trainer-host", "process",
         "--adam-eps", "1e-6"]  # an entry whose gradient is rounding would move by the learning rate, up or down
K = 5


@pytest.fixture(scope="module")
def teachers(tiny, tmp_path_factory) -> dict[str, Path]:
    """"same" has the student's architecture, "wider" another: both random, with the student's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder, found = tmp_path_factory.mktemp("teachers"), {}
    for name, changes in (("same", {}), ("wider", {"hidden_size": 48})):
        torch.manual_seed(7)
        config = Qwen3Config.from_pretrained(tiny / "qwen3")
        config.update(changes)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        model.save_pretrained(found.setdefault(name, folder / name))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny / "qwen3" / file, found[name])
    return found


def top_k(strategy, mode="student_p"):
    return ["--opd-log-prob-top-k", str(K), "--opd-top-k-strategy", strategy, "--opd-reward-weight-mode", mode]


def answers(folder, samples, cls):
    """[R, ...] of a transformers model for each sample, made at the token before."""
    model = cls.from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = [model(torch.from_numpy(s.tokens).long()[None])[0][0] for s in samples]
    return [out[s.length - s.response_length - 1:-1].double() for out, s in zip(outputs, samples, strict=True)]


def divergence(p, q, strategy, mode):
    """The reverse KL of one position over the tokens of a strategy, with Python's sets."""
    one, other = ({int(t) for t in x.topk(K).indices} for x in (p, q))
    tokens = sorted({"only-student": one, "only-teacher": other, "intersection": one & other, "union": one | other,
                     "xor": one ^ other}[strategy])
    weights = {"student_p": p, "teacher_p": q, "none": torch.zeros_like(p)}[mode][tokens].exp()
    weights = weights if strategy == "xor" else weights / weights.sum()
    return float((weights * (p - q)[tokens]).sum())


@pytest.mark.full
def test_the_critic_and_the_teachers_say_what_transformers_says(run_file, tiny, teachers, one):
    """Log-probs to 1e-5, values too; each token set with its weights; 0 where nothing is trained on."""
    from transformers import AutoModel, AutoModelForCausalLM

    cases = [("only-student", "student_p"), ("only-teacher", "teacher_p"), ("intersection", "none"),
             ("union", "student_p"), ("xor", "none")]

    def first(*flags):
        return one.train(prepare(run_file(), [*SMALL, *flags]), batches(1))["batch"].samples

    valued = first(*PPO)
    sampled = first(*OPD, "--opd-teacher-load", str(teachers["wider"]))
    sets = [first(*OPD, "--opd-teacher-load", str(teachers[name]), *top_k(*case))
            for case, name in zip(cases, ("same", "wider", "same", "wider", "same"), strict=True)]

    def close(samples, column, expected):
        for sample, row in zip(samples, expected, strict=True):
            mask = sample.columns["loss_mask"] > 0
            np.testing.assert_allclose(sample.columns[column], np.where(mask, row, 0), rtol=1e-4, atol=2e-5)

    seed = torch.Generator().manual_seed(1234)
    head = (torch.randn(1, 32, generator=seed) * STD).double()
    close(valued, "values", [out @ head[0] for out in answers(tiny / "qwen3", valued, AutoModel)])

    rows = {name: [out.log_softmax(1) for out in answers(folder, sampled, AutoModelForCausalLM)]
            for name, folder in {**teachers, "student": tiny / "qwen3"}.items()}
    drawn = [torch.from_numpy(s.tokens[-s.response_length:]).long()[:, None] for s in sampled]
    at = {name: [row.gather(1, t)[:, 0] for row, t in zip(rows[name], drawn, strict=True)] for name in rows}
    close(sampled, "teacher_log_probs", at["wider"])
    close(sampled, "opd_reverse_kl", [p - q for p, q in zip(at["student"], at["wider"], strict=True)])
    for case, name, samples in zip(cases, ("same", "wider", "same", "wider", "same"), sets, strict=True):
        close(samples, "opd_reverse_kl", [
            [divergence(p, q, *case) for p, q in zip(*both, strict=True)]
            for both in zip(rows["student"], rows[name], strict=True)])
        assert not [column for column in samples[0].columns if column.startswith("opd_") and "kl" not in column]


@pytest.mark.full
def test_a_critic_learns_what_there_is_to_know(run_file, one):
    """Forty steps on one and the same rollout: it explains almost all of the returns."""
    flags = ["--advantage-estimator", "ppo", "--num-critic-only-steps", "40", "--critic-lr", "3e-3",
             "--num-rollout", "41", "--value-clip", "5", *SMALL, "--num-steps-per-rollout", "1",
             "--max-tokens-per-gpu", "2048"]
    steps = one.train(prepare(run_file(), flags), batches(1) * 40)["steps"]
    explained = [step["rollout/explained_variance"] for step in steps]
    assert explained[0] < 0.1 and explained[-1] > 0.8
    assert not [name for step in steps for name in step if name.startswith("train/") and "rollout" not in name]


@pytest.mark.full
def test_every_layout_trains_like_one_rank(run_file, teachers, one, two):
    """Six steps: losses of actor and critic to 2e-6, weights to 1e-5; the critic's are behind its later values."""
    kinds = {"critic": PPO, "swapped": [*OPD, "--opd-teacher-load", str(teachers["same"]), *top_k("union")],
             "beside": [*OPD, "--opd-teacher-load", str(teachers["wider"])]}
    layouts = {"one": [], "tensor": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
               "pipeline": ["--pipeline-model-parallel-size", "2"]}
    given, found = batches(3), {}

    def train(ranks, kind, layout):
        flags = [*SMALL, *kinds[kind], *layouts[layout], "--actor-num-gpus-per-node", str(ranks.size)]
        found[kind, layout] = ranks.train(prepare(run_file(), flags), given)

    for kind in kinds:
        train(one, kind, "one")
        train(two, kind, "tensor")
        train(two, kind, "pipeline")
    for (kind, layout), outcome in found.items():
        reference, where = found[kind, "one"], f"{kind}, {layout}"
        for ours, theirs in zip(outcome["steps"], reference["steps"], strict=True):
            for name in ("train/loss", "critic/loss", "rollout/values", "rollout/opd_reverse_kl"):
                assert ours.get(name) == pytest.approx(theirs.get(name), abs=2e-6), f"{where}: {name}"
            assert ours.keys() == theirs.keys(), where
        for name, weight in reference["weights"].items():
            np.testing.assert_allclose(outcome["weights"][name], weight, rtol=0, atol=1e-5, err_msg=f"{where}: {name}")
    steps = found["critic", "one"]["steps"]
    assert all(step["critic/loss"] > 0 for step in steps)
    assert len({step["rollout/values"] for step in steps}) == 3, "the critic has not learnt between rollouts"


@pytest.mark.full
def test_a_run_with_a_critic_goes_on_where_it_was(run_file, tmp_path):
    """Also from within the warm-up, in which the actor stands still and has no metrics; with a trainer process too."""
    flags = ["--advantage-estimator", "ppo", "--num-critic-only-steps", "2", "--critic-lr", "3e-3",
             "--lr-warmup-iters", "2", "--critic-lr-warmup-iters", "1", "--save-interval", "1", "--threads", "1"]
    course = KillResume(tmp_path, [run_file(), *flags], rollouts=5)
    reference = course.finish("reference")
    for rollouts in (1, 3):
        course.finish(f"stopped-{rollouts}", "--debug-exit-after-rollout", str(rollouts))
        stopped = course.finish(f"stopped-{rollouts}", *(["--trainer-host", "process"] if rollouts == 3 else []))
        assert not kill_resume.problems(stopped, reference, rollouts=5, ends=2)
    digests = kill_resume.checkpoint(reference)
    assert {"critic/common.pt", "critic/__0_0.distcp"} <= set(digests)
    metrics = kill_resume.metrics(list(read(reference / "events.jsonl")))
    assert ["train/loss" in m for m in metrics.values()] == [False, False, True, True, True]
    assert all(m["critic/loss"] > 0 for m in metrics.values())
    rates = [metrics[i]["train/lr-pg_0"] for i in (2, 3)]
    assert rates == pytest.approx([0, 1e-2 / 2]), "it waits for the actor's steps"


@pytest.mark.full
def test_what_cannot_be_loaded_is_named(place, teachers):
    place.run("--save", "ckpt", "--num-rollout", "1")
    ppo = ("--advantage-estimator", "ppo")
    place.refused(2, "holds no critic ... plugins", *ppo, "--load", "ckpt", "--run-dir", "runs/b")
    place.refused(2, "no tensor score.weight) ... [value-head-missing]", *ppo, "--critic-load", str(teachers["same"]))
    place.refused(2, "holds no critic", *ppo, "--critic-load", "ckpt")
    assert place.run(*ppo, "--save", "both", "--num-rollout", "1", "--run-dir", "runs/c").code == 0
    assert place.run(*ppo, "--critic-load", "both", "--num-rollout", "1", "--run-dir", "runs/d").code == 0
    place.refused(2, "train a critic that no estimator uses ... grpo", "--plugin", "ppo")
    other = place.model()
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|end|>"))
    place.refused(2, "do not share a vocabulary ... added tokens", *OPD, "--opd-teacher-load", str(other))
    place.refused(2, "opd_log_prob_top_k ... got 265 of 264", *OPD, "--opd-teacher-load",
                  str(teachers["same"]), "--opd-log-prob-top-k", "265")
    place.refused(2, "needs a teacher ... --opd-teacher-load", *OPD)
    place.refused(2, "--critic-save ... beside the actor ... --save", *ppo, "--critic-save", "x")


def history(run):
    return list(kill_resume.metrics(list(read(run / "events.jsonl"))).values())


@pytest.mark.full
def test_ppo_earns_more_and_its_critic_knows_better(run_file, tmp_path):
    course = KillResume(tmp_path, [
        run_file(), "--advantage-estimator", "ppo", "--rollout-batch-size", "8", "--lambd", "0.95",
        "--normalize-advantages", "--threads", "1"], rollouts=24)
    found = history(course.finish("run"))
    rewards, losses = ([m[name] for m in found] for name in ("rollout/raw_reward", "critic/value_loss"))
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.25
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) / 3


@pytest.mark.full
def test_distillation_brings_the_student_to_its_teacher(run_file, tmp_path):
    """A random student, a trained teacher, and the estimate over the whole vocabulary as the baseline."""
    course = KillResume(tmp_path, [
        run_file(), *OPD, "--opd-teacher-load", TEACHER, "--opd-log-prob-top-k", "264", "--opd.opd-top-k-baseline",
        "--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--max-tokens-per-gpu", "2048", "--threads", "1"],
        rollouts=30)
    found = [m["rollout/opd_reverse_kl"] for m in history(course.finish("run"))]
    assert np.mean(found[-3:]) < 0.85 * np.mean(found[:3])


OWN = '''
from miles_core import hookimpl


def closeness(inputs):
    """Terms of a loss of its own, and a metric."""
    return inputs.log_probs, {"closeness": inputs.log_probs.detach()}


class Own:
    """Takes a second step of the actor with a loss of its own."""

    @hookimpl
    def train_step(self, proceed, access):
        return proceed() | access.step("actor", closeness)
'''


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_what_a_loss_of_its_own_says_of_the_actor_has_the_actors_names(trainer, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    [metrics] = toy_run([path], steps=1, flags=["--trainer", trainer]).metrics
    assert "train/closeness" in metrics and "train/grad_norm" in metrics
    assert not any(name.startswith("actor/") for name in metrics)
