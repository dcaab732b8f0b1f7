"""This machine and what listens on it: GPUs that a run takes, servers that it is told to use."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from miles_core.config import hardware
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

PATIENCE = 0.3
"""Seconds for a connection within this machine."""


def check_gpus(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: more GPUs than there are and no cluster to find them in.
    """
    perf, debug, here = config.perf, config.debug, hardware.gpus()
    if not here or perf.placement not in ("local", "ray") or (
            perf.placement == "ray" and (perf.ray_address or os.environ.get("RAY_ADDRESS"))):
        return
    if "servers" not in config.understood and not perf.bf16:  # float32, no servers: the start decides
        return
    sampled = "servers" in config.understood and "external" not in config.understood
    trained = 0 if debug.debug_rollout_only else hardware.trainer_gpus(config)
    served = perf.rollout_num_gpus or 0 if sampled else 0
    needed = max(trained, served) if perf.colocate else trained + served
    if needed <= here:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(f"the run takes {needed} GPUs and this machine has {here}" + (
        f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
        got=f"trainer {trained}, engines {served}" + (", taking turns" if perf.colocate else ""),
        who=who(config, "perf.actor_num_nodes", "perf.actor_num_gpus_per_node", "perf.rollout_num_gpus"),
        fix="ask for fewer, share them with --colocate, or join machines with --ray-address HOST:PORT",
        code="machine-too-small")


def check_listening(config: RunConfig) -> None:
    """Asked last, when the run is right by all that it says, and within this machine: elsewhere it takes its time.

    Raises:
        ConfigError: an address of this machine where nobody listens.
    """
    for key, address in _addresses(config):
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            if parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port is not None:
                socket.create_connection((parts.hostname, parts.port), PATIENCE).close()
        except (OSError, ValueError) as error:
            raise ConfigError("nothing listens at this address", got=f"{address}: {error}",
                              who=who(config, key) if "." in key else f"environment, {key}",
                              fix="start the server first, or correct the address",
                              code="address-not-listening") from None


def _addresses(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, HOST:PORT) of servers that have to run already."""
    cluster, variable = config.perf.ray_address, os.environ.get("RAY_ADDRESS", "")
    if config.perf.placement == "ray" and ":" in (cluster or variable):
        yield ("perf.ray_address", cluster) if cluster else ("RAY_ADDRESS", variable)
    for key, named in config.stated.items():
        yield from ((key.removeprefix("address:"), one) for one in named if key.startswith("address:"))
