"""What patterns freeze and slow down, on one rank and on two, with both trainers; what comes back from a checkpoint.

Trainers live in processes that are started once.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from miles_megatron.testing.ranks import batches
from safetensors.numpy import load_file

from miles_core.errors import ConfigError

pytestmark = pytest.mark.xdist_group("param-groups")  # one worker: the processes are started once

FSDP = ("--trainer", "fsdp")
TWO = ("--actor-num-gpus-per-node", 2)
TRAINERS = pytest.mark.parametrize("trainer", [(), FSDP], ids=["megatron", "fsdp"])
LAYOUTS = {
    "dp2": ("dense", TWO),
    "tp2": ("dense", (*TWO, "--tensor-model-parallel-size", 2)),
    "pp2": ("dense", (*TWO, "--pipeline-model-parallel-size", 2)),
    "pp2-tied": ("tied", (*TWO, "--pipeline-model-parallel-size", 2)),
    "vpp": ("deep", (*TWO, "--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2)),
    "ep2": ("moe", (*TWO, "--expert-model-parallel-size", 2)),
    "recompute": ("dense", (*TWO, "--recompute-granularity", "full")),
    "fsdp2": ("dense", (*TWO, *FSDP)),
}  # fmt: skip
CHOICES = {
    "only-last-layer": ("--only-train-params-name-list", r"layers\.1\."),
    "only-first-layer": ("--only-train-params-name-list", r"layers\.0\."),
    "but-embedding": ("--freeze-params-name-list", "embed"),
    "decoupled": ("--freeze-params-name-list", r"layers\.0\.", "--decoupled-lr", "1e-3"),
    "rates": ("--freeze-params-name-list", r"layers\.0\.", "--lr-mult", r"embed_tokens=0.25", r"layers\.1\.mlp=0.5"),
}


def rollouts(count=2):
    return batches(count, vocab=264)


def moved(result, folder):
    """Names of the tensors of which a bit is another than in the files."""
    stored = load_file(folder / "model.safetensors")
    return {name for name, one in result["weights"].items() if not np.array_equal(one, stored[name])}


def names(folder):
    return set(load_file(folder / "model.safetensors"))


@TRAINERS
def test_only_what_a_pattern_names_moves_by_a_bit(checkpoint, plan, one, trainer):
    flags = ("--only-train-params-name-list", r"layers\.1\.", "norm", *trainer)
    result = one.train(plan(*flags), rollouts())
    assert moved(result, checkpoint()) == {
        name for name in names(checkpoint()) if "layers.1." in name or "norm" in name}


@TRAINERS
def test_biases_of_frozen_weights_train(checkpoint, plan, one, trainer):
    result = one.train(plan("--only-train-params-name-list", "bias", *trainer, kind="biased"), rollouts())
    assert moved(result, checkpoint("biased")) == {name for name in names(checkpoint("biased")) if "bias" in name}


@TRAINERS
def test_routers_stay_and_all_else_moves(checkpoint, plan, one, trainer):
    result = one.train(plan("--moe-router-freeze-gate", *trainer, kind="moe"), rollouts())
    still = names(checkpoint("moe")) - moved(result, checkpoint("moe"))
    assert still == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


def test_what_trains_has_a_gradient_and_state_and_nothing_else_does(plan, trainer_of):
    """No gradient buffer, no moments."""
    trainer = trainer_of(plan("--freeze-params-name-list", "mlp", "embed", "--trainer-host", "thread"))
    actor = trainer.models.actor
    trains = [one for one in actor.parameters() if one.requires_grad]
    held = sum(buffer.grad_data.numel() for chunk in actor.wrapped for buffer in chunk.buffers)
    assert 0 < len(trains) < len(list(actor.parameters()))
    assert not any(hasattr(one, "main_grad") for one in actor.parameters() if not one.requires_grad)
    wanted = sum(one.numel() for one in trains)
    state = [one for group in actor.optimizer.param_groups for one in group["params"]]
    assert sum(one.numel() for one in state) == wanted and wanted <= held < wanted + 64 * len(trains)


@TRAINERS
def test_each_rate_is_the_factor_of_the_run_s(plan, one, trainer):
    """With Adam's first step of +-lr the distance that a parameter goes is its rate; and the metrics say so."""
    flags = ("--lr-mult", "embed_tokens=0.25", r"\.mlp\.=0.5", "--adam-eps", "1e-20", "--clip-grad", 0, *trainer)
    result, start = (one.train(plan(*flags, "--lr", lr), rollouts(1)) for lr in ("1e-2", "0"))
    far = {name: np.abs(value - start["weights"][name]).max() for name, value in result["weights"].items()}
    for name, distance in far.items():
        factor = 0.25 if "embed" in name else 0.5 if ".mlp." in name else 1
        assert distance == pytest.approx(1e-2 * factor, rel=2e-3), name
    step = result["steps"][0]
    assert [step[f"train/lr-pg_{i}"] for i in range(3)] == pytest.approx([1e-2, 5e-3, 2.5e-3])
    assert "train/lr-pg_3" not in step


