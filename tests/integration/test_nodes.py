"""Runs on a Ray cluster of several nodes, which are raylets of this machine: placed by labels, exact, and going on when
a node is lost.

    pytest -m slow tests/integration/test_nodes.py      about three minutes
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from miles_core.record.events import read
from tests.integration.nodes import RAY, Cluster, cluster

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("layouts")]
ROOT = Path(__file__).parents[2]
DEMO = ["examples/demo.toml", "--no-live", "--skip-eval-before-train", "--eval-interval", "100", "--save-interval", "1",
        "--save-hf", "{run_dir}/hf-{rollout_id}"]
RACKS = {"127.0.0.2": "a", "127.0.0.3": "b", "127.0.0.4": "b"}


def started(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen([RAY.with_name("miles"), "run", *DEMO, "--run-dir", folder, *flags], cwd=ROOT,
                            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def spread(there: Cluster) -> list[str]:
    """Two ranks, one on each of two nodes."""
    return ["--placement", "ray", "--ray-address", there.address, "--actor-num-nodes", "2",
            "--actor-num-gpus-per-node", "1"]


def rows(folder: Path) -> list[tuple]:
    """What each rollout gave."""
    return [tuple(event["metrics"][key] for key in ("rollout/raw_reward", "train/loss", "train/grad_norm"))
            for event in read(folder / "events.jsonl") if event["event"] == "metrics"]


def test_places_follow_racks_and_labels_and_an_engine_has_an_actor_on_each_of_its_nodes():
    with cluster(RACKS) as there:
        found = {}
        for labels in ([], ["rack=b"]):
            run = subprocess.run([sys.executable, "-m", "tests.integration.nodes", there.address, *labels], cwd=ROOT,
                                 env=there.environment, capture_output=True, text=True, timeout=120)
            assert run.returncode == 0, run.stderr[-3000:]
            found[tuple(labels)] = json.loads(run.stdout)
        gone = subprocess.run([sys.executable, "-m", "tests.integration.nodes", there.address, "rack=a"], cwd=ROOT,
                              env=there.environment, capture_output=True, text=True, timeout=120)
    labelled = {name: (told["host"], told.get("index"), told.get("node"), told.get("nodes"))
                for name, told in found["rack=b",].items()}
    assert labelled == {"trainer-rank-0": ("127.0.0.3", 0, None, None), "trainer-rank-1": ("127.0.0.4", 1, None, None),
                        "engine-0-node-0": ("127.0.0.3", None, 0, 2), "engine-0-node-1": ("127.0.0.4", None, 1, 2)}
    hosts = {name: told["host"] for name, told in found[()].items()}
    ranks = [hosts["trainer-rank-0"], hosts["trainer-rank-1"]]
    assert ranks == [hosts["engine-0-node-0"], hosts["engine-0-node-1"]] and len(set(ranks)) == 2
    assert ranks == sorted(ranks, key=lambda host: (RACKS[host], host))
    assert gone.returncode == 1 and "bundle 2 of 2 (1 CPU on a node with rack=a) does not fit" in gone.stderr


def test_a_cluster_is_measured_and_a_run_leaves_out_the_nodes_that_it_is_told_to():
    """Raylets of one busy machine: a hundredth of the median is slow."""
    with cluster(RACKS) as there:
        measured = subprocess.run([RAY.with_name("miles"), "check-nodes", "--ray-address", there.address,
                                   "--placement-rack-label", "rack", "--slow", "0.01", "--timeout", "100"],
                                  env=there.environment, capture_output=True, text=True, timeout=400)
        run = subprocess.run([sys.executable, "-m", "tests.integration.nodes", there.address, "127.0.0.3"], cwd=ROOT,
                             env=there.environment, capture_output=True, text=True, timeout=120)
    assert measured.returncode == 0, measured.stderr[-3000:]
    table = [line.split() for line in measured.stdout.splitlines()[1:]]
    assert [(line[0], line[1], line[-1]) for line in table] == [(host, rack, "good") for host, rack in RACKS.items()]
    assert run.returncode == 0, run.stderr[-3000:]
    assert {told["host"] for told in json.loads(run.stdout).values()} == {"127.0.0.2", "127.0.0.4"}


def test_a_run_over_two_nodes_is_that_of_one_machine_and_outlives_the_loss_of_a_node(tmp_path):
    """A spare node takes the lost one's place; the weights at the end are those of a run that lost nothing."""
    whole = started(tmp_path / "whole", "--actor-num-gpus-per-node", "2", "--num-rollout", "6")
    said, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, said[-3000:]
    with cluster(RACKS) as there:
        run = started(tmp_path / "lost", *spread(there), "--placement-spares", "1", "--max-restarts", "1",
                      "--placement-rack-label", "rack", "--num-rollout", "6", environment=there.environment)
        events, end = tmp_path / "lost/events.jsonl", time.monotonic() + 90
        while not (events.is_file() and events.read_text().count('"event":"metrics"') >= 3):
            assert time.monotonic() < end and run.poll() is None, run.stdout.read()[-3000:]
            time.sleep(0.2)
        lost = time.monotonic()
        there.lose("127.0.0.3")
        said, _ = run.communicate(timeout=200)
        seconds = time.monotonic() - lost
    assert run.returncode == 0, said[-4000:]
    restarts = [event for event in read(events) if event["event"] == "restart"]
    assert len(restarts) == 1 and "the Ray actor of trainer rank 1 died" in said
    assert rows(tmp_path / "lost")[:3] == rows(tmp_path / "whole")[:3]
    assert rows(tmp_path / "lost")[-1] == rows(tmp_path / "whole")[-1]
    ends = [max(tmp_path.glob(f"{name}/hf-*")) / "model.safetensors" for name in ("lost", "whole")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    print(f"the loss of a node took {seconds:.0f} s, the three rollouts that were left included")
