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


def check_machine(config: RunConfig) -> None:
    """

    Raises:
        ConfigError: more GPUs than there are and no cluster to find them in.
    """
    _gpus(config)


def check_listening(config: RunConfig) -> None:
    """Asked last, when the run is right by all that it says.

    Raises:
        ConfigError: an address where nobody listens.
    """
    for key, address in _addresses(config):
        _listens(config, key, address)


def demand(config: RunConfig) -> tuple[int, int]:
    """GPUs of the trainer and of the engines that are ours."""
    debug, sampled = config.debug, "servers" in config.understood and "external" not in config.understood
    return (0 if debug.debug_rollout_only else hardware.trainer_gpus(config),
            config.perf.rollout_num_gpus or 0 if sampled and not debug.debug_train_only else 0)


def _gpus(config: RunConfig) -> None:
    perf, here = config.perf, hardware.gpus()
    if not here or perf.placement not in ("local", "ray") or (
            perf.placement == "ray" and (perf.ray_address or os.environ.get("RAY_ADDRESS"))):
        return
    trained, served = demand(config)
    if "servers" not in config.understood and not config.perf.bf16:  # float32, no servers: the start decides
        return
    needed = max(trained, served) if perf.colocate else trained + served
    if needed <= here:
        return
    keys = ["perf.actor_num_nodes", "perf.actor_num_gpus_per_node"] * (trained > 0) + ["perf.rollout_num_gpus"] * (
        served > 0)
    share = perf.colocate or not (trained and served) or max(trained, served) > here
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    fix = "ask for fewer" + ("" if share else ", share them with --colocate")
    raise ConfigError(f"the run takes {needed} GPUs and this machine has {here}" + (
        f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
        got=f"trainer {trained}, engines {served}" + (", taking turns" if perf.colocate else ""),
        who=who(config, *keys), fix=f"{fix}, or join machines with --ray-address HOST:PORT")


def _addresses(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, HOST:PORT) of servers that have to run already."""
    cluster, variable = config.perf.ray_address, os.environ.get("RAY_ADDRESS", "")
    if config.perf.placement == "ray" and ":" in (cluster or variable):
        yield ("perf.ray_address", cluster) if cluster else ("RAY_ADDRESS", variable)
    for key, named in config.stated.items():
        yield from ((key.removeprefix("address:"), one) for one in named if key.startswith("address:"))


def _listens(config: RunConfig, key: str, address: str) -> None:
    """Asked within this machine alone: elsewhere an answer takes its time."""
    origin = who(config, key) if "." in key else f"environment, {key}"
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.hostname in ("0.0.0.0", "::"):
        raise ConfigError("this is where a server listens, not where it is reached", got=address, who=origin,
                          fix="write its host's address; on this machine 127.0.0.1")
    try:
        parts.port  # noqa: B018 - it is read to be checked
    except ValueError as error:
        raise ConfigError("the address has no port that there is", got=f"{address}: {error}", who=origin,
                          fix="write HOST:PORT") from None
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or parts.port is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port), PATIENCE).close()
    except OSError as error:
        raise ConfigError("nothing listens at this address", got=f"{address}: {error.strerror or error}",
                          who=origin, fix="start the server first, or mend the address") from None