def test_rates_follow_the_schedule(plan, one):
    flags = ("--lr-decay-style", "linear", "--min-lr", "1e-3", "--lr-mult", "mlp=0.5")
    for step in one.train(plan(*flags), rollouts(3))["steps"]:
        assert step["train/lr-pg_1"] == pytest.approx(step["train/lr-pg_0"] / 2)


@pytest.mark.parametrize(("choice", "trainer"), [
    ("rates", ()), pytest.param("rates", FSDP, marks=pytest.mark.full),
    pytest.param("decoupled", (), marks=pytest.mark.full),
    pytest.param("only-last-layer", (), marks=pytest.mark.full)])
def test_a_resumed_run_goes_on_to_the_bit(plan, one, tmp_path, choice, trainer):
    flags, [first, *rest] = (*CHOICES[choice], *trainer), rollouts(3)
    straight = one.train(plan(*flags), [first, *rest])
    one.train(plan(*flags), [copy.deepcopy(first)], save=tmp_path / "saved")
    resumed = one.train(plan(*flags, "--load", tmp_path / "saved"), rest)
    for name, weight in straight["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][name], weight, err_msg=name)
    for key in ("train/loss", "train/grad_norm", "train/lr-pg_0"):
        assert resumed["steps"][-1][key] == straight["steps"][-1][key]


PLAIN = ("--no-use-distributed-optimizer",)


@pytest.mark.parametrize(("trainer", "before"), [
    ((), "embed_tokens=0.1"), ((), None), (PLAIN, None), (FSDP, "embed_tokens=0.1"),
    *(pytest.param(trainer, "embed_tokens=0.5", marks=pytest.mark.full) for trainer in ((), PLAIN, FSDP))])
def test_a_resumed_run_has_rates_of_its_own(plan, one, tmp_path, trainer, before):
    """Adam moves the weights of a tensor by about its rate, whatever a run before had slowed down, or had not."""
    first, second = rollouts()
    flags = (*trainer, "--weight-decay", "0")
    saved = one.train(plan(*flags, *(("--lr-mult", before) if before else ())), [first], save=tmp_path / "saved")
    resumed = one.train(plan(*flags, "--lr-mult", "lm_head=0.1", "--load", tmp_path / "saved"), [second])
    for name, weight in saved["weights"].items():
        rate = 1e-3 if "lm_head" in name else 1e-2
        assert rate / 2 < np.abs(resumed["weights"][name] - weight).max() < 2 * rate, name


def test_what_is_frozen_later_is_in_the_reference_as_it_was(plan, one, tmp_path):
    first, second = rollouts()
    one.train(plan("--use-kl-loss"), [first], save=tmp_path / "saved")
    flags = ("--use-kl-loss", "--load", tmp_path / "saved")
    expected, found = (one.train(plan(*flags, *more), [copy.deepcopy(second)])
                       for more in ((), ("--freeze-params-name-list", "embed")))
    for ours, theirs in zip(found["batch"].samples, expected["batch"].samples, strict=True):
        np.testing.assert_array_equal(ours.columns["ref_log_probs"], theirs.columns["ref_log_probs"])
    assert found["steps"][0]["train/loss"] == expected["steps"][0]["train/loss"]


@pytest.mark.full
@pytest.mark.parametrize("trainer", [(), FSDP], ids=["megatron", "fsdp"])
def test_in_16_bits_what_is_frozen_stays_and_a_resumed_run_goes_on(checkpoint, plan, one, tmp_path, trainer):
    flags, [first, *rest] = (*CHOICES["rates"], "--bf16", *trainer), rollouts(3)
    straight = one.train(plan(*flags), [first, *rest])
    one.train(plan(*flags), [copy.deepcopy(first)], save=tmp_path / "saved")
    resumed = one.train(plan(*flags, "--load", tmp_path / "saved"), rest)
    start = one.train(plan(*flags, "--lr", "0"), rollouts(1))
    for name, weight in straight["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][name], weight, err_msg=name)
        assert np.array_equal(weight, start["weights"][name]) == ("layers.0." in name), name


@pytest.mark.parametrize("choice", [pytest.param(name, marks=() if name == "only-last-layer" else pytest.mark.full)
                                    for name in CHOICES])
@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in ("pp2", "ep2") else pytest.mark.full)
                                    for name in LAYOUTS])
