"""Runs inside an SGLang server, in every rank: loads buckets of weights and reports what the model then holds.

SGLang is started with `--custom-weight-loader miles_weights.load` and this folder on PYTHONPATH, so this file imports
torch and the standard library alone. The sender uses `sums`, too: both sides add up with the same code.

SGLang lets an exception of a loader end the server. So nothing is raised here: what happened goes to a key-value store
(torch's TCPStore) that the sender keeps, and the sender decides whether the weights may serve.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from itertools import accumulate
from operator import or_
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

try:
    import triton
    import triton.language as tl
except ImportError:  # a trainer on a CPU
    triton = None

PIECE = {"cuda": 1 << 24, "cpu": 1 << 18}
"""Lanes that are added up at once: 32 MiB of int16 stay in an H200's cache from kernel to kernel, half of one in a
CPU's."""
SMALL = 1 << 16
"""Tensors of up to this many lanes are added up together with others of their size."""
STORE_SECONDS = 60

_errors: list[str] = []
"""What went wrong since the last report, a draft model's loading included."""
_first: dict[int, dict[str, list[int]]] = {}
"""The sums of the first report, by id of the model."""
_groups: dict[str, dist.ProcessGroup] = {}
"""Groups of senders, by name."""
_stores: dict[tuple[str, int], dist.TCPStore] = {}
"""The connection to the sender, by its address: to connect takes longer than to report."""
_buckets: list[torch.Tensor] = []
"""Memory of the sender that is open here: opening it anew for every bucket would cost more than reading it."""


def load(model, named_tensors) -> None:
    """SGLang's entry: one bucket.

    Args:
        named_tensors: [(plan, flat)]. flat is uint8; the plan is JSON with any of these:
            tensors: [[name, dtype, shape, offset in bytes], ...] of what lies in flat.
            patch: {folder, copy, version, base}; see `patch`. drop: the copy's path, to remove it.
            join: {name, backend, method, size, offset, seconds}: become a member of a group. leave: its name.
            receive: {name, store, key, seconds}: take buckets from that group until the store says stop.
            report: {store: [host, port], key, names_only, dtype, dtypes, kinds}: close the sender's memory and tell
                what the model holds now; {} tells nothing.
    """
    ((text, flat),) = named_tensors
    plan = json.loads(text)
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
            model.load_weights(split(flat, plan["tensors"]))
            if flat.is_cuda:
                _buckets.append(flat)
                torch.cuda.current_stream().synchronize()  # the sender fills the bucket anew after the answer
    except Exception as error:  # noqa: BLE001 - whatever it is, it would end the server
        _errors.append(f"{type(error).__name__}: {error}"[:2000])
    if "report" in plan:
        _buckets.clear()
        _report(model, **plan["report"])


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

    An error in loading is kept for the report, and the rest is taken all the same: the others in the group wait.
    """
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
                if not _errors:
                    model.load_weights(split(flat, taken))
            except Exception as error:  # noqa: BLE001 - as in `load`
                _errors.append(f"{type(error).__name__}: {error}"[:2000])
        number, before = number + 1, coming
        if coming is None:
            break
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return getattr(torch, dtype).itemsize * torch.Size(shape).numel()


def split(flat: torch.Tensor, tensors: Sequence[Sequence]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a bucket, as views."""
    for name, dtype, shape, offset in tensors:
        yield name, flat[offset : offset + _bytes(dtype, shape)].view(getattr(torch, dtype)).view(shape)


