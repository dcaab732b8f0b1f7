"""What follows from the hardware that a run asks for: the engine, colocation, GPUs, placement, how weights travel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from miles_core.backends.sglang.surface import folder_of
from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

Note = Callable[[str], None]

TRAVELS = {"in-process": "local", "shared-memory": "local",
           "ipc": "sglang", "broadcast": "sglang", "disk": "sglang", "disk-delta": "sglang"}
"""Which engine each weight sync of the core reaches."""


def hardware(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with engine, offloading, GPUs and placement decided.

    Raises:
        ConfigError: what was asked for excludes itself or does not divide.
    """
    for step in (_engine, _head, _external, _colocate, _gpus, _placement):
        config = step(config, note)
    return config


def weight_sync(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with weight_sync decided, once it is known what the ranks are.

    Raises:
        ConfigError: one that cannot reach the engine.
    """
    perf, engine = config.perf, config.rollout.engine or "local"
    given = perf.weight_sync
    if given is None:
        apart = perf.placement == "local" and perf.trainer_host == "process"
        local = "shared-memory" if apart else "in-process"
        how = local if engine != "sglang" else "ipc" if perf.colocate else "broadcast"
        return with_values(config, "engine and placement", perf__weight_sync=how)
    if TRAVELS.get(given, engine) != engine:
        there = [name for name, reached in TRAVELS.items() if reached == engine]
        raise ConfigError(f"the weight sync {given!r} does not reach the engine {engine!r}",
                          who=who(config, "perf.weight_sync"), fix=f"one of {', '.join(there)}, or leave it out")
    if given == "ipc" and not perf.colocate:
        raise ConfigError("the weight sync 'ipc' hands over memory of a GPU that both sides share",
                          who=who(config, "perf.weight_sync"), fix="add --colocate, or use broadcast")
    if given == "broadcast" and perf.colocate:
        raise ConfigError("the weight sync 'broadcast' joins GPUs in a group, and with --colocate both sides have the "
                          "same ones", who=who(config, "perf.weight_sync", "perf.colocate"),
                          fix="leave --weight-sync out: ipc hands over memory of a GPU that both sides share")
    if given in ("disk", "disk-delta") and perf.update_weight_disk_dir is None:
        raise ConfigError(f"the weight sync {given!r} needs a folder that trainer and engines share",
                          who=who(config, "perf.weight_sync"), fix="add --update-weight-disk-dir FOLDER")
    return config


def gpus() -> int:
    """GPUs of this machine that a run may use, without asking any driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for word in visible.split(",") if word.strip() not in ("", "-1"))
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def engines(config: RunConfig) -> int:
    """How many SGLang engines sample."""
    return config.perf.rollout_num_gpus // config.perf.rollout_num_gpus_per_engine


def trainer_gpus(config: RunConfig) -> int:
    """GPUs of the trainer, one for each rank."""
    return config.perf.actor_num_nodes * config.perf.actor_num_gpus_per_node


def _head(config: RunConfig, note: Note) -> RunConfig:
    low = config.rollout.engine_dtype or ("bfloat16" if config.perf.bf16 else "float32")
    if config.algorithm.fp32_lm_head and config.rollout.engine != "sglang" and low == "bfloat16":
        raise ConfigError("the local engine rounds bf16 logits, and the trainer would not",
                          who=who(config, "algorithm.fp32_lm_head"), fix="drop it, or use --engine-dtype float32")
    return config


def _engine(config: RunConfig, note: Note) -> RunConfig:
    """SGLang where a GPU and SGLang are present or servers run already, else local."""
    if config.rollout.engine is not None or config.debug.debug_train_only:
        return config
    if config.sglang.rollout_external:
        return with_values(config, "--rollout-external", rollout__engine="sglang")
    if gpus() and folder_of("sglang") and not config.algorithm.true_on_policy_mode:
        if _alone(config):
            note("trainer and SGLang have no GPU each: the engine is local; --engine sglang --colocate shares this one")
            return config
        return with_values(config, "a GPU and SGLang are here", rollout__engine="sglang")
    return config


def _alone(config: RunConfig) -> bool:
    """Whether the trainer takes the only GPU and nobody has said a word of SGLang or of other GPUs."""
    perf, tables = config.perf, {key.partition(".")[0] for key in config.origin}
    said = tables & {"sglang", "server", "router"} or perf.rollout_num_gpus or perf.ray_address or perf.colocate
    return gpus() == 1 == trainer_gpus(config) and not said and not config.debug.debug_rollout_only


