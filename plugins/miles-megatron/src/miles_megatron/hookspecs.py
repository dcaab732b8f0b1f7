"""The hooks of the Megatron-core trainer, beside those of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookspec

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from miles_core.config import RunConfig
    from miles_core.types import Sample
    from miles_megatron.specs import ModelSpec, WeightMap


@hookspec("observe", role="trainer", per="run")
def megatron_init(config: RunConfig) -> None:
    """Megatron's process groups exist, no model yet. (--custom-megatron-init-path)"""


@hookspec("named", role="trainer", per="run", part=True)
def model_spec(hf_config: Any) -> Any:
    """8: an architecture, named by its Hugging Face model_type: how Megatron-core builds it, how its weights map."""


@hookspec("chain", role="trainer", per="run")
def weight_map(weight_map: WeightMap, folder: Path, model: str) -> WeightMap:
    """8: which tensors of a Hugging Face directory are which parameters, after the family has said so: rules for what
    `build_model` adds. `model` is the trainer's name ("actor", "critic"); `miles convert` asks of the actor."""


@hookspec("chain", role="trainer", per="run")
def transformer_config(fields: dict[str, Any], folder: Path, model: str) -> dict[str, Any]:
    """8: fields of Megatron's TransformerConfig that the run sets, before one is made of them: recipes. `folder` holds
    the model's config.json."""


@hookspec("chain", role="trainer", per="run")
def build_model(chunk: torch.nn.Module, spec: ModelSpec | None, folder: Path, model: str,
                weight_map: WeightMap | None) -> torch.nn.Module:
    """8: this rank's part of a model (of each virtual stage), neither wrapped nor filled yet: add modules, freeze.
    Parameters with an attribute `clip_group`, a name, are clipped by themselves and stay out of the norm; an attribute
    `lr_mult` is a factor of their learning rate. The trainer fsdp gives a plugin that provides `hf-modules` the whole
    module of transformers, filled and not sharded yet, with None for the spec and the map."""


@hookspec("gather", role="trainer", per="micro-batch")
def embedding_rows(sample: Sample, chunk: torch.nn.Module, folder: Path) -> dict[int, torch.Tensor]:
    """7: rows [n, H] in place of the embeddings of n tokens of a sample, by the position of the first; wider ones where
    the family's layers take them apart. Asked on ranks that hold the embedding, which is in `chunk`. Gradients go back
    through the rows: what a plugin makes them with is a module that it adds to the chunk in `build_model`, whose
    parameters `weight_map` names, and it trains as the rest does. With sequence parallelism a rank uses a part of the
    rows, so those parameters say `sequence_parallel`. Their number is "embedding_rows:PLUGIN" of `config.stated`, from
    the hook `derive`: the memory plan counts them. `folder` is where the model that computes has its config.json."""


@hookspec("gather", role="trainer", per="micro-batch")
def rope_positions(sample: Sample, folder: Path) -> dict[int, torch.Tensor]:
    """7: positions [axes, n] by which the rope turns n tokens of a sample, by the place of the first; those of other
    tokens are their places. Asked on every rank. `folder` as for embedding_rows."""


@hookspec("gather", role="trainer", per="micro-batch")
def attention_blocks(sample: Sample, folder: Path) -> dict[int, int]:
    """7: how many tokens of a sample see one another, later ones too, by the place of the first: those of an image, in
    Gemma 3. Others see up to themselves, and a window hides what lies before it as ever. It is the core attention of
    layers without a mixer of their own that knows of them. Asked on every rank. `folder` as for embedding_rows."""


@hookspec("named", role="driver", per="command")
def convert(source: Path, out: Path) -> str:
    """`miles convert NAME SRC OUT`: a Hugging Face directory becomes another, with the plugin's options as flags; OUT
    appears when it is complete. Returns what was written, in words."""
