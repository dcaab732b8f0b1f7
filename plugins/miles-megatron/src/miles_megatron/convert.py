"""Whole checkpoints from Hugging Face's format to torch_dist and back, a parameter at a time.

No model is ever in memory. It is built without storage, for the names, shapes and places of its parameters in a
torch_dist checkpoint; then each parameter is read, written and forgotten. A torch_dist checkpoint does not depend on a
layout, so that of one rank serves for all.

Several processes share the work by bytes and need nothing of each other before the end. An object of a class here lives
in each; `drive` calls them, through any host.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from miles_local import heap

from miles_core.config.load import with_values
from miles_core.config.options import Origin, convert
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError, OwnerError, WaitError
from miles_core.hosts import Handle
from miles_core.plugins import bind, select
from miles_core.plugins.scan import KNOWN
from miles_core.plugins.select import Selected
from miles_core.reading import reading
from miles_core.types import Rank
from miles_core.waits import within
from miles_megatron import checkpoint, cpu, hf_config, shards, weights
from miles_megatron.model import build, transformer_config
from miles_megatron.shards import tensor_files
from miles_megatron.specs import ModelSpec, Rule, WeightMap

cpu.install()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

WAIT = 3600.0
"""Seconds that one call may take: of a parameter to be read and written, or of one process for another at the end."""

AS_NAMED = WeightMap(rules=(), heads=0, groups=0, head_dim=0)
"""Of files that have a tensor for each weight, by its name; others keep all experts in one, or call them otherwise."""

_SLICE = 0.5
"""Seconds of work between two looks at the progress; a parameter in work is finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion; it can be pickled.

    Args:
        source: a Hugging Face directory, or one iteration of a torch_dist checkpoint.
        target: an empty folder that the caller makes and publishes.
        spec, weight_map: the architecture.
        selected, config: the plugins that may add to the model, and what they are configured with.
        dtype: of the weights that are written; None keeps each one's own, as buffers do.
        shard_bytes: most bytes of a file of weights, unless one parameter alone has more; to Hugging Face only.
        companions: the Hugging Face directory of config.json and tokenizer; to Hugging Face only.
    """

    source: Path
    target: Path
    spec: ModelSpec
    weight_map: WeightMap
    selected: Sequence[Selected] = ()
    config: RunConfig = RunConfig()
    dtype: torch.dtype | None = None
    shard_bytes: int = weights.SHARD_BYTES
    companions: Path | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model without storage.

    Args:
        hf: HF name -> shape of the tensors that it is made of, in order.
        entry: where it lies in a torch_dist checkpoint; its `data` is on the meta device.
        buffer: it is no weight, such as a router's bias or table, and keeps its dtype.
        dtype: of what is written.
        place: of its first byte in the source: file and offset.
    """

    rule: Rule
    hf: Mapping[str, list[int]]
    entry: ShardedTensor | ShardedTensorFactory
    buffer: bool = False
    dtype: torch.dtype = torch.float32
    place: tuple[str, int] = ("", 0)

    @property
    def nbytes(self) -> int:
        return self.entry.data.numel() * self.dtype.itemsize

    def pieces(self, tensor: torch.Tensor) -> list[ShardedTensor]:
        """How a torch_dist checkpoint holds the parameter; their data are views of the tensor given."""
        if isinstance(self.entry, ShardedTensorFactory):
            return list(nested_values(dataclasses.replace(self.entry, data=tensor).build()))
        return [dataclasses.replace(self.entry, data=tensor, dtype=tensor.dtype)]