def test_a_layout_changes_nothing(checkpoint, plan, one, two, layout, choice):
    """The same parameters move, as far; also where a whole pipeline stage is frozen."""
    kind, flags = LAYOUTS[layout]
    if (layout, choice) == ("fsdp2", "decoupled"):
        pytest.skip("an option of Megatron-core")
    options = (*CHOICES[choice], "--adam-eps", "1e-3")
    ours = two.train(plan(*options, *flags, kind=kind), rollouts())
    alone = one.train(plan(*options, *(FSDP if layout == "fsdp2" else ()), kind=kind), rollouts())
    assert moved(ours, checkpoint(kind)) == moved(alone, checkpoint(kind)) != names(checkpoint(kind))
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(ours["weights"][name], weight, atol=2e-5, err_msg=name)
    for key in ("train/grad_norm", "train/lr-pg_0"):
        assert ours["steps"][-1][key] == pytest.approx(alone["steps"][-1][key], rel=1e-4)


@pytest.mark.full
def test_a_checkpoint_loads_under_another_layout(plan, one, two, tmp_path):
    flags, [first, second] = (*CHOICES["rates"], "--adam-eps", "1e-3"), rollouts()
    straight = one.train(plan(*flags), [first, second])
    pipeline = LAYOUTS["pp2"][1]
    two.train(plan(*flags, *pipeline), [copy.deepcopy(first)], save=tmp_path / "saved")
    resumed = one.train(plan(*flags, "--load", tmp_path / "saved"), [second])
    for name, weight in straight["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], weight, atol=2e-5, err_msg=name)


WRONG = {
    "param-pattern-unmatched": (("--freeze-params-name-list", "embed_tokns"), "embed_tokens"),
    "param-all-frozen": (("--freeze-params-name-list", "."), "all frozen"),
    "param-lr-twice": (("--lr-mult", "mlp=0.5", r"layers\.1\.=0.1"), "layers.1.mlp"),
    "param-lr-frozen": (("--freeze-params-name-list", "mlp", "--lr-mult", "mlp=0.5"), "mlp"),
}  # fmt: skip


@TRAINERS
@pytest.mark.parametrize("code", WRONG)
def test_a_choice_without_effect_is_refused(plan, trainer_of, trainer, code):
    flags, fact = WRONG[code]
    with pytest.raises(ConfigError) as caught:
        trainer_of(plan(*flags, *trainer, "--trainer-host", "thread"))
    assert caught.value.code == code and fact in str(caught.value)


def test_a_part_of_a_merged_parameter_cannot_be_frozen(plan, trainer_of):
    with pytest.raises(ConfigError) as caught:
        trainer_of(plan("--freeze-params-name-list", "q_proj", "--trainer-host", "thread"))
    assert caught.value.code == "param-pattern-splits" and "linear_qkv" in caught.value.fix


@pytest.mark.parametrize(("flags", "code"), [
    (("--freeze-params-name-list", "("), "param-pattern-invalid"),
    (("--lr-mult", "mlp"), "lr-mult-invalid"),
    (("--lr-mult", "mlp=0"), "lr-mult-invalid"),
    (("--lr-mult", "mlp=nan"), "lr-mult-invalid"),
])
def test_what_is_no_pattern_or_no_factor_is_refused_by_the_plan(plan, flags, code):
    with pytest.raises(ConfigError) as caught:
        plan(*flags)
    assert caught.value.code == code


def test_the_plan_says_what_trains(plan):
    from miles_core.plugins import bind

    one = plan("--moe-router-freeze-gate", "--lr-mult", "mlp=0.5", "norm=2")
    hooks = bind.bind(one.selected, one.config, "driver")
    lines = [text for _, text in hooks.instances["param-groups"].plan_lines(one.config)]
    assert "router" in lines[0] and [line.split()[2] for line in lines[1:]] == ["0.02", "0.005"]
