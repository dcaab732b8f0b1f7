"""Hugging Face tensors <-> Megatron parameters, by the rules of a WeightMap, one tensor at a time."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from miles_local.companions import copy_companions

from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugins.scan import KNOWN
from miles_core.record.publish import publish
from miles_megatron import cpu, hf_config
from miles_megatron.disk_names import PlainReaders, to_disk
from miles_megatron.ownership import hf_shapes, hf_tensors, owners, part_of
from miles_megatron.shards import few, shard_name, tensor_files, write_index, writing
from miles_megatron.specs import Rule, WeightMap
from miles_megatron.stacks import StackedParameter, stacks

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.utils import unwrap_model  # noqa: E402

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""A file of an exported checkpoint holds about this much (transformers' own default)."""

Model = torch.nn.Module | Sequence[torch.nn.Module]
"""One module, or this rank's chunks of an interleaved pipeline; wrapped or not."""

_LAYER, _EXPERT = re.compile(r"decoder\.layers\.(\d+)\."), re.compile(r"\.local_experts\.(\d+(?:-\d+)?)\.")
_GROUPED = re.compile(r"\.experts\.(linear_fc\d)\.(weight|bias)(\d+(?:-\d+)?)$")
"""Transformer Engine's grouped experts: one module holds the same layer of all of a rank's experts."""
EMBEDDING, _TIED = "embedding.word_embeddings.weight", "output_layer.weight"
"""A tied output layer on a pipeline stage of its own is a copy of the embedding."""


def load_hf(folder: str | Path, model: Model, weight_map: WeightMap, *, but: frozenset[str] = frozenset()) -> None:
    """Fill this rank's parameters from safetensors files, tensor by tensor; dtypes are cast, nothing else changes.

    Args:
        but: parameters that keep what they hold; the files need not have them.

    Parameters of optional rules keep it too where the files have none of them, which is announced.

    Raises:
        CheckpointError: no safetensors there, a file that cannot be read, or names that are missing, unexpected or
            misshapen, all of them in one message and before anything was changed.
    """
    read = PlainReaders(tensor_files(Path(folder)), weight_map)
    if not any(place.scales for place in read.places.values()):
        refuse_quantised(Path(folder))
    parameters = global_parameters(model)
    if fresh := lacking(weight_map, read.places) - but:
        if dist.get_rank() == 0:
            logger.warning("%s holds no tensors for %s: these keep their random initialisation",
                           folder, few(sorted(fresh), 4))
        but |= fresh
    rules = {ours: (rule, names) for ours, rule, names in instances(weight_map) if ours not in but}
    expected = {name for _, names in rules.values() for name in names}
    if _TIED in parameters and _TIED not in rules.keys() | but:  # the last pipeline stage's copy of the embedding
        rules[_TIED] = rules[EMBEDDING]
    if unmapped := sorted(parameters.keys() - rules.keys() - but):
        raise ConfigError("no rule of the weight map fills these parameters", got=few(unmapped),
                          fix="add rules to the family's weight_map", code="parameters-unmapped")
    announce_left(folder, read.places, expected, weight_map)
    wanted = {ours: rules[ours] for ours in rules if ours in parameters}
    with read:
        check_tied(folder, read, weight_map)
        shapes = {name: shape for ours, (rule, names) in wanted.items()
                  for name, shape in zip(names, hf_shapes(rule, parameters[ours], weight_map), strict=True)}
        check_fit(folder, read.places.keys(), expected, weight_map, shapes, read.shape)
        with torch.no_grad():
            for ours, (rule, names) in wanted.items():
                parameters[ours].copy_(part_of(rule, map(read.tensor, names), parameters[ours], weight_map))


def refuse_quantised(folder: Path) -> None:
    """
    Raises:
        CheckpointError: config.json says that the weights there are quantised.
    """
    if stated := hf_config.quantization(folder):
        raise CheckpointError("training cannot start from quantised weights", who=str(folder / "config.json"),
                              got=stated.get("quant_method", stated), code="weights-quantised",
                              fix="name the plain checkpoint with --ref-load (make it: miles convert fp8-to-hf, "
                              "int4-to-hf, of MXFP4 hf-to-dist); --hf-checkpoint may stay, for the engine")


def lacking(weight_map: WeightMap, present: Collection[str]) -> frozenset[str]:
    """Parameters of optional rules, where a checkpoint has no tensor of any of their kind."""
    kinds: dict[object, dict[str, bool]] = {}
    for ours, rule, names in instances(weight_map):
        if rule.optional:
            kinds.setdefault(rule.optional, {})[ours] = any(name in present for name in names)
    absent = [parameters for parameters in kinds.values() if not any(parameters.values())]
    return frozenset(ours for parameters in absent for ours in parameters)


