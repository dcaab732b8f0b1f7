"""Runs inside an SGLang server, in every rank: loads buckets of weights and reports what the model then holds.

SGLang is started with `--custom-weight-loader miles_weights.load` and this folder on PYTHONPATH, so this file imports
torch and the standard library alone.

SGLang lets an exception of a loader end the server. So nothing is raised here: what happened goes to a key-value store
(torch's TCPStore) that the sender keeps, and the sender decides whether the weights may serve.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if __package__:  # in the trainer
    from miles_sglang.server_extension.miles_repack import Repacked
    from miles_sglang.server_extension.miles_stacks import FusedExperts, apart
    from miles_sglang.server_extension.miles_sums import Coming, Held
else:  # in a server, where miles_core need not be installed
    from miles_repack import Repacked
    from miles_stacks import FusedExperts, apart
    from miles_sums import Coming, Held

STORE_SECONDS = 60

_models: dict[int, torch.nn.Module] = {}
"""Models of this rank, by id: the one that is served, and a draft's once a request has gone to it."""
_errors: list[str] = []
"""What went wrong since the last report, a draft model's loading included."""
_first: dict[int, dict[str, list[int]]] = {}
"""The sums of the first report, by id of the model."""
_held: dict[int, Held] = {}
"""What a model held at the last report, by its id."""
_repacked: dict[int, Repacked] = {}
"""The layers of a model that SGLang has repacked, by its id."""
_fused: dict[int, FusedExperts] = {}
"""The layers of a model that take stacked experts, by its id."""
_groups: dict[str, dist.ProcessGroup] = {}
"""Groups of senders, by name."""
_stores: dict[tuple[str, int], dist.TCPStore] = {}
"""The connection to the sender, by its address: to connect takes longer than to report."""
_buckets: list[torch.Tensor] = []
"""Memory of the sender that is open here: reopening it for every bucket would cost more than reading it."""


def load(model, named_tensors) -> None:
    """SGLang's entry: one bucket.

    Args:
        named_tensors: [(plan, flat)]. flat is uint8; the plan is JSON with any of these:
            tensors: [[name, dtype, shape, offset in bytes], ...] of what lies in flat; see miles_stacks for experts.
            patch: {folder, copy, version, base}; see `patch`. drop: the copy's path, to remove it.
            join: {name, backend, method, size, offset, seconds}: become a member of a group. leave: its name.
            receive: {name, store, key, seconds}: take buckets from that group until the store says stop.
            report: {store: [host, port], key, names_only, dtype, dtypes, kinds}: close the sender's memory and tell
                what the model holds now; {} tells nothing.
    """
    ((text, flat),) = named_tensors
    plan = json.loads(text)
    _models[id(model)] = model
    try:
        if "patch" in plan:
            patch(**plan["patch"])
        if "drop" in plan:
            shutil.rmtree(plan["drop"], ignore_errors=True)
            Path(f"{plan['drop']}.lock").unlink(missing_ok=True)
        if "join" in plan:
            join(**plan["join"])
        if "leave" in plan and (group := _groups.pop(plan["leave"], None)) is not None:
            dist.destroy_process_group(group)
        if "receive" in plan:
            receive(model, flat.device, **plan["receive"])
        if plan.get("tensors"):
            _into(model, flat, plan["tensors"])
            if flat.is_cuda:
                _buckets.append(flat)
                torch.cuda.current_stream().synchronize()  # the sender refills the bucket after the answer
    except Exception as error:  # noqa: BLE001 - whatever it is, it would end the server
        _errors.append(f"{type(error).__name__}: {error}"[:2000])
    if "report" in plan:
        forget_images()
        _report(model, **plan["report"])
        _buckets.clear()


def forget_images() -> None:
    """SGLang keeps what a model made of an image by the image alone, and would go on with what older weights made."""
    cache = getattr(sys.modules.get("sglang.srt.managers.mm_utils"), "embedding_cache", None)
    if cache is not None:
        cache.clear()


def join(name: str, backend: str, method: str, size: int, offset: int, seconds: float) -> None:
    """Become rank `offset` + own rank of a group that the sender leads."""
    _groups[name] = process_group(backend, method, offset + (dist.get_rank() if dist.is_initialized() else 0), size,
                                  name, seconds)


