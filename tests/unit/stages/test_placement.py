"""Placement: turns, seats of the engines, what Local gives its processes."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from miles_ray.cluster import Bundle, capacity
from miles_ray.placement import seats as ray_seats

from miles_core.config.environment import environment, relevant
from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError
from miles_core.hosts import Handle
from miles_core.stages import placement
from miles_core.stages.placement import Local, Turns
from miles_core.types import NodeSlot


def config(engine="sglang", **perf):
    return RunConfig(perf=Perf(**perf), rollout=Rollout(engine=engine), checkpoint=Checkpoint(run_dir="run"))


class Place:
    """What a server's host would make: tells its arguments."""

    def __init__(self, word, seat):
        self.word, self.seat = word, seat

    def told(self):
        return self.word, self.seat


def local(gpus, monkeypatch, **perf):
    """The seats that Local gives on a machine with these GPUs."""
    monkeypatch.setattr(placement, "visible_gpus", lambda: tuple(gpus))

    async def main():
        there = Local(config(**perf))
        await there.open()
        hosts = there.servers(Place, "word")
        told = [await host.told() for host in hosts]
        for host in hosts:
            await host.close()
        return told

    told = asyncio.run(main())
    assert all(word == "word" for word, _ in told)
    return [seat for _, seat in told]