class Conversion:
    """One process's share of a conversion, called by `drive`: begin, advance until all is done, finish.

    Raises:
        CheckpointError: the source does not fit the model, or cannot be read.
    """

    def __init__(self, job: Job, rank: Rank = Rank()):  # noqa: B008 - frozen
        self.job, self.rank, self._done = job, rank, 0
        heap.map_tensors()
        cpu.process_group(rank, WAIT)
        cpu.initialize()
        self.parameters = self._placed(_parameters(job))
        self.mine = list(share(self._units(), rank))
        dist.barrier()  # the first process has made the target
        self._steps = self._work()

    def begin(self) -> dict[int, int]:
        """This process -> the bytes that it has to write."""
        return {self.rank.index: sum(one.nbytes for one in self.mine)}

    def advance(self) -> dict[int, int]:
        """Work for a while; this process -> the bytes that it has written in all."""
        end = time.monotonic() + _SLICE
        for count in self._steps:
            self._done += count
            gc.collect(1)  # torch.save and torch.load leave cycles that hold their tensor
            if time.monotonic() > end:
                break
        return {self.rank.index: self._done}

    def finish(self) -> tuple[int, int]:
        """Write what tells of all files, on the first process; how many hold weights, and the bytes of all."""
        for count in self._steps:
            self._done += count
        return self._conclude(), sum(one.nbytes for one in self.parameters)

    def _dtype(self, one: Parameter, stored: torch.dtype) -> torch.dtype:
        """Of what is written of a parameter that the source has in another."""
        return stored if one.buffer or self.job.dtype is None else self.job.dtype

    def _placed(self, parameters: list[Parameter]) -> list[Parameter]:
        """The parameters in the order of the source's files, after a check that they are all there."""
        raise NotImplementedError

    def _units(self) -> Sequence:
        """What is shared among the processes: all of it, each with `nbytes`."""
        raise NotImplementedError

    def _work(self) -> Iterator[int]:
        """Write `mine`; yields the bytes of each parameter."""
        raise NotImplementedError

    def _conclude(self) -> int:
        """The rest of `finish`; the number of files."""
        raise NotImplementedError


def architecture(folder: Path, plugins: Sequence[str],
                 options: Sequence[str] = ()) -> tuple[ModelSpec, WeightMap, Sequence[Selected], RunConfig]:
    """What a config.json describes, by the plugin that offers its model_type and those that add to it, for a Job.

    Args:
        plugins: names or files; an official one that offers the model_type is found without being named.
        options: PLUGIN.KEY=VALUE of each option of these that is not its default.

    Raises:
        CheckpointError: config.json cannot be read.
        OwnerError: no plugin builds the architecture, or two do.
        ConfigError: an option that no plugin has, or a value that does not fit.
    """
    path = folder / "config.json"
    with reading(str(path), CheckpointError):
        hf = hf_config.read(folder)
    name = str(hf.model_type)
    selected = select.select([(one, "--plugin") for one in plugins], select.built_in())
    if not any(_builds(one, name) for one in selected):
        known = [plugin for plugin, offers in KNOWN.items() if f"model_spec:{name}" in offers]
        selected = select.select([(plugin, f"model_type of {path}") for plugin in known], selected)
    owners = [one for one in selected if _builds(one, name)]
    if len(owners) != 1:
        names = ", ".join(one.manifest.name for one in owners)
        raise OwnerError(f"{'two' if owners else 'no'} plugins build the architecture {name!r}", who=str(path),
                         got=names or None, code="architecture-builders-count", fix="name one of them" if owners else
                         "add the family in a plugin of about fifty lines, --plugin ./my_family.py: "
                         "docs/model-families.md")
    config = with_values(RunConfig(options=_options(options, selected)), str(path),
                         checkpoint__hf_checkpoint=str(folder))
    hooks = bind.bind(selected, config, "trainer")
    with reading(str(path), CheckpointError):
        family = hooks.model_spec[name](hf)
        model_spec, weight_map = family.model_spec(hf), family.weight_map(hf)
    if hooks.weight_map is not None:
        weight_map = hooks.weight_map(weight_map, folder, checkpoint.ACTOR)
    return model_spec, weight_map, tuple(selected), config


def as_stored(folder: Path) -> WeightMap:
    """Where a directory's files keep a layer's experts in one tensor, for a conversion that takes them apart.

    Files with a tensor for each weight need no plugin of their architecture. Experts whose two parts' rows take turns
    (gpt-oss) stay as they are: engines have no names for one.

    Raises:
        as `architecture`.
    """
    names = tensor_files(folder)
    if not any(re.search(r"\.experts\.[a-z]\w*$", name) for name in names):
        return AS_NAMED
    weight_map = architecture(folder, ())[1]
    return AS_NAMED if any(packed.alternating for packed in weight_map.packed) else weight_map