def check_fit(folder: str | Path, present: Collection[str], expected: Collection[str], weight_map: WeightMap,
              shapes: Mapping[str, list[int]], shape: Callable[[str], list[int]]) -> None:
    """Compare the names and shapes of a checkpoint's tensors with the model's.

    Args:
        present, expected: names of the checkpoint's tensors, and of the whole model's.
        shapes: what to hold against `shape(name)` of each.

    Raises:
        CheckpointError: names that are missing, unexpected or misshapen, all of them in one message.
    """
    known = {*expected, *weight_map.ignored}
    problems = {
        "missing": sorted(set(expected) - set(present)),
        "unexpected": sorted(name for name in present if name not in known and "rotary_emb" not in name
                             and not name.startswith((*weight_map.left, *weight_map.carried))),
        "misshapen": [f"{name} {got} where the config says {wanted}" for name, wanted in shapes.items()
                      if name in present and (got := shape(name)) != wanted],
    }
    if any(problems.values()):
        only_more = not problems["missing"] and not problems["misshapen"]
        text = "; ".join(f"{len(names)} {kind}: {few(names)}" for kind, names in problems.items() if names)
        raise CheckpointError("the tensors do not fit the model that config.json describes", got=text,
                              who=str(folder), fix=f"{known_by()}; or take them out of the files" if only_more
                              else "use a complete checkpoint of this architecture", code="tensors-do-not-fit-config")


def announce_left(folder: str | Path, present: Collection[str], expected: Collection[str],
                  weight_map: WeightMap) -> None:
    """Say once which tensors of a checkpoint the model leaves there; an export of the run will not have them."""
    names = sorted({name for name in present if name.startswith(weight_map.left)} - {*expected, *weight_map.ignored})
    if names and dist.get_rank() == 0:
        logger.warning("%s: the model does not use %d tensors, such as %s; %s", folder, len(names), names[0],
                       known_by())


def check_tied(folder: str | Path, read: PlainReaders, weight_map: WeightMap) -> None:
    """
    Raises:
        CheckpointError: config.json ties the output layer to the embedding, and the files hold two that differ.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if weight_map.tied and {head, embedding} <= read.places.keys() and (
            not torch.equal(read.tensor(head), read.tensor(embedding))):
        raise CheckpointError("config.json ties the output layer to the embedding, and the files hold two that "
                              "differ", got=head,
                              code="tied-embedding-differs", who=str(folder), fix="set tie_word_embeddings to false in "
                              "config.json to train both, or remove lm_head.weight from the files")


def export_keys(folder: Path, weight_map: WeightMap) -> dict[str, Any]:
    """Keys that config.json has otherwise in an export of the model, None for one that goes: nothing is quantised,
    tensors that the model leaves in the folder are none, and layers that a plugin adds are counted.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    keys, counts = hf_config.without_quantization(folder), dict(weight_map.added_counts)
    if not any(name.startswith(weight_map.left) for _, _, names in instances(weight_map) for name in names):
        counts |= dict.fromkeys(weight_map.left_counts, 0)
    keys.get("text_config", keys).update(counts)
    return keys


def known_by() -> str:
    """What to do about weights that the model does not have."""
    plugins = ", ".join(f"--plugin {name}" for name, offers in KNOWN.items()
                        if any(offer.startswith("weight_map:") for offer in offers))
    return f"enable the plugin that knows these weights ({plugins}), without which they would be lost"