def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[tensors, 2] int64: two sums over each tensor's raw bits, which add up over its parts in any order.

    A tensor's bits are read as lanes x of int16 (int8 where an element has one byte). The sums are those of x and of
    x * (x >> 7) cut to the lane's width, modulo 2^64. They do not see the order of the lanes, nor zeros. Nothing is
    brought to the host.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda" and triton is not None:
        return _sums_at_once(tensors)
    pieces: list[tuple[list[int], torch.Tensor]] = []
    alike: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        lanes = tensor.detach().reshape(-1)
        lanes = lanes if lanes.stride(0) == 1 else lanes.clone(memory_format=torch.contiguous_format)
        lanes = lanes.view(torch.int8 if tensor.element_size() == 1 else torch.int16)
        if lanes.numel() <= SMALL:
            alike.setdefault((lanes.numel(), lanes.dtype), []).append((i, lanes))
        else:
            pieces += [([i], piece[None]) for piece in lanes.split(PIECE[device.type])]
    for same in alike.values():
        for at in range(0, len(same), 64):
            part = same[at : at + 64]
            pieces.append(([i for i, _ in part], torch.stack([lanes for _, lanes in part])))
    found = torch.zeros(sum(len(owners) for owners, _ in pieces), 2, dtype=torch.int64, device=device)
    scratch, row = {}, 0
    for owners, lanes in pieces:
        if (mixed := scratch.get(lanes.dtype)) is None or mixed.numel() < lanes.numel():
            mixed = scratch[lanes.dtype] = torch.empty(max(lanes.numel(), SMALL), dtype=lanes.dtype, device=device)
        mixed = mixed[: lanes.numel()].view(lanes.shape)
        torch.bitwise_right_shift(lanes, 7 if lanes.dtype == torch.int16 else 3, out=mixed)
        mixed.mul_(lanes)
        torch.sum(lanes, 1, dtype=torch.int64, out=found[row : row + len(owners), 0])
        torch.sum(mixed, 1, dtype=torch.int64, out=found[row : row + len(owners), 1])
        row += len(owners)
    owners = torch.tensor([i for owners, _ in pieces for i in owners], dtype=torch.int64, device=device)
    return torch.zeros(len(tensors), 2, dtype=torch.int64, device=device).index_add_(0, owners, found)


CHUNK, BLOCK = 1 << 16, 1 << 12
"""Lanes that one program of the kernel adds up, and that it reads at once."""


