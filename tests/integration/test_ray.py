"""Ray actors host ranks and servers as processes do: the same figures, a death that is named, places that are told.

Ray is real and runs here; GPUs that it counts need not be there for it to place by them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from miles_ray import cluster, versions  # noqa: E402 - Ray is an extra
from miles_ray.host import ray_group  # noqa: E402
from miles_ray.placement import RayPlacement  # noqa: E402

from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig  # noqa: E402
from miles_core.errors import ConfigError, DiedError  # noqa: E402

pytestmark = pytest.mark.xdist_group("layouts")


class Arithmetic:
    """A rank that adds its number to what it is asked, over all ranks."""

    def __init__(self, rank):
        from miles_megatron import cpu

        cpu.process_group(rank, 60)
        self.rank = rank

    def total(self, number: int) -> int:
        import torch
        import torch.distributed as dist

        found = torch.tensor(number + self.rank.index)
        dist.all_reduce(found)
        return int(found)

    def keep(self, columns: dict) -> None:
        self.columns = columns

    def give_back(self) -> dict | None:
        self.columns["new"] = np.arange(3)
        return self.columns if self.rank.index == 0 else None

    def refuse(self) -> None:
        raise ValueError(f"rank {self.rank.index} will not")

    def end(self) -> None:
        import os

        if self.rank.index == 1:
            os._exit(3)


async def questions() -> list[str]:
    """A sum over ranks, an error of theirs, a death; each on ranks of their own where the last ended them."""
    found = []
    ranks = ray_group("trial", 2, Arithmetic)
    try:
        found.append(str(await ranks.total(10)))
        sent = {"large": np.arange(10**6), "small": np.ones(3, np.float32), "none": np.zeros((0, 2))}
        await ranks.keep(sent)
        assert await ranks.total(10) == 21  # what a call without arrays leaves of the one before
        back = await ranks.give_back()
        assert back.pop("new").tolist() == [0, 1, 2] and back.keys() == sent.keys()
        assert all(np.array_equal(back[name], column) for name, column in sent.items())
        await ranks.refuse()
    except ValueError as error:
        found.append(str(error))
    await ranks.close()
    ranks = ray_group("trial", 2, Arithmetic)
    with pytest.raises(DiedError, match="actor of trial rank 1 died in end"):
        await ranks.end()
    with pytest.raises(DiedError):  # and every later call says so at once
        await ranks.total(1)
    await ranks.close()
    return found


@pytest.mark.full
def test_a_ray_of_our_own_starts_and_ends_with_the_ranks():
    assert asyncio.run(questions()) == ["21", "rank 0 will not"]
    assert not ray.is_initialized()


@pytest.fixture
def ray_here():
    """A Ray with two GPUs that do not exist."""
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


class Told:
    """A rank or server that tells where it is."""

    def __init__(self, word, place):
        self.word, self.place = word, place

    def told(self) -> dict:
        print("somebody asked")
        name = ray.get_runtime_context().get_actor_name()
        variables = {key: os.environ.get(key) for key in ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "NCCL_TRIAL")}
        return {"word": self.word, "place": self.place, "name": name, "folder": os.getcwd(), **variables}


def described(run_dir, **perf) -> RunConfig:
    return RunConfig(perf=Perf(placement="ray", placement_timeout=2.0, **perf), rollout=Rollout(engine="sglang"),
                     checkpoint=Checkpoint(run_dir=str(run_dir)), name="trial")


async def placed(run_dir) -> None:
    """One rank and one server share the two GPUs; then the errors; then nothing is left."""
    (run_dir / "logs").mkdir()
    there = RayPlacement(described(run_dir, actor_num_gpus_per_node=1))
    await there.open()
    trainer = there.trainer(Told, "hello")
    rank = await trainer.told()
    assert (rank["word"], rank["place"].size, rank["place"].local) == ("hello", 1, 0)
    assert (rank["name"], rank["folder"]) == ("miles-trial-trainer-rank-0", os.getcwd())
    assert (rank["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"], rank["NCCL_TRIAL"]) == ("1", "yes")
    assert there.environment["NCCL_TRIAL"] == "yes"
    assert "somebody asked" in (run_dir / "logs/trainer-rank-0.log").read_text()
    [server] = there.servers(Told, "there")
    told = await server.told()
    assert (told["name"], told["place"].gpus, told["place"].nodes) == ("miles-trial-engine-0", (1,), 1)

    other = RayPlacement(described(run_dir, actor_num_gpus_per_node=1))
    with pytest.raises(ConfigError, match="2 bundles .1 GPU and 1 CPU each. were not free within 2 s"):
        await other.open()
    await other.close()
    large = RayPlacement(described(run_dir, actor_num_gpus_per_node=3))
    with pytest.raises(ConfigError, match=r"bundle 3 of 4 \(1 GPU and 1 CPU\) does not fit.*got .*: 2 GPUs, 4 CPUs"):
        await large.open()
    await large.close()
    labelled = RayPlacement(described(run_dir, actor_num_gpus_per_node=1, placement_labels=["rack=7"]))
    with pytest.raises(ConfigError, match="bundle 1 of 2 .* on a node with rack=7.* does not fit"):
        await labelled.open()
    await labelled.close()

    await trainer.close()
    await there.close()
    [address] = [node["NodeManagerAddress"] for node in cluster.nodes()]
    for left_out in ({"exclude": [address]}, {"check_nodes": True}):  # the GPUs here are none, as is found out
        apart = RayPlacement(described(run_dir, actor_num_gpus_per_node=1), **left_out)
        with pytest.raises(ConfigError, match=f"bundle 1 of 2 .* does not fit.*left out: {address}"):
            await apart.open()
        await apart.close()
    shared = RayPlacement(described(run_dir, actor_num_gpus_per_node=2, colocate=True, rollout_num_gpus=2))
    await shared.open()
    hosts = [shared.trainer(Told, ""), *shared.servers(Told, "")]
    assert [(await host.told())["place"].gpus for host in hosts[1:]] == [(0,), (1,)]
    await shared.close()


@pytest.mark.full
def test_a_ray_that_is_there_stays_and_is_given_back(ray_here, tmp_path, monkeypatch):
    """Ranks meet over a store of the first one, as they do in a cluster."""
    assert asyncio.run(questions()) == ["21", "rank 0 will not"]
    assert ray.is_initialized()
    monkeypatch.setenv("NCCL_TRIAL", "yes")
    asyncio.run(placed(tmp_path))
    groups = ray.util.placement_group_table().values()
    assert groups and {group["state"] for group in groups} == {"REMOVED"}
    assert ray.is_initialized()


def test_a_cluster_that_does_not_answer_is_named():
    with pytest.raises(ConfigError, match="Ray at 127.0.0.1:1: cannot connect to the Ray cluster"):
        cluster.join("127.0.0.1:1", places=1, who="--placement ray")


@pytest.mark.full
def test_the_dashboard_is_there_when_it_is_asked_for(tmp_path, monkeypatch, caplog):
    """On loopback; where a package of it is missing that is said before anything starts."""
    wanted = cluster.Dashboard("127.0.0.1", 18265)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "_OF_DASHBOARD", ("a_package_that_is_not_there",))
        with pytest.raises(ConfigError, match=r"a_package_that_is_not_there.*ray\[default\]"):
            cluster.join(None, places=1, who="--placement ray", dashboard=wanted)
    assert not ray.is_initialized()
    pytest.importorskip("aiohttp_cors")  # of ray[default]
    with caplog.at_level("INFO"):
        joined = cluster.join(None, places=1, who="--placement ray", dashboard=wanted)
    try:
        [line] = [one for one in caplog.messages if "dashboard" in one]
        address = line.rpartition(" ")[2]
        assert address.startswith("http://127.0.0.1:")
        try:
            with urllib.request.urlopen(f"{address}/api/version", timeout=30) as answer:
                assert ray.__version__ in answer.read().decode()
        except urllib.error.HTTPError as error:
            assert error.code == 401, "where Ray wants a token the dashboard does, too"
    finally:
        joined.leave()


def test_whoever_lacks_a_token_is_told_how_to_give_one(monkeypatch, tmp_path):
    """In a process of its own: Ray reads these variables once."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    run = subprocess.run([sys.executable, "-c", "from miles_ray import cluster\n"
                          "cluster._reach = lambda address: None\n"
                          "cluster.join('127.0.0.1:1', places=1, who='--placement ray')"],
                         capture_output=True, text=True, timeout=60)
    assert "ConfigError: Ray at 127.0.0.1:1: cannot connect to the Ray cluster" in run.stderr
    assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in run.stderr


def test_another_package_on_another_host_is_refused(tmp_path):
    plugin = tmp_path / "own.py"
    plugin.write_text("")
    ours = versions.here([str(plugin)])
    versions.check("trainer rank 1", ours, ours | {"host": "b"})
    for package in ("torch", "python", "miles_core/execute.py", f"plugin {plugin}"):
        with pytest.raises(ConfigError, match="trainer rank 1 on b: .* is not the same on every host") as caught:
            versions.check("trainer rank 1", ours, ours | {"host": "b", package: "other"})
        assert package in str(caught.value) and f"other there, {ours[package]} at the driver" in str(caught.value)
    old = {name: "old" for name in ours if name.startswith("miles_core/")} | {"miles_core/gone.py": "1"}
    with pytest.raises(ConfigError, match=f" and {len(old) - versions.SHOWN} more are not the same"):
        versions.check("trainer rank 1", ours, ours | old)
    versions.check("trainer rank 1", ours | {"sglang": "0.5.16"}, ours | {"sglang": "none"})
    with pytest.raises(ConfigError, match="sglang is not the same"):
        versions.check("engine 0", ours | {"sglang": "0.5.16"}, ours | {"sglang": "0.5.15"})
