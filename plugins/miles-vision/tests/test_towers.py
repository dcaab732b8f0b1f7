"""Megatron's trainer with transformers' vision tower: its log-probs are the whole model's, under every layout."""

from __future__ import annotations

import copy
import functools
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from miles_megatron import cpu
from miles_testing import toy_run
from miles_vision.images import ImageStore, opened
from miles_vision.processor import load_pixels
from pictures import picture
from rollouts import RUN_FILE, batches
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from miles_core.build import trainer_part
from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugins.plan import prepare
from miles_core.types import Rank

MEGATRON = ("--trainer", "megatron", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2000", "--num-rollout", "2")
KINDS = ["gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
SEEING = re.compile(r"(^|\.)(vision_tower|vision_model|multi_modal_projector|visual)\.")
IMAGES = [[1, 0, 0, 2], [0, 3, 1, 1]]
UNCLIPPED = ("--clip-grad", "0")


@pytest.fixture
def planned(checkpoint, tmp_path):
    """(kind, *flags) -> the plan, and rollouts whose images are in its folder."""
    return lambda kind, *flags, images=IMAGES: plan_of(checkpoint(kind), tmp_path, *flags, images=images)


def plan_of(model, folder, *flags, images):
    """See `planned`."""
    (folder / "run.toml").write_text(RUN_FILE)
    plan = prepare(folder / "run.toml", ["--hf-checkpoint", str(model), "--vision.image-dir", str(folder / "images"),
                                         *MEGATRON, *flags])
    return plan, batches(model, folder / "images", images), ImageStore(folder / "images")


@contextmanager
def stepped(plan, batch):
    """A trainer after one step."""
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    try:
        trainer.load()
        trainer.take_batch(copy.deepcopy(batch))
        trainer.score()
        trainer.advantage()
        trainer.step(0)
        yield trainer
    finally:
        cpu.leave()


def scored(plan, batch):
    """Log-probs of each answer, of samples that share one micro-batch: the step's own, before the weights move."""
    with stepped(plan, batch) as trainer:
        return [one.columns["log_probs"] for group in trainer.batch.groups for one in group.samples]


def expected(folder, store, batch):
    """By the whole model of transformers, one sample at a time; its own processor lays images side by side."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    process = load_pixels(str(folder))
    for sample in [one for group in batch.groups for one in group.samples]:
        names = sample.prompt.metadata["image_files"]
        pixels = dict(process(images=[opened(store.get(name)) for name in names], return_tensors="pt")) if names else {}
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        kinds = {"mm_token_type_ids": "image_grid_thw", "token_type_ids": "num_crops"}
        pixels = {name: one.float() if one.is_floating_point() else one for name, one in pixels.items()}
        pixels |= {name: (tokens == 261).long()[None] for name, beside in kinds.items() if beside in pixels}
        with torch.no_grad():
            logits = model(input_ids=tokens[None], **pixels).logits[0, -sample.response_length - 1 : -1]
        answer = tokens[-sample.response_length :]
        yield logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_log_probs_of_the_whole_model_and_not_those_of_another_image(kind, checkpoint, planned):
    plan, (batch,), store = planned(kind, images=IMAGES[:1])
    ours, theirs = scored(plan, batch), [*expected(checkpoint(kind), store, batch)]
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    swapped = copy.deepcopy(batch)
    (prompt,) = {one.prompt.uid: one.prompt for one in swapped.groups[0].samples}.values()
    prompt.metadata["image_files"] = [store.put(picture((1, 200, 3), (16, 16)))]
    other = scored(plan, swapped)
    print(f"\n{kind}: {apart:.1e} from transformers, {np.abs(other[0] - ours[0]).max():.1e} by another image")
    assert apart <= 1e-5
    assert np.abs(other[0] - ours[0]).max() > 1e-2
    assert all(np.array_equal(a, b) for a, b in zip(other[1:], ours[1:], strict=True)), "of that sample alone"


@pytest.mark.parametrize("kind", KINDS)
def test_engines_are_sent_the_whole_checkpoint(kind, checkpoint, planned):
    """The bits of Megatron's model and of what is beside its embedding, as both were filled."""
    plan, _, _ = planned(kind)
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    try:
        trainer.load()
        sent = {name: tensor.clone() for name, tensor in trainer.models.for_engine()}
    finally:
        cpu.leave()
    stored = load_file(checkpoint(kind) / "model.safetensors")
    assert sent.keys() == stored.keys() and all(torch.equal(sent[name], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", KINDS[:7])
def test_conversion_has_the_tower_in_the_checkpoint_and_out_of_it(kind, checkpoint, convert, tmp_path):
    convert("hf-to-dist", checkpoint(kind), tmp_path / "dist", "--plugin", "vision")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "hf", "--hf-checkpoint", checkpoint(kind), "--plugin", "vision")
    before, after = (load_file(one / "model.safetensors") for one in (checkpoint(kind), tmp_path / "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError) as caught:  # without the plugin they would be lost
        convert("dist-to-hf", tmp_path / "dist", tmp_path / "text", "--hf-checkpoint", checkpoint(kind))
    assert "--plugin vision" in caught.value.fix


def test_what_changes_the_model_comes_after_what_reads_images(checkpoint, tmp_path):
    """Else a pattern would not find the tower, or leave it as it is."""
    (tmp_path / "run.toml").write_text(RUN_FILE.replace('["grpo", ', '["grpo", "param-groups", '))
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path / "run.toml", ["--hf-checkpoint", str(checkpoint("qwen2_5_vl")), *MEGATRON])
    assert caught.value.code == "vision-setting" and "param-groups" in str(caught.value)


OPTIONS = {"perf.trainer": "megatron", "rollout.rollout_temperature": 0.8, "rollout.rollout_max_context_len": 200}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS[:6])  # the local engine shows no images to layers with a state
def test_a_run_agrees_with_its_engine_and_goes_on_and_its_export_has_the_tower(kind, checkpoint, tmp_path):
    """Two rollouts, at once and with a stop between them; the engine computes with transformers' whole model. All of
    it moves, and to the same bits."""
    if kind == "mistral3":
        pytest.importorskip("torchvision", reason="its processor wants it")
    folder, saved = checkpoint(kind), str(tmp_path / "saved")
    flags = ["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "8",
             "--entropy-coef", "0.01"]  # there is a gradient whatever is answered
    saving = [*flags, "--save", saved, "--load", saved, "--save-interval", "1", "--save-hf", str(tmp_path / "hf")]
    at_once = [*flags, "--save", f"{saved}-whole", "--save-hf", str(tmp_path / "whole")]
    whole, first, second = (toy_run(["vision"], steps=2, checkpoint=folder, options=OPTIONS, flags=more) for more in (
        at_once, [*saving, "--debug-exit-after-rollout", "1"], saving))
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in whole.metrics]
    print(f"\n{kind}: engine and trainer differ by {max(gaps):.1e}")
    assert len(gaps) == 2 and max(gaps) <= 2e-5 and all(one["train/grad_norm"] > 0 for one in whole.metrics)
    losses = [[one["train/loss"] for run in runs for one in run.metrics] for runs in ([whole], [first, second])]
    assert losses[0] == losses[1]
    before, after, resumed = (load_file(one / "model.safetensors")
                              for one in (folder, tmp_path / "whole", tmp_path / "hf"))
    assert before.keys() == after.keys() == resumed.keys() and any(map(SEEING.search, before))
    assert not [name for name in before if torch.equal(before[name], after[name])]
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()


def gradients(plan, batch):
    """Of one step, by the checkpoint's names."""
    fsdp = plan.config.perf.trainer == "fsdp"
    with stepped(plan, batch) as trainer:
        with torch.no_grad():
            for parameter in trainer.models.actor.parameters():
                parameter.copy_(parameter.grad if fsdp else parameter.main_grad)
        return {name: one.clone() for name, one in trainer.models.stream()}


@pytest.fixture(scope="module")
def of_fsdp(checkpoint, tmp_path_factory):
    """kind -> gradients by the trainer fsdp, computed once."""
    @functools.cache
    def computed(kind):
        plan, (batch,), _ = plan_of(checkpoint(kind), tmp_path_factory.mktemp("whole"), *UNCLIPPED, "--trainer", "fsdp",
                                    images=IMAGES[:1])
        return gradients(plan, batch)

    return computed


@pytest.mark.parametrize("recompute", [(), ("--recompute-granularity", "full")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS[:7])
def test_gradients_are_those_of_the_whole_model(kind, recompute, planned, of_fsdp):
    """Which the trainer fsdp has, in one micro-batch with no, one and two images."""
    plan, (batch,), _ = planned(kind, *UNCLIPPED, *recompute, images=IMAGES[:1])
    ours, theirs = gradients(plan, batch), of_fsdp(kind)
    assert ours.keys() == theirs.keys()
    # What a softmax does not see has a gradient of rounding alone: the biases of Gemma 3's keys.
    felt = {name: one for name, one in theirs.items() if one.abs().max() > 1e-6}
    apart = {name: float((ours[name] - one).norm() / one.norm()) for name, one in felt.items()}
    print(f"\n{kind}: {max(apart.values()):.1e} of a gradient's norm, of {max(apart, key=apart.get)}")
    assert any(map(SEEING.search, apart)) and max(apart.values()) <= 2e-5
    assert not any(ours[name].abs().max() > 1e-6 for name in theirs.keys() - felt.keys())


LAYOUTS = {
    "TP2+SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2"), "CP2": ("--context-parallel-size", "2"), "DP2": (),
    "DP2 overlapped": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "EP2": ("--expert-model-parallel-size", "2"),
}


@pytest.mark.full  # three processes
@pytest.mark.xdist_group("vision-towers")
@pytest.mark.parametrize(("layout", "kind"), [(layout, kind) for layout in LAYOUTS for kind in KINDS[:7]
                                              if layout != "EP2" or kind in ("llama4", "qwen3_vl_moe")])
def test_two_ranks_are_one(layout, kind, planned, ranks_of):
    """Three steps with the reference's pass, the last without an image: log-probs of trained answers, losses and
    weights."""
    flags, images = ("--use-kl-loss", "--kl-loss-coef", "0.05"), [*IMAGES, [0] * 4]
    plan, rollouts, _ = planned(kind, *flags, images=images)
    one = ranks_of(1).train(plan, rollouts)
    plan, rollouts, _ = planned(kind, *flags, "--actor-num-gpus-per-node", "2", *LAYOUTS[layout], images=images)
    two = ranks_of(2).train(plan, rollouts)
    loss = max(abs(a["train/loss"] - b["train/loss"]) for a, b in zip(one["steps"], two["steps"], strict=True))
    weights = max(float(np.abs(two["weights"][name] - value).max()) for name, value in one["weights"].items())
    scores = max(float(np.abs(a.columns[name] - b.columns[name]).max())
                 for name in ("log_probs", "ref_log_probs")
                 for a, b in zip(one["batch"].samples, two["batch"].samples, strict=True))
    print(f"\n{kind} {layout}: loss {loss:.1e}, log-probs {scores:.1e}, weights {weights:.1e}")
    assert loss <= 2e-6 and scores <= 1e-5 and weights <= 1e-5


@pytest.mark.full
@pytest.mark.xdist_group("vision-towers")
def test_it_leaves_the_device_with_the_rest(planned, ranks_of):
    """Weights, gradients and optimizer between any two calls: the same bits."""
    plan, rollouts, _ = planned("qwen2_5_vl", "--use-kl-loss", "--kl-loss-coef", "0.05")
    stays, leaves = (ranks_of(1).train(plan, rollouts, turns=turns)["weights"] for turns in (False, True))
    assert all(np.array_equal(stays[name], leaves[name]) for name in stays)
