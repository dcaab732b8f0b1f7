"""`miles convert add-mtp`: a Hugging Face directory gets multi-token-prediction layers that are freshly drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from miles_megatron.convert import architecture
from miles_megatron.disk_names import PlainReaders, to_disk
from miles_megatron.readers import Readers
from miles_megatron.shards import tensor_files
from miles_megatron.weights import export_hf, export_keys, instances, refuse_quantised

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json, reading
from miles_core.rng import key
from miles_mtp.names import layers_of


def add(source: Path, out: Path, number: int | None, scheme: str, seed: int) -> str:
    """Write `out`; returns what became of it, in words.

    Matrices are normal with the model's initializer_range, each by the seed and its name; norms pass on what they get.
    What else a layer has (a router's bias, say) is as in the model's last layer.

    Raises:
        CheckpointError: the source has such layers, or its weights are quantised.
        ConfigError: no plugin builds the architecture, or several layers under names for one.
    """
    refuse_quantised(source)
    layers = layers_of(source, number, scheme)
    if layers.stored:
        raise CheckpointError("the checkpoint has multi-token-prediction layers", got=layers.count, who=str(source),
                              fix="it needs no others: miles run --plugin mtp keeps them", code="mtp-layers-present")
    spec, weight_map, *_ = architecture(source, ())
    added = layers.added(weight_map)
    own = {name for _, _, names in instances(weight_map) for name in names}
    fresh = [name for _, _, names in instances(added) for name in names if name not in own]
    files = tensor_files(source)
    with reading(str(source / "config.json"), CheckpointError):
        config = parse_json((source / "config.json").read_text(encoding="utf-8"))
    scale = float(config.get("text_config", config).get("initializer_range", 0.02))
    resting = 0.0 if spec.constants.get("layernorm_zero_centered_gamma") else 1.0
    ends = tuple(f"model.layers.{len(spec.attention) - 1}.{end}" for end in ("", "self_attn.o_proj.weight"))
    width = int(spec.constants["hidden_size"])  # type: ignore[call-overload]

    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        for name in fresh:
            like = _like(name, layers.names.layer, layers.count, len(spec.attention), ends[0])
            shape = read.shape(like) if like in read.places else [width] if "norm" in name else [width, 2 * width]
            if len(shape) > 1:
                draw = torch.Generator().manual_seed(key(seed, f"mtp/{name}"))
                tensor = torch.randn(shape, generator=draw) * scale
            else:
                tensor = torch.full(shape, resting) if "norm" in name else read.tensor(like).float()
            yield name, tensor.to(read.tensor(like).dtype if like in read.places else dtype)

    plain_files = Readers(files)
    with plain_files, PlainReaders(files, weight_map) as read:
        dtype = read.tensor(ends[1] if ends[1] in read.places else next(iter(read.places))).dtype
        stored = ((name, plain_files.tensor(name)) for name in sorted(files, key=lambda name: (files[name], name)))
        export_hf(out, source, itertools.chain(stored, to_disk(drawn(), added)), config=export_keys(source, added))
    return (f"{layers.count} fresh layer{'s'[:layers.count != 1]} in {len(fresh)} tensors, "
            f"{layers.counted} {layers.count}")


def _like(name: str, prefix: str, count: int, layers: int, last: str) -> str:
    """The tensor of the model's last layer that a layer's own is made like; the name itself where there is none."""
    numbers: Sequence[int] = range(count)
    place = next((begin for k in numbers if name.startswith(begin := prefix.format(k=k, n=layers + k))), None)
    return name if place is None else last + name.removeprefix(place)
