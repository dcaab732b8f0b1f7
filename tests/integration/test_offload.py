"""The trainer's memory given up and taken back between any two of its calls: not one bit of the training changes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches

from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.integration

SMALL = ["--rollout-max-response-len", "41", "--num-steps-per-rollout", "2", "--lr", "1e-3", "--max-tokens-per-gpu",
         "128", "--trainer-host", "process"]
TWO = ["--actor-num-gpus-per-node", "2"]

ONE_RANK = {
    "float32": ["--no-bf16", "--use-kl-loss", "--kl-loss-coef", "0.1"],
    "bfloat16": ["--bf16", "--engine-dtype", "float32"],
    "plain optimizer": ["--bf16", "--engine-dtype", "float32", "--no-use-distributed-optimizer"],
    "critic": ["--advantage-estimator", "ppo", "--lambd", "0.9", "--kl-coef", "0.1"],
}
TWO_RANKS = {
    "overlapped": [*TWO, "--bf16", "--engine-dtype", "float32", "--overlap-param-gather", "--overlap-grad-reduce"],
    "tensor": [*TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
}


def same(plan, ranks) -> None:
    given = batches(2)
    expected, found = (ranks.train(plan, given, turns=turns) for turns in (False, True))
    timeless = [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in expected["steps"]]
    assert [{k: step[k] for k in want} for step, want in zip(found["steps"], timeless, strict=True)] == timeless
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert np.array_equal(found["weights"][name], weight), name


@pytest.mark.full
def test_one_rank_trains_to_the_same_bits(run_file, one):
    """In both dtypes, with a reference that is swapped in, with either optimizer, with a critic."""
    for flags in ONE_RANK.values():
        same(prepare(run_file(), [*SMALL, *flags]), one)


@pytest.mark.full
def test_two_ranks_train_to_the_same_bits(run_file, two):
    """Weights on their way from the other rank arrive before they leave; experts have buffers of their own."""
    for flags in TWO_RANKS.values():
        same(prepare(run_file(), [*SMALL, *flags]), two)
    same(prepare(run_file("qwen3_moe"), [*SMALL, *TWO, "--expert-model-parallel-size", "2"]), two)


def alive() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in gc.get_objects() if torch.is_tensor(t))}
    return sum(storages.values())


@pytest.mark.full
@pytest.mark.parametrize("flags", [
    ["--bf16"], *(pytest.param(flags, marks=pytest.mark.full) for flags in (
        ["--no-bf16"], ["--bf16", "--no-use-distributed-optimizer"]))], ids=str)
def test_the_memory_really_goes(run_file, flags):
    """After offload nothing is left but host copies; gradients are not copied and come back as zeros."""
    from miles_core.build import trainer_part
    from miles_core.errors import ConfigError
    from miles_core.types import Rank

    plan = prepare(run_file(), [*SMALL, *flags, "--engine-dtype", "float32"])
    before = alive()
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    try:
        trainer.load()
        batch, = batches(1)
        trainer.take_batch(batch)
        trainer.score(), trainer.advantage(), trainer.step(0), trainer.end_batch()
        memory = trainer.models.actor.memory
        sizes = {tag: memory.held(tag) for tag in ("weights", "gradients", "optimizer")}
        # bf16: 2 bytes of weight, 4 of gradient, 4 + 4 + 4 of master and moments; in fp32 the master is the weight.
        count = sum(p.numel() for p in trainer.models.actor.parameters())
        bytes_of = {"weights": 2, "gradients": 4, "optimizer": 12} if "--bf16" in flags else {
            "weights": 4, "gradients": 4, "optimizer": 8}
        assert sizes == {tag: pytest.approx(count * size, rel=0.02) for tag, size in bytes_of.items()}
        whole = alive()
        trainer.offload(["gradients"])
        assert whole - alive() >= sizes["gradients"]
        trainer.offload(["weights", "optimizer"])
        assert not any(memory.held(tag) for tag in sizes)
        copies = sum(host.nbytes for host in memory.host.values())
        assert copies == pytest.approx(sizes["weights"] + sizes["optimizer"], rel=0.1)
        assert alive() - before <= copies + 0.1 * sum(sizes.values())
        trainer.onload(["weights", "gradients", "optimizer"])
        assert {tag: memory.held(tag) for tag in sizes} == pytest.approx(sizes, rel=0.1)  # tensors lie at multiples
        assert all(not p.main_grad.any() for p in trainer.models.actor.parameters())
        with pytest.raises(ConfigError, match="weights, gradients, optimizer"):
            trainer.offload(["activations"])
    finally:
        trainer.close()
        del trainer
