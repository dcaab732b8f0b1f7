"""What follows from the GPUs that a run asks for, where SGLang may serve: the engine, its GPUs, placement."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace

from miles_core.config.hardware import engine_dtype, gpus, trainer_gpus
from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_sglang.plugin import SglangOptions, sglang_options
from miles_sglang.surface import folder_of

Note = Callable[[str], None]
SHARE, MOST = 8, 4
"""Cores for each reader that a run has by default, and the most readers that it has then: four read the answers of
thousands of engines."""
SIXTEEN = "SGLang's kernels on GPUs are for 16 bits"


def hardware(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with engine, GPUs and placement decided.

    Raises:
        ConfigError: what was asked for excludes itself or does not divide.
    """
    for step in (_engine, _precision, _external, _gpus, _placement, _weight_sync):
        config = step(config, note)
    return config


def _engine(config: RunConfig, note: Note) -> RunConfig:
    """SGLang where a GPU and SGLang are present or servers run already, else local."""
    if config.rollout.engine is not None or config.debug.debug_train_only:
        return config
    if sglang_options(config).rollout_external:
        return with_values(config, "--rollout-external", rollout__engine="sglang")
    shared = config.perf.trainer == "fsdp" or not config.algorithm.true_on_policy_mode
    if not (gpus() and folder_of("sglang") and shared):
        return config
    if _too_wide(config) and not _stated(config):
        note(f"{SIXTEEN}, so the engine is local; --bf16 --engine sglang computes in bfloat16 on both sides")
        return config
    if gpus() == 1 == trainer_gpus(config) and not _stated(config):
        note("there are not enough GPUs for both the trainer and SGLang, so the engine is local; --engine sglang "
             "--colocate shares this GPU")
        return config
    return with_values(config, "a GPU and SGLang are here", rollout__engine="sglang")


def _precision(config: RunConfig, note: Note) -> RunConfig:
    """A word on servers that may not start."""
    if config.rollout.engine == "sglang" and _too_wide(config):
        note(f"{SIXTEEN}, and most models do not start in float32: --bf16, or --engine-dtype bfloat16")
    return config


def _too_wide(config: RunConfig) -> bool:
    """Whether the run's own servers would compute in float32 on GPUs."""
    options, dtype = sglang_options(config), config.surface("server").get("dtype") or engine_dtype(config)
    return dtype == "float32" and gpus() > 0 and not (options.server_command or options.rollout_external)


def _stated(config: RunConfig) -> bool:
    """Whether the run names SGLang, or GPUs for it."""
    perf, tables = config.perf, {key.partition(".")[0] for key in config.origin}
    stated = tables & {"sglang", "server", "router"} or perf.rollout_num_gpus or perf.ray_address or perf.colocate
    return bool(stated or config.debug.debug_rollout_only)


def _external(config: RunConfig, note: Note) -> RunConfig:
    """Servers and routers that run already."""
    options = sglang_options(config)
    external, addresses = options.rollout_external, options.rollout_external_engine_addrs
    origin = who(config, "sglang.rollout_external", "sglang.rollout_external_engine_addrs")
    if bool(external) != bool(addresses):
        raise ConfigError("servers that already run need both flags", code="external-servers-need-both-flags",
                          who=origin, fix="write --rollout-external --rollout-external-engine-addrs HOST:PORT ...")
    for address in addresses:
        if not re.fullmatch(r"(https?://)?([\w.-]+|\[[\da-fA-F:]+\]):[1-9]\d*/?", address):
            raise ConfigError("the address of a server should be HOST:PORT", got=address, who=origin,
                              fix="for instance 10.0.0.7:30000", code="server-address-malformed")
    plain = [address.partition("://")[2].rstrip("/") or address for address in addresses]
    plain += [f"{options.router_ip}:{options.router_port}"] if options.router_ip else []
    if twice := next((address for address in plain if plain.count(address) > 1), None):
        raise ConfigError("two servers, or a server and the router, have the same address", code="server-address-twice",
                          got=twice, who=f"{origin}, {who(config, 'sglang.router_ip')}", fix="name each server once")
    if external and config.perf.colocate:
        raise ConfigError("servers that already run cannot hand over their GPUs", code="external-servers-colocated",
                          who=who(config, "sglang.rollout_external", "perf.colocate"), fix="drop --colocate")
    if external and config.rollout.engine != "sglang":
        raise ConfigError("--rollout-external is for the engine sglang", code="external-servers-other-engine",
                          got=f"engine {config.rollout.engine}", who=who(config, "rollout.engine"),
                          fix="leave --engine out")
    if options.router_ip is not None and options.router_port is None:
        raise ConfigError("a router that already runs needs a port", who=who(config, "sglang.router_ip"),
                          fix="add --sglang-router-port PORT", code="external-router-without-port")
    return _running(config, options)