def test_engines_follow_the_trainer_or_share_its_gpus(monkeypatch):
    apart = local(range(8), monkeypatch, actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert apart == [NodeSlot(engine=0, gpus=(4, 5)), NodeSlot(engine=1, gpus=(6, 7))]
    shared = local(range(4), monkeypatch, actor_num_gpus_per_node=4, colocate=True, rollout_num_gpus_per_engine=2)
    assert shared == [NodeSlot(engine=0, gpus=(0, 1)), NodeSlot(engine=1, gpus=(2, 3))]
    masked = local((4, 5, 6), monkeypatch, actor_num_gpus_per_node=1, rollout_num_gpus=2)
    assert [seat.gpus for seat in masked] == [(5,), (6,)], "numbers of CUDA_VISIBLE_DEVICES"


def test_a_machine_without_gpus_has_seats_without(monkeypatch):
    assert local((), monkeypatch, actor_num_gpus_per_node=2) == [NodeSlot(engine=0)]


def test_too_few_gpus_are_said(monkeypatch):
    with pytest.raises(ConfigError, match=r"6 GPUs, and this machine has 4 \(got trainer 4, engines 2 x 1\)"):
        local(range(4), monkeypatch, actor_num_gpus_per_node=4, rollout_num_gpus=2)


def test_visible_gpus_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert placement.visible_gpus() == (3, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.visible_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(ConfigError, match=r"\[visible-gpus-not-numbers\]"):
        placement.visible_gpus()


@pytest.mark.parametrize("colocate", [False, True])
def test_a_recovery_runs_beside_rollouts_and_never_amid_a_step(colocate):
    """A server that is sent weights amid a step would get some that no version names."""
    async def main():
        there, seen = Local(config("local", colocate=colocate)), []
        there.attach(Handle("trainer"), None)

        async def hold(purpose, seconds):
            async with there.lease(purpose):
                seen.append(f"+{purpose}")
                await asyncio.sleep(seconds)
                seen.append(f"-{purpose}")

        await asyncio.gather(hold("rollout", 0.06), hold("recover", 0.03))
        assert seen == ["+rollout", "+recover", "-recover", "-rollout"]
        seen.clear()
        await asyncio.gather(hold("train", 0.03), hold("recover", 0.0))
        assert seen == ["+train", "-train", "+recover", "-recover"]
        seen.clear()
        await asyncio.gather(hold("rollout", 0.03), hold("train", 0.0))
        together = ["+rollout", "+train", "-train", "-rollout"]
        assert seen == (["+rollout", "-rollout", "+train", "-train"] if colocate else together)

    asyncio.run(main())


def test_colocation_hands_over_only_where_both_sides_are():
    for given, expected in (({}, True), ({"colocate": False}, False)):
        there = Local(config(**{"colocate": True, **given}))
        there.attach(Handle("trainer"), SimpleNamespace(release=None, occupy=None))
        assert (there._hand_over is not None) == expected
    alone = Local(config(colocate=True))
    alone.attach(Handle("trainer"), None)
    assert alone._hand_over is None and alone.figures() == {}


def test_turns_end_with_an_error_inside():
    async def main():
        turns = Turns()
        with pytest.raises(ZeroDivisionError):
            async with turns("train"):
                raise ZeroDivisionError
        async with asyncio.timeout(1), turns("sync"):
            return True

    assert asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- environment


def test_variables_are_set_where_needed_and_yield_to_the_user_s():
    stated = {"weight_sync:broadcast": ("nccl",)}
    parallel = dataclasses.replace(config(weight_sync="broadcast"), stated=stated, surfaces={"megatron": {
        "tensor_model_parallel_size": 2, "fp8_recipe": "blockwise"}})
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert environment(parallel, gpus=True, env={}) == wanted
    assert environment(parallel, gpus=False, env={}) == {}
    assert environment(config(), gpus=True, env={}) == {}
    repeatable = dataclasses.replace(config(), surfaces={"megatron": {"deterministic_mode": True}})
    assert environment(repeatable, gpus=True, env={"NCCL_ALGO": "Tree"}) == {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for stated, colocate in (({}, False), ({"weight_sync:broadcast": ("checkpoints",)}, False), ({}, True)):
        other = dataclasses.replace(config(weight_sync="broadcast", colocate=colocate), stated=stated)
        assert bool(environment(other, gpus=True, env={})) == (not stated and not colocate)
    del wanted["NCCL_CUMEM_ENABLE"]
    assert environment(parallel, gpus=True, env={"NCCL_CUMEM_ENABLE": "1"}) == wanted
    assert relevant({"NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}


# ------------------------------------------------------------------------------------------------- seats of bundles


def bundles(*hosts, gpus=True):
    """A bundle on each host; GPUs of a host are numbered in order."""
    return [Bundle(i, host, hosts[:i].count(host) if gpus else None, hosts[:i].count(host))
            for i, host in enumerate(hosts)]


def test_engines_within_a_node_and_over_several():
    there = bundles(*"aaaabbbb")
    assert [(seat, place.index) for seat, place in ray_seats(there, 2)] == [
        (NodeSlot(0, 0, 1, "a", (0, 1)), 0), (NodeSlot(1, 0, 1, "a", (2, 3)), 2),
        (NodeSlot(2, 0, 1, "b", (0, 1)), 4), (NodeSlot(3, 0, 1, "b", (2, 3)), 6)]
    assert [(seat, place.index) for seat, place in ray_seats(there, 8)] == [
        (NodeSlot(0, 0, 2, "a", (0, 1, 2, 3)), 0), (NodeSlot(0, 1, 2, "b", (0, 1, 2, 3)), 4)]
    assert [seat for seat, _ in ray_seats(bundles("a", "a", gpus=False), 1)] == [
        NodeSlot(0, host="a"), NodeSlot(1, host="a")]


def test_an_engine_that_is_split_unevenly_is_refused():
    with pytest.raises(ConfigError, match=r"engine 0 would be split unevenly over nodes \(got 1 on a, 3 on b\)"):
        ray_seats(bundles(*"abbb"), 4)


def test_capacity_counts_whole_bundles_on_nodes_with_the_labels():
    nodes = [{"Resources": {"GPU": 8, "CPU": 4}, "Labels": {"rack": "1"}}, {"Resources": {"GPU": 2, "CPU": 64}}]
    assert capacity(nodes, {"GPU": 1, "CPU": 1}, {}) == 6
    assert capacity(nodes, {"GPU": 1, "CPU": 1}, {"rack": "1"}) == 4
    assert capacity(nodes, {"CPU": 1}, {}) == 68
