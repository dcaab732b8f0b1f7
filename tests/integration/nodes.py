"""A Ray cluster of several nodes on one machine: a raylet for each of its loopback addresses.

    python tests/integration/nodes.py ADDRESS [LABEL] [EXCLUDED]    where ranks and servers of a run are placed, as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")


@dataclass
class Cluster:
    """Nodes at 127.0.0.2 and after it, by `ray start`; labels name their racks.

    Args:
        folder: Ray's session; its path has to be short, as sockets lie in it.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"})
    nodes: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{free.getsockname()[1]}"

    def add(self, host: str, rack: str, cpus: int = 1) -> None:
        """
        Raises:
            TimeoutError: the node did not join within 60 s.
        """
        port = self.address.rpartition(":")[2]
        words = ["--address", self.address] if self.nodes else [
            "--head", "--port", port, "--include-dashboard=false", "--temp-dir", str(self.folder)]
        log = self.folder / f"{host}.log"
        with log.open("w") as file:
            self.nodes[host] = subprocess.Popen(
                [RAY, "start", "--block", "--node-ip-address", host, "--num-cpus", str(cpus), "--labels",
                 f"rack={rack}", "--object-store-memory", "80000000", "--disable-usage-stats", *words],
                env=self.environment, stdout=file, stderr=subprocess.STDOUT)
        end = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            if time.monotonic() > end or self.nodes[host].poll() is not None:
                raise TimeoutError(log.read_text()[-2000:])
            time.sleep(0.2)

    def lose(self, host: str) -> None:
        """A machine that is gone: nothing there says goodbye."""
        for process in self._processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        for process in reversed(self.nodes.values()):
            process.terminate()
        for host, process in self.nodes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            self.lose(host)

    def _processes(self, host: str) -> Iterator[int]:
        """The node's raylet and store, then what it started: its workers are children of the raylet."""
        above = {process: parent for process, parent, _ in _all()}
        roots = {self.nodes[host].pid} | {process for process, _, words in _all()
                                          if f"node_ip_address={host}" in words and str(self.folder) in words}
        for process in above:
            chain = [process]
            while chain[-1] in above and chain[-1] not in roots:
                chain.append(above[chain[-1]])
            if chain[-1] in roots:
                yield process


def _all() -> Iterator[tuple[int, int, str]]:
    """Process, its parent, its words."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            yield int(folder.name), parent, folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextlib.contextmanager
def cluster(racks: dict[str, str]) -> Iterator[Cluster]:
    """A cluster with these nodes, host -> rack."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            for host, rack in racks.items():
                made.add(host, rack)
            yield made
        finally:
            made.close()


class Told:
    """A rank or a server that tells where it is."""

    def __init__(self, place):
        self.place = place

    def told(self) -> dict:
        import ray

        name = ray.get_runtime_context().get_actor_name().removeprefix("miles-trial-")
        return {name: {"host": ray.util.get_node_ip_address(), **asdict(self.place)}}


async def placed(address: str, words: list[str]) -> dict[str, dict]:
    """A trainer of two ranks and an engine over two nodes share the bundles of nodes with these labels, KEY=VALUE, and
    not of these addresses."""
    from miles_ray.placement import RayPlacement

    from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig

    labels = [word for word in words if "=" in word]
    perf = Perf(placement="ray", ray_address=address, placement_timeout=20.0, placement_labels=labels, colocate=True,
                placement_rack_label="rack", actor_num_gpus_per_node=2, rollout_num_gpus=2,
                rollout_num_gpus_per_engine=2)
    place = RayPlacement(RunConfig(perf=perf, rollout=Rollout(engine="sglang"), name="trial",
                                   checkpoint=Checkpoint(run_dir=tempfile.mkdtemp())),
                         exclude=[word for word in words if word not in labels])
    await place.open()
    try:
        found = await place.trainer(Told).told()
        for server in place.servers(Told):
            found |= await server.told()
        return found
    finally:
        await place.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(placed(sys.argv[1], sys.argv[2:]))))