def _running(config: RunConfig, options: SglangOptions) -> RunConfig:
    """The configuration that states what runs already, and where."""
    if config.rollout.engine != "sglang":
        return config
    stated = dict(config.stated)
    if options.rollout_external:
        stated["engine:sglang"] = (*stated.get("engine:sglang", ()), "external")
    if not config.debug.debug_train_only:
        stated["address:sglang.rollout_external_engine_addrs"] = tuple(options.rollout_external_engine_addrs)
    if options.router_ip is not None and not config.debug.debug_train_only:
        stated["address:sglang.router_ip"] = (f"{options.router_ip}:{options.router_port}",)
    return replace(config, stated=stated)


def _gpus(config: RunConfig, note: Note) -> RunConfig:
    """The engines' GPUs: the trainer's with --colocate, else one engine's worth, unless the run says otherwise."""
    perf, each, requested = config.perf, config.perf.rollout_num_gpus_per_engine, config.perf.rollout_num_gpus
    if "servers" not in config.understood:
        return config
    shared, origin = trainer_gpus(config), who(config, "perf.rollout_num_gpus", "perf.rollout_num_gpus_per_engine")
    addresses = sglang_options(config).rollout_external_engine_addrs
    if addresses:
        number, reason = len(addresses) * each, "--rollout-external-engine-addrs"
    else:
        number, reason = (shared, "--colocate") if perf.colocate else (each, "one engine")
    if requested is not None and perf.colocate:
        left = shared - requested
        idle = f", and {left} of the trainer's {shared} GPUs are idle while engines sample" if left > 0 else ""
        ignored = f", where the engines are on the trainer's {shared} GPUs: {requested} is ignored" if left < 0 else ""
        note(f"--rollout-num-gpus is not needed with --colocate{idle or ignored}")
        requested = min(requested, shared)
    number = number if requested is None else requested
    if number % each or number < each:
        raise ConfigError(f"{number} GPUs do not divide into engines of {each}", code="engine-gpus-not-divisible",
                          who=origin, fix="rollout_num_gpus is a multiple of rollout_num_gpus_per_engine")
    if addresses and len(addresses) != number // each:
        raise ConfigError("as many servers have to be named as there are engines", code="external-servers-count",
                          got=f"addresses: {len(addresses)}, engines: {number // each} ({number} GPUs, {each} each)",
                          who=who(config, "sglang.rollout_external_engine_addrs", "perf.rollout_num_gpus"),
                          fix="name every server, and leave --rollout-num-gpus out: it follows from the addresses")
    node = perf.actor_num_gpus_per_node if perf.colocate else perf.num_gpus_per_node
    if each > node and each % node or perf.colocate and number > node and each < node and node % each:
        raise ConfigError(f"engines of {each} GPUs do not fill nodes of {node}", who=who(
            config, "perf.rollout_num_gpus_per_engine", "perf.num_gpus_per_node", "perf.actor_num_gpus_per_node"),
            fix="an engine takes whole nodes, or a part of one that divides it", code="engines-do-not-fill-nodes")
    return with_values(config, reason, perf__rollout_num_gpus=number)