def _external(config: RunConfig, note: Note) -> RunConfig:
    """Servers and routers that run already."""
    given, addresses = config.sglang.rollout_external, config.sglang.rollout_external_engine_addrs
    origin = who(config, "sglang.rollout_external", "sglang.rollout_external_engine_addrs")
    if bool(given) != bool(addresses):
        raise ConfigError("servers that run already are named by two flags", who=origin,
                          fix="write --rollout-external --rollout-external-engine-addrs HOST:PORT ...")
    for address in addresses:
        if not re.fullmatch(r"(https?://)?([\w.-]+|\[[\da-fA-F:]+\]):[1-9]\d*/?", address):
            raise ConfigError("the address of a server is HOST:PORT", got=address, who=origin,
                              fix="for instance 10.0.0.7:30000")
    plain = [address.partition("://")[2].rstrip("/") or address for address in addresses]
    plain += [f"{config.sglang.router_ip}:{config.sglang.router_port}"] if config.sglang.router_ip else []
    if twice := next((address for address in plain if plain.count(address) > 1), None):
        raise ConfigError("one address is that of two servers, or of a server and the router", got=twice,
                          who=f"{origin}, {who(config, 'sglang.router_ip')}", fix="name each server once")
    if given and config.perf.colocate:
        raise ConfigError("servers that run already cannot hand their GPUs over",
                          who=who(config, "sglang.rollout_external", "perf.colocate"), fix="drop --colocate")
    if given and config.rollout.engine != "sglang":
        raise ConfigError("--rollout-external is for the engine sglang", got=f"engine {config.rollout.engine}",
                          who=who(config, "rollout.engine"), fix="leave --engine out")
    if config.sglang.router_ip is not None and config.sglang.router_port is None:
        raise ConfigError("a router that runs already has a port", who=who(config, "sglang.router_ip"),
                          fix="add --sglang-router-port PORT")
    return config


def _colocate(config: RunConfig, note: Note) -> RunConfig:
    """Both sides give their memory back while the other works, unless somebody says otherwise."""
    perf, alone = config.perf, config.debug.debug_rollout_only or config.debug.debug_train_only
    parked = {key: getattr(perf, key) for key in ("offload_train", "offload_rollout")}
    if perf.colocate:
        return with_values(config, "--colocate", **{
            f"perf__{key}": not alone if value is None else value for key, value in parked.items()})
    for key, value in parked.items():
        if value:
            note(f"--{key.replace('_', '-')} parks nothing without --colocate: each side has GPUs of its own")
    return config


def _gpus(config: RunConfig, note: Note) -> RunConfig:
    """The engines' GPUs: the trainer's with --colocate, else one engine's worth, unless somebody says otherwise."""
    perf, each, given = config.perf, config.perf.rollout_num_gpus_per_engine, config.perf.rollout_num_gpus
    if config.rollout.engine != "sglang":
        return config
    shared, origin = trainer_gpus(config), who(config, "perf.rollout_num_gpus", "perf.rollout_num_gpus_per_engine")
    if config.sglang.rollout_external:
        number, reason = len(config.sglang.rollout_external_engine_addrs) * each, "--rollout-external-engine-addrs"
    else:
        number, reason = (shared, "--colocate") if perf.colocate else (each, "one engine")
    if given is not None and perf.colocate:
        if given > shared:
            raise ConfigError("with --colocate the engines are on the trainer's GPUs, which are fewer", got=given,
                              who=origin, fix=f"leave --rollout-num-gpus out; the trainer has {shared}")
        idle = f", and {shared - given} of the trainer's {shared} GPUs rest while engines sample" * (given < shared)
        note(f"--rollout-num-gpus is not needed with --colocate{idle}")
    number = number if given is None else given
    if number % each or number < each:
        raise ConfigError(f"{number} GPUs do not divide into engines of {each}", who=origin,
                          fix="rollout_num_gpus is a multiple of rollout_num_gpus_per_engine")
    node = perf.actor_num_gpus_per_node if perf.colocate else perf.num_gpus_per_node
    if each > node and each % node or perf.colocate and number > node and each < node and node % each:
        raise ConfigError(f"engines of {each} GPUs do not fill nodes of {node}", who=who(
            config, "perf.rollout_num_gpus_per_engine", "perf.num_gpus_per_node", "perf.actor_num_gpus_per_node"),
            fix="an engine takes whole nodes, or a part of one that divides it")
    return with_values(config, reason, perf__rollout_num_gpus=number)


def _placement(config: RunConfig, note: Note) -> RunConfig:
    """Ray where one machine cannot hold what SGLang's run asks for."""
    perf, sglang = config.perf, config.sglang
    if config.rollout.engine != "sglang" or perf.trainer_host is not None or "perf.placement" in config.origin:
        return config
    hosted = 0 if sglang.rollout_external else perf.rollout_num_gpus
    trained = 0 if config.debug.debug_rollout_only else trainer_gpus(config)
    needed = max(hosted, trained) if perf.colocate else hosted + trained
    if 0 < gpus() < needed:
        return with_values(config, f"{needed} GPUs, {gpus()} here", perf__placement="ray")
    if perf.actor_num_nodes > 1 or hosted and perf.rollout_num_gpus_per_engine > perf.num_gpus_per_node:
        return with_values(config, "several nodes", perf__placement="ray")
    return config
