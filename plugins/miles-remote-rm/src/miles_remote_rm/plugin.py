"""The plugin: options, scorers and what must hold at the start. The client is in service.py."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample
    from miles_remote_rm.service import Service

SCORERS = ("remote_rm", "remote_group_rm")


@dataclass(frozen=True, kw_only=True)
class RemoteRmOptions:
    """Where the service is and how long it is waited for."""

    rm_url: str | None = option(None, "Address of the service, http://HOST:PORT/PATH.", flags=("--rm-url",))
    rm_send_metadata: bool = option(False, "Send the row's metadata with each sample.")
    rm_concurrency: int = option(64, "Largest number of concurrent requests.")
    rm_connect_timeout: float = option(5.0, "Seconds allowed for one connection.")
    rm_request_timeout: float | None = option(
        None, "Seconds allowed for one request, including queueing and all attempts; default: 0.9 x rm_timeout."
    )
    rm_retries: int = option(4, "Further attempts after a failed connection or an answer of status 502, 503 or 504.")
    rm_check: bool = option(True, "Connect to the service when the run starts, and end the run if that fails.")


class RemoteRm:
    """Rewards from an HTTP service, one request for a sample or for a group."""


    def __init__(self, options: RemoteRmOptions, config: RunConfig):
        from miles_remote_rm.service import Service

        _check_options(options, config)
        self.options = options
        self._service: Service | None = None
        named = config.rollout.reward_key if "rollout.reward_key" in config.origin else None
        self._keys = {"train": named, "eval": config.eval.eval_reward_key or named}
        if options.rm_url is None:  # and nobody would ask
            return
        if options.rm_check and not config.debug.load_debug_rollout_data:
            _check_connection(options)
        self._service = Service(
            options.rm_url, timeout=options.rm_request_timeout or 0.9 * config.rollout.rm_timeout,
            connect_timeout=options.rm_connect_timeout, concurrency=options.rm_concurrency, retries=options.rm_retries)

    @hookimpl("reward", name="remote_rm")
    async def one(self, sample: Sample) -> float:
        """The service's number for one sample."""
        from miles_remote_rm.service import number

        key = self._keys["train" if sample.prompt.stream == "train" else "eval"]
        return number(await cast("Service", self._service).ask(self._payload(sample), sample.name), key)

    @hookimpl("reward", name="remote_group_rm")
    async def group(self, samples: Sequence[Sample]) -> list[float]:
        """The service's numbers for a whole group, in its order."""
        from miles_remote_rm.service import numbers

        name = f"{samples[0].prompt.stream} prompt {samples[0].prompt.uid}, all {len(samples)} samples"
        payload = {"samples": [self._payload(one) for one in samples]}
        return numbers(await cast("Service", self._service).ask(payload, name), len(samples))

    @hookimpl
    def finish(self) -> None:
        """Close the connections."""
        if self._service is not None:
            self._service.close()

    def _payload(self, sample: Sample) -> dict[str, object]:
        payload: dict[str, object] = {
            "prompt": sample.prompt.text, "response": sample.text, "label": sample.prompt.label,
        }
        return payload | {"metadata": dict(sample.prompt.metadata)} if self.options.rm_send_metadata else payload


def _check_options(options: RemoteRmOptions, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: no address, an invalid one, no scorer that uses it, or invalid numbers.
    """
    rollout = config.rollout
    wanted = bool(set(SCORERS) & set(rollout.rm_type))
    if options.rm_url is None:
        if wanted:
            raise ConfigError("the address of the reward service is not set", who="remote-rm.rm_url",
                              fix="--rm-url http://HOST:PORT/PATH", code="reward-service-url-missing")
        return
    try:
        parts = urlsplit(options.rm_url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.fragment
    except ValueError:  # a port that is no number below 65536, or half an IPv6 address
        good = False
    if not good or options.rm_url != options.rm_url.strip():
        raise ConfigError("not the address of a reward service", got=options.rm_url, who="remote-rm.rm_url",
                          fix="write http://HOST:PORT/PATH, or https://...", code="reward-service-url-malformed")
    if not wanted:
        raise ConfigError("the reward service would never be queried", code="reward-service-unused", got="rm_type "
                                                                           f"{', '.join(rollout.rm_type) or 'none'}",
                          who="remote-rm.rm_url, rollout.rm_type", fix="add remote_rm to --rm-type, or drop --rm-url")
    for key, least in (("rm_concurrency", 1), ("rm_retries", 0)):
        if getattr(options, key) < least:
            raise ConfigError(f"{key} should be at least {least}", got=getattr(options, key), who=f"remote-rm.{key}",
                              fix="leave it out for its default", code="option-too-small")
    for key in ("rm_connect_timeout", "rm_request_timeout"):
        if (value := getattr(options, key)) is not None and not 0 < value <= rollout.rm_timeout:
            raise ConfigError(f"{key} should be above 0, and not above rm_timeout, which bounds a whole group",
                              got=f"{value:g} s of {rollout.rm_timeout:g} s", who=f"remote-rm.{key}",
                              fix="raise --rm-timeout, or lower it", code="reward-service-timeout-invalid")


def _check_connection(options: RemoteRmOptions) -> None:
    """
    Raises:
        ConfigError: no process listens there.
    """
    parts = urlsplit(str(options.rm_url))
    where = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection(where, options.rm_connect_timeout).close()
    except OSError as error:
        raise ConfigError("the reward service cannot be reached", got=str(error) or type(error).__name__,
                          who=f"--rm-url, {where[0]} port {where[1]}", code="reward-service-unreachable",
                          fix="start it first, or correct the address; --remote-rm.no-rm-check starts without it"
                          ) from None