def _sums_at_once(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sums` by a kernel for each width of lanes: casting to int64, as torch's sum does, moves nine times the bytes."""
    found = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    for narrow in (False, True):
        where = [i for i, tensor in enumerate(tensors) if (tensor.element_size() == 1) == narrow]
        flat, width = [tensors[i].contiguous() for i in where], 1 if narrow else 2
        starts, sizes = [tensor.data_ptr() for tensor in flat], [tensor.nbytes // width for tensor in flat]
        ends = list(accumulate((size + CHUNK - 1) // CHUNK for size in sizes))
        if not ends or not ends[-1]:
            continue
        table = torch.frombuffer(array("q", starts + sizes + ends + where), dtype=torch.int64)
        _add_up[(ends[-1],)](table.to(found.device, non_blocking=True), found, len(flat), CHUNK, BLOCK,
                             reduce(or_, starts + sizes) % 16 == 0, narrow)
    return found


def _add_up(table, found, tensors, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
            NARROW: tl.constexpr):
    """One chunk of lanes, added to its tensor's two sums.

    Args:
        table: [4, tensors] int64: where each begins, its lanes, the chunks of those up to it, and its row of `found`.
        NARROW: lanes are int8, else int16.
    """
    chunk = tl.program_id(0).to(tl.int64)
    owner, end = 0, tensors
    while owner < end:  # the first whose chunks end after this one
        middle = (owner + end) // 2
        if tl.load(table + 2 * tensors + middle) <= chunk:
            owner = middle + 1
        else:
            end = middle
    length = tl.load(table + tensors + owner)
    before = (chunk - tl.load(table + 2 * tensors + owner) + (length + CHUNK - 1) // CHUNK) * CHUNK
    lane: tl.constexpr = tl.int8 if NARROW else tl.int16
    lanes, length = tl.load(table + owner).to(tl.pointer_type(lane)) + before, length - before
    if ALIGNED:  # else every lane is read by itself
        lanes, length = tl.multiple_of(lanes, 16), tl.multiple_of(length, 16)
    at = tl.arange(0, BLOCK)
    one, two = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x = tl.load(lanes + start + at, mask=start + at < length, other=0).to(tl.int32)
        one += x
        two += ((x * (x >> (3 if NARROW else 7))) << (24 if NARROW else 16)) >> (24 if NARROW else 16)
    row = tl.load(table + 3 * tensors + owner)
    tl.atomic_add(found + 2 * row, tl.sum(one.to(tl.int64)))
    tl.atomic_add(found + 2 * row + 1, tl.sum(two.to(tl.int64)))


if triton is not None:
    _add_up = triton.jit(_add_up, do_not_specialize=["tensors"])


def state(model) -> dict[str, torch.Tensor]:
    """Every parameter and every buffer that a checkpoint would hold, once.

    One walk, in place of those of named_parameters, named_buffers and named_modules. It is made for each report: what
    was remembered could hide that a parameter was replaced.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(prefix: str, module: torch.nn.Module) -> None:
        own, left_out = module._parameters, module._non_persistent_buffers_set
        if module._buffers:
            own = own | {name: buffer for name, buffer in module._buffers.items() if name not in left_out}
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = tensor
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                visit(f"{prefix}{name}.", child)

    visit("", model)
    return found


def held(model, dtype: str | None, dtypes: Mapping[str, str],
         kinds: Mapping[str, str]) -> tuple[list[str], torch.Tensor]:
    """Names and, on the host, sums of every parameter and of every buffer that a checkpoint would hold.

    Args:
        dtype: what the sender sent; a wider parameter is cast back to it, which is exact.
        dtypes: by name, for tensors that were sent in another one.
        kinds: the same by how names end, which engines leave as it is when they join tensors: the longest end counts.
    """
    tensors = state(model)
    ends = sorted(kinds, key=len, reverse=True)
    for name, tensor in tensors.items():
        said = dtypes.get(name) or next((kinds[end] for end in ends if name.endswith(end)), dtype)
        sent = said and getattr(torch, said)
        if sent not in (None, tensor.dtype) and tensor.is_floating_point() and tensor.element_size() > sent.itemsize:
            tensors[name] = tensor.to(sent)
    return list(tensors), sums(list(tensors.values())).cpu()


def _report(model, store: Sequence | None = None, key: str = "", names_only: bool = False, dtype: str | None = None,
            dtypes: Mapping[str, str] | None = None, kinds: Mapping[str, str] | None = None) -> None:
    """Tell the sender, under `key`/rank: sums as the hexadecimal bytes of int64, `changed` as positions in `names`."""
    if store is None:
        return
    begin = time.perf_counter()
    answer: dict[str, object] = {"error": _errors[0] if _errors else None}
    _errors.clear()
    if names_only:
        answer["names"] = [name for name, _ in model.named_parameters()]
    elif answer["error"] is None:
        try:
            names, found = held(model, dtype, dtypes or {}, kinds or {})
            rows = dict(zip(names, found.tolist(), strict=True))
            first = _first.setdefault(id(model), rows)
            answer |= {"names": names, "sums": found.numpy().tobytes().hex(),
                       "changed": [i for i, name in enumerate(names) if rows[name] != first.get(name)]}
        except Exception as error:  # noqa: BLE001 - as in `load`
            answer["error"] = f"{type(error).__name__}: {error}"[:2000]
    answer["seconds"] = time.perf_counter() - begin
    try:
        _put(tuple(store), f"{key}/{dist.get_rank() if dist.is_initialized() else 0}", json.dumps(answer))
    except Exception as error:  # noqa: BLE001 - a sender that hears nothing does not let the weights serve
        print(f"miles_weights: the sender's store at {store} cannot be reached: {error}", flush=True)


def _put(store: tuple[str, int], key: str, value: str) -> None:
    """Into a queue of a sender's store, which takes it out."""
    def push() -> None:
        client.queue_push(key, value)
        client.queue_len(key)  # waits until it is there: to push alone does not notice a lost connection

    try:
        client = _stores.pop(store)
        push()
    except Exception:  # noqa: BLE001 - there is none yet, or the one that is kept was lost
        _stores.clear()
        client = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        push()
    _stores[store] = client


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
