"""The ways in which weights travel between processes, as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Sync:
    """Weights from the trainer to engines in other processes, in place, verified."""

    provides = ("weight_sync:shared-memory:tensors", "weight_sync:ipc:cuda-ipc", "weight_sync:broadcast:nccl",
                "weight_sync:disk:checkpoints", "weight_sync:disk-delta:checkpoint-deltas")

    @hookimpl("weight_sync", name="shared-memory")
    def shared_memory(self, config):
        """The local engine copies from memory that it shares with trainer ranks in processes of their own."""
        from miles_core.backends.sync.shared import SharedMemory

        return SharedMemory(config)

    @hookimpl("weight_sync", name="ipc")
    def ipc(self, config):
        """SGLang on the trainer's own GPUs opens the trainer's memory (CUDA IPC)."""
        from miles_core.backends.sync.ipc import IpcSender

        return _servers(config, IpcSender)

    @hookimpl("weight_sync", name="broadcast")
    def broadcast(self, config):
        """The trainer broadcasts to SGLang on other GPUs (NCCL)."""
        from miles_core.backends.sync.broadcast import BroadcastSender

        return _servers(config, BroadcastSender)

    @hookimpl("weight_sync", name="disk")
    def disk(self, config):
        """A complete checkpoint for each version, in a folder that all share."""
        from miles_core.backends.sync.disk import DiskSender

        return _servers(config, DiskSender, _folder(config))

    @hookimpl("weight_sync", name="disk-delta")
    def disk_delta(self, config):
        """Files of what changed, in a folder that all share; each engine host keeps a checkpoint of its own."""
        from miles_core.backends.sync.disk import DeltaSender

        return _servers(config, DeltaSender, _folder(config))


def _servers(config, kind, *args):
    from miles_core.backends.sync.sender import Settings
    from miles_core.backends.sync.sequence import ServerSync

    settings = Settings.of(config)
    return ServerSync(config, lambda targets: kind(settings, targets, *args))


def _folder(config):
    from pathlib import Path

    from miles_core.errors import ConfigError

    if config.perf.update_weight_disk_dir is None:
        raise ConfigError(f"the weight sync {config.perf.weight_sync!r} needs a folder that trainer and engines share",
                          fix="add --update-weight-disk-dir FOLDER")
    return Path(config.perf.update_weight_disk_dir)