def _placement(config: RunConfig, note: Note) -> RunConfig:
    """Ray where one machine cannot hold what SGLang's run, or one without an engine, asks for."""
    perf, served = config.perf, "servers" in config.understood
    stated = perf.trainer_host is not None or "perf.placement" in config.origin
    if stated or not (served or config.debug.debug_train_only):
        return config
    hosted = perf.rollout_num_gpus if served and not sglang_options(config).rollout_external else 0
    trained = 0 if config.debug.debug_rollout_only else trainer_gpus(config)
    needed = max(hosted, trained) if perf.colocate else hosted + trained
    if 0 < gpus() < needed:
        return with_values(config, f"{needed} GPUs, {gpus()} here", perf__placement="ray")
    if served and perf.actor_num_nodes > 1 or hosted and perf.rollout_num_gpus_per_engine > perf.num_gpus_per_node:
        return with_values(config, "several nodes", perf__placement="ray")
    return config


def _weight_sync(config: RunConfig, note: Note) -> RunConfig:
    """One of SGLang's that the run names, and that its engine understands: what it needs of the hardware."""
    sync = config.perf.weight_sync
    if sync is None or not config.reaches(sync):
        return config
    if sync == "ipc" and not config.perf.colocate:
        raise ConfigError("the weight sync 'ipc' needs trainer and engine on the same GPUs", code="ipc-needs-colocate",
                          who=who(config, "perf.weight_sync"), fix="add --colocate, or use --weight-sync broadcast")
    if sync == "broadcast" and config.perf.colocate:
        raise ConfigError("the weight sync 'broadcast' needs separate GPUs, and --colocate shares them",
                          code="broadcast-with-colocate", who=who(config, "perf.weight_sync", "perf.colocate"),
                          fix="remove --weight-sync: --colocate then uses ipc")
    if sync.startswith("disk") and config.perf.update_weight_disk_dir is None:
        raise ConfigError(f"the weight sync {sync!r} needs a folder that trainer and engines share",
                          code="weight-sync-needs-folder", who=who(config, "perf.weight_sync"),
                          fix="add --update-weight-disk-dir FOLDER")
    return config


def engines(config: RunConfig) -> int:
    """How many engines with servers sample."""
    return config.perf.rollout_num_gpus // config.perf.rollout_num_gpus_per_engine


def readers(options: SglangOptions) -> int:
    """Processes that read answers: those asked for, else none where cores are few and would only get busier."""
    if options.readers is not None or not sys.platform.startswith("linux"):  # elsewhere memory has no descriptors
        return options.readers or 0
    return min(MOST, len(os.sched_getaffinity(0)) // SHARE)


def lines(config: RunConfig) -> list[tuple[str, str]]:
    """What samples, where, and how it gets the weights."""
    perf, options = config.perf, sglang_options(config)
    each, number = perf.rollout_num_gpus_per_engine, engines(config)
    running = " that run already" * options.rollout_external
    router = "no router" if options.router == "none" else f"router {options.router}"
    computed = config.surface("server").get("dtype", engine_dtype(config))
    texts = [f"{number} SGLang engine{'s'[:number != 1]} of {each} GPU{'s'[:each != 1]}{running}, {computed}; {router}"]
    whose = f"{trainer_gpus(config)} for the trainer" + f", {perf.rollout_num_gpus} for engines" * (not running)
    if perf.colocate:
        whose = f"trainer and engines alternate on {trainer_gpus(config)}"
    texts.append(f"placement {perf.placement}, GPUs: {whose}")
    if count := readers(options):
        texts.append(f"answers are read by {count} process{'es'[:2 * (count != 1)]} beside the driver")
    size = perf.update_weight_buffer_size / 1024**2
    texts.append(f"weights travel by {perf.weight_sync}, in buckets of at most {size:g} MiB")
    return [("layout", line) for line in texts]