def hf_stream(model: Model, weight_map: WeightMap, *, stacked: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The complete policy under its names on disk, in the order of the rules; every rank must go through it.

    Each tensor is gathered from its tensor-parallel ranks and then sent on by the stage and expert rank that own it,
    so that every rank sees all of them, one at a time. Tensors are detached and, where a view does, share memory with
    the model: copy what must outlive a step.

    Args:
        stacked: experts of a rank that lie side by side are one tensor, [experts, ...], where files have one for each:
            `0-63` stands in its name for the number of an expert.
    """
    return to_disk(_stream(model, weight_map, stacked and not weight_map.packed), weight_map)


@functools.cache
def one_by_one(why: str) -> None:
    """Say once why a sync has a tensor for each expert."""
    if dist.get_rank() == 0:
        logger.info("weight_sync: experts are sent one by one: %s", why)


def _stream(model: Model, weight_map: WeightMap, stacked: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The same by the names of the rules."""
    parameters = global_parameters(model, stacked=stacked)
    alone = (name for name, one in parameters.items() if _EXPERT.search(name) and not isinstance(one, StackedParameter))
    if stacked and (name := next(alone, None)):
        one_by_one(f"{name} and others do not lie side by side")
    rules = {ours: rule for ours, rule, _ in instances(weight_map, parameters if stacked else ())}
    owner_of = owners(parameters, rules, weight_map)
    for ours, rule, names in instances(weight_map, owner_of if stacked else ()):
        owner = owner_of[ours]
        if ours in parameters:
            parts = hf_tensors(rule, parameters[ours], weight_map)
        else:
            device = next(iter(parameters.values())).device
            parts = [torch.empty(shape, dtype=owner.dtype, device=device) for shape in owner.shapes]
        for name, part in zip(names, parts, strict=True):
            sent = owner.send(part, expert=bool(rule.experts))
            if owner.buffer:
                sent.keeps_dtype = True  # also where weights are sent in another one (miles_sglang/sync/buckets.py)
            yield name, sent


def export_hf(
    folder: str | Path,
    source_folder: str | Path,
    stream: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    config: Mapping[str, object] | None = None,
    beside: bool = False,
) -> None:
    """Write a Hugging Face directory: the source's config, tokenizer and generation config, and the stream's tensors.

    Args:
        dtype: of all tensors in the files; by default each keeps its own.
        config: further keys of config.json, such as quantization_config; None takes a key out.
        beside: whether what was interrupted beside the folder is cleared, in one that nobody else writes into.

    One process calls it. The folder appears when it is complete; an older one of that name is replaced.

    Raises:
        CheckpointError: a source without config.json, or a write that fails.
    """
    source = Path(source_folder)
    if not (source / "config.json").is_file():
        raise CheckpointError("config.json is missing, so it cannot be copied", code="config-json-not-copied",
                              who=str(source), fix="give the Hugging Face directory that the run started from")
    with publish(Path(folder), beside=beside) as target:
        written = _write_shards(target, stream, dtype, shard_bytes)
        copy_companions(source, target, written, config)


def _write_shards(
    target: Path, stream: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, limit: int
) -> torch.dtype | None:
    """Returns the dtype of most bytes that are not quantised; a few small tensors may be wider than the rest."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    lengths: dict[torch.dtype, int] = {}

    def flush() -> None:
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in pending.items()}
        with writing(target / f"part-{len(shards)}", layout) as append:
            for tensor in pending.values():
                append(tensor)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in stream:
        written = dtype or tensor.dtype
        length = tensor.numel() * written.itemsize
        if written.itemsize > 1 and written.is_floating_point:
            lengths[written] = lengths.get(written, 0) + length
        if pending and size + length > limit:
            flush()
            size = 0
        pending[name] = tensor.to(device="cpu", dtype=written)
        size, total = size + length, total + length
    flush()
    for i in range(len(shards)):
        (target / f"part-{i}").rename(target / shard_name(i, len(shards)))
    write_index(target, shards, total)
    return max(lengths, key=lengths.get, default=dtype)


def instances(weight_map: WeightMap, known: Collection[str] = ()) -> Iterator[tuple[str, Rule, tuple[str, ...]]]:
    """(Megatron name over the whole model, rule, HF names) of each parameter, in the order of the rules.

    Args:
        known: names of parameters, of which stacks take the place of their experts.
    """
    for rule in weight_map.rules:
        for layer in rule.layers if rule.layers is not None else (0,):
            for expert in _experts(rule, layer, known):
                where = {"layer": layer, "expert": expert}
                yield rule.megatron.format(**where), rule, tuple(name.format(**where) for name in rule.hf)


def _experts(rule: Rule, layer: int, known: Collection[str]) -> Iterator[int | str]:
    """The numbers of a rule's experts, or "0-63" for a rank's that are a stack."""
    count = rule.experts or 1
    size = parallel_state.get_expert_model_parallel_world_size() if known and rule.experts else 1
    for first in range(0, count, count // size):
        together = f"{first}-{first + count // size - 1}"
        if known and rule.megatron.format(layer=layer, expert=together) in known:
            yield together
        else:
            yield from range(first, first + count // size)


def global_parameters(model: Model, *, stacked: bool = False) -> dict[str, torch.Tensor]:
    """This rank's parameters and what it saves beside them, under names that count layers and experts over the model.

    A layer knows its own number; expert-parallel rank r of e holds experts r n/e up to (r+1) n/e.

    Args:
        stacked: experts that lie side by side are one StackedParameter.
    """
    parameters = {}
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        chunk = unwrap_model(chunk)
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * experts
        named = chain(chunk.named_parameters(), kept_buffers(chunk))
        for name, parameter in stacks(named, _GROUPED) if stacked else named:
            name = _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)
            name = _LAYER.sub(lambda match: f"decoder.layers.{numbers[int(match[1])]}.", name)  # noqa: B023 - used here
            parameters[_EXPERT.sub(lambda match: _counted(match[1], first), name)] = parameter  # noqa: B023
    return parameters


def of_all_experts(name: str) -> str:
    """The name of a parameter without the number of its expert."""
    return _EXPERT.sub(".local_experts.", name)


def _counted(experts: str, first: int) -> str:
    """An expert's number on its rank, or several's such as 0-63, over all ranks."""
    return f".local_experts.{'-'.join(str(first + int(number)) for number in experts.split('-'))}."


def kept_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Numbers that are no parameters, yet part of the model: its persistent buffers, as a router's bias or table."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