def process_group(backend: str, method: str, rank: int, size: int, name: str, seconds: float) -> dist.ProcessGroup:
    """A group beside the default one, among processes that have no default one in common."""
    limit = timedelta(seconds=seconds)
    store, rank, size = next(c10d.rendezvous(method, rank, size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store),
                                              group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def receive(model, device: torch.device, name: str, store: Sequence, key: str, seconds: float) -> None:
    """Load one bucket while the next one is on its way; what each holds comes by the store, `key`/number.

    The request goes to the served model alone, since buckets come once; a draft of this rank that an earlier request
    has gone to loads them too. An error in loading is kept for the report, and the rest is taken all the same: the
    others in the group wait.
    """
    drafts = [one for one in _models.values() if one is not model]
    client = dist.TCPStore(store[0], store[1], is_master=False, timeout=timedelta(seconds=seconds))
    buffers: list[torch.Tensor | None] = [None, None]
    number, before = 0, None
    while True:
        coming, tensors = None, json.loads(client.get(f"{key}/{number}"))
        if tensors:
            size = max(at + _bytes(dtype, shape) for _, dtype, shape, at in tensors)
            if buffers[number % 2] is None or buffers[number % 2].numel() < size:
                buffers[number % 2] = torch.empty(size, dtype=torch.uint8, device=device)
            flat = buffers[number % 2][:size]
            # On a GPU it begins after what this stream has been given: the copies out of this very buffer.
            coming = dist.broadcast(flat, 0, group=_groups[name], async_op=True), flat, tensors
        if before is not None:
            work, flat, taken = before
            work.wait()
            try:
                for one in (model, *drafts):
                    if not _errors:
                        _into(one, flat, taken)
            except Exception as error:  # noqa: BLE001 - as in `load`
                _errors.append(f"{type(error).__name__}: {error}"[:2000])
        number, before = number + 1, coming
        if coming is None:
            break
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _into(model: torch.nn.Module, flat: torch.Tensor, tensors: Sequence[Sequence]) -> None:
    """The tensors in a bucket, into a model."""
    if id(model) not in _repacked:
        _repacked[id(model)] = Repacked(model)
    if repacked := _repacked[id(model)]:
        repacked.before([name for name, *_ in tensors])
    experts = fused(model)
    others = [pair for name, tensor in split(flat, tensors) if not experts.take(name, tensor)
              for pair in apart(name, tensor)]
    if others:
        model.load_weights(iter(others))


def fused(model: torch.nn.Module) -> FusedExperts:
    """The layers of a model that take stacked experts."""
    if id(model) not in _fused:
        _fused[id(model)] = FusedExperts(model)
    return _fused[id(model)]


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return getattr(torch, dtype).itemsize * torch.Size(shape).numel()


def split(flat: torch.Tensor, tensors: Sequence[Sequence]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a bucket, as views."""
    for name, dtype, shape, offset in tensors:
        yield name, flat[offset : offset + _bytes(dtype, shape)].view(getattr(torch, dtype)).view(shape)


def held(model, dtypes_asked: tuple) -> tuple[Held, Coming]:
    """What the model holds and the sums of it, which may still be on their way; see `Held`.

    It is determined again only where anything has changed. Whether it has is checked while the device adds up what the
    model held before, and so is the sender's memory closed.
    """
    cached = _held.get(id(model))
    sums = cached.sums() if cached is not None and cached.dtypes_asked == dtypes_asked and cached.lasts() else None
    _buckets.clear()
    if sums is None or not cached.same():
        cached = _held[id(model)] = Held(model, dtypes_asked)
        sums = cached.sums()
    return cached, sums


def _report(model, store: Sequence | None = None, key: str = "", names_only: bool = False, dtype: str | None = None,
            dtypes: Mapping[str, str] | None = None, kinds: Mapping[str, str] | None = None) -> None:
    """Tell the sender, under `key`/rank: sums as the hexadecimal bytes of int64, `changed` as positions in `names`."""
    if store is None:
        return
    begin, weights = time.perf_counter(), None
    answer: dict[str, object] = {"error": _errors[0] if _errors else None}
    _errors.clear()
    try:
        if names_only:
            answer |= {"names": [name for name, _ in model.named_parameters()], "one_by_one": fused(model).hindrance}
        elif answer["error"] is None:
            for one in _repacked.values():
                one.end()
            weights, sums = held(model, (dtype, dtypes or {}, kinds or {}))
    except Exception as error:  # noqa: BLE001 - as in `load`
        answer["error"] = f"{type(error).__name__}: {error}"[:2000]
    key = f"{key}/{dist.get_rank() if dist.is_initialized() else 0}"
    try:
        client = connected(tuple(store), key)  # while the device adds up
        if weights is not None:
            names, values = weights.names, sums.arrived()
            if repacked := _repacked.get(id(model)):
                names, values = repacked.reported(names, values)
            answer |= _told(names, values, _first.setdefault(id(model), {}))
        answer["seconds"] = time.perf_counter() - begin
        client.queue_push(key, json.dumps(answer))  # the sender takes it out again
    except Exception as error:  # noqa: BLE001 - a sender that hears nothing does not let the weights serve
        print(f"miles_weights: nothing could be told to the sender's store at {store}: {error}", flush=True)


def _told(names: Sequence[str], sums: torch.Tensor, first: dict[str, list[int]]) -> dict[str, object]:
    """A report of these sums. `first` are those of the first report, and filled by it."""
    rows = dict(zip(names, sums.tolist(), strict=True))
    first.update({} if first else rows)
    return {"names": names, "sums": sums.numpy().tobytes().hex(),
            "changed": [i for i, (name, row) in enumerate(rows.items()) if row != first.get(name)]}


def connected(store: tuple[str, int], key: str) -> dist.TCPStore:
    """To a sender's store. To push into a queue does not notice that a connection was lost; to ask for one does."""
    try:
        _stores[store].queue_len(key)
    except Exception:  # noqa: BLE001 - no client yet, or its connection was lost
        _stores.clear()
        _stores[store] = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    return _stores[store]


def patch(folder: str, copy: str, version: int, base: int | None) -> None:
    """Bring this machine's copy of a checkpoint to `version`; the first rank here does it, the others wait for it.

    Args:
        folder: a complete checkpoint, if `base` is None; else files of changed positions and values, to be written
            into the copy, which has to be at version `base`.
        copy: the folder to bring up to date; it names its version in a file, which is gone while it is written to.

    Raises:
        ValueError: the copy has another version than `base`.
    """
    Path(copy).mkdir(parents=True, exist_ok=True)
    marker = Path(copy, "version")
    with open(f"{copy}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at = int(marker.read_text()) if marker.exists() else None
        if at == version:
            return
        if base is not None and at != base:
            raise ValueError(f"the copy {copy} has version {at}, and the change starts from {base}")
        marker.unlink(missing_ok=True)
        if base is None:
            for old in Path(copy).iterdir():
                old.unlink()
            for file in sorted(Path(folder).iterdir()):
                shutil.copyfile(file, Path(copy, file.name))
        else:
            overwrite(sorted(Path(folder).glob("*.safetensors")), Path(copy))
        marker.write_text(str(version))


def overwrite(changes: Sequence[Path], copy: Path) -> None:
    """Write changed elements into a checkpoint's files.

    `NAME` in a file of changes is a whole tensor; `NAME#positions` and `NAME#values` are some of its elements.
    """
    files = sorted(copy.glob("*.safetensors"))
    places = {name: (file, entry) for file in files for name, entry in header(file).items()}
    maps = {file: torch.from_file(str(file), shared=True, size=os.path.getsize(file), dtype=torch.uint8)
            for file in files}
    for source in changes:
        raw = torch.from_file(str(source), size=os.path.getsize(source), dtype=torch.uint8)
        entries = header(source)

        def bytes_of(name: str, raw=raw, entries=entries) -> torch.Tensor:
            return raw[slice(*entries[name])]

        for name in entries:
            tensor, _, kind = name.partition("#")
            file, (start, end) = places[tensor]
            place = maps[file][start:end]
            if not kind:
                place.copy_(bytes_of(name))
            elif kind == "values":
                positions = bytes_of(f"{tensor}#positions").clone().view(torch.int32).long()
                values = bytes_of(name).view(positions.numel(), -1)
                place.view(-1, values.shape[1])[positions] = values


def header(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies, in bytes from its beginning."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(size))
    return {name: (8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1])
            for name, entry in entries.items() if name != "__metadata__"}