def _options(texts: Sequence[str], selected: Sequence[Selected]) -> dict[str, dict[str, object]]:
    known = {(one.manifest.name, name): option for one in selected for name, option in one.manifest.options.items()}
    options: dict[str, dict[str, object]] = {}
    for text in texts:
        key, _, value = text.partition("=")
        plugin, _, name = key.partition(".")
        if (plugin, name) not in known:
            raise ConfigError("none of the plugins has this option", code="convert-option-unknown", got=text,
                              who="--option", fix="write PLUGIN.KEY=VALUE, and name the plugin with --plugin")
        options.setdefault(plugin, {})[name] = convert(known[plugin, name], value, Origin("flag", f"--option {text}"))
    return options


def _builds(one: Selected, name: str) -> bool:
    return any((offer.hook, offer.name) == ("model_spec", name) for offer in one.manifest.offers)


def share(items: Sequence, rank: Rank) -> Iterator:
    """A process's share of consecutive items, even by bytes: what has its middle in its stretch of them all."""
    total, start = sum(item.nbytes for item in items), 0
    for item in items:
        if (2 * start + item.nbytes) * rank.size // (2 * total) == rank.index:
            yield item
        start += item.nbytes


def full_shape(piece: ShardedTensor) -> tuple[int, ...]:
    """With the axes of layer and expert, which the piece does not have and its checkpoint does."""
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)


def _parameters(job: Job) -> list[Parameter]:
    spec, weight_map = job.spec, job.weight_map
    hooks, folder = bind.bind(job.selected, job.config, "trainer"), Path(job.config.checkpoint.hf_checkpoint)
    fields: dict[str, object] = {"perform_initialization": False}
    if hooks.transformer_config is not None:
        fields = hooks.transformer_config(fields, folder, checkpoint.ACTOR)
    with torch.device("meta"):
        model = build(transformer_config(spec, fields), spec)
        if hooks.build_model is not None:
            model = hooks.build_model(model, spec, folder, checkpoint.ACTOR, weight_map)
    stored = checkpoint.others(job.source)
    (entries,) = checkpoint.sharded_entries([model], None, loading=True, named_as=stored).values()
    by_name, tensors = {}, weights.global_parameters(model)
    for ours, rule, names in weights.instances(weight_map):
        if ours in entries:
            shapes = weights.hf_shapes(rule, entries[ours].data, weight_map)
            by_name[ours] = Parameter(rule, dict(zip(names, shapes, strict=True)), entries[ours],
                                      buffer=not isinstance(tensors[ours], torch.nn.Parameter))
    if unmapped := sorted(entries.keys() - by_name.keys()):
        raise ConfigError("no rule of the weight map fills these parameters", got=shards.few(unmapped),
                          fix="add rules to the family's weight_map", code="parameters-unmapped")
    return list(by_name.values())


async def drive(handle: Handle, progress: Callable[[int, int], object]) -> tuple[int, int]:
    """Run a Conversion, here or on the ranks behind a handle.

    Args:
        progress: told (bytes written, bytes in all) now and then, of the processes behind the handle.

    Returns:
        How many files hold weights, and their bytes.

    Raises:
        WaitError: a call took longer than WAIT.
    """
    def late() -> WaitError:
        return WaitError(f"the conversion made no progress within {WAIT:g} s", code="conversion-stalled",
                         fix="check the file systems")

    async with within(WAIT, late):
        total, done = sum((await handle.begin()).values()), -1
    while done < total:
        async with within(WAIT, late):
            done = sum((await handle.advance()).values())
        progress(done, total)
    async with within(WAIT, late):
        return await handle.finish()


class Here(Handle):
    """A handle of an object of this very process; a call blocks."""

    def __init__(self, hosted: object):
        super().__init__("converter")
        self._hosted = hosted

    async def call(self, method: str, *args: object) -> object:
        await asyncio.sleep(0)  # for Ctrl-C to be heard
        return getattr(self._hosted, method)(*args)
