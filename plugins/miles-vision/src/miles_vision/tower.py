"""What sees, beside Megatron's language model: transformers' own modules, filled from the checkpoint and frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from miles_megatron import cpu
from miles_megatron.disk_names import carried
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPast

from miles_core.errors import CheckpointError
from miles_vision.prompts import names_of

if TYPE_CHECKING:
    from miles_megatron.specs import WeightMap

    from miles_core.types import Sample
    from miles_vision.seen import Seen

Stream = Iterator[tuple[str, torch.Tensor]]


class _Text(torch.nn.Module):
    """In the text model's place: embeds every token as zeros, and keeps what it is handed instead of computing on."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.width, self.dtype = width, dtype
        self.embedded = torch.empty(0)

    def get_input_embeddings(self) -> Any:
        return lambda tokens: torch.zeros(*tokens.shape, self.width, dtype=self.dtype, device=tokens.device)

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        self.embedded = inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def skeleton(folder: Path) -> Any:
    """A checkpoint's model as transformers has it, without weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


class Tower:
    """A checkpoint's model without its text model.

    Args:
        folder: with config.json and the tensors that `weight_map` carries.
        dtype: in which it computes.

    Raises:
        CheckpointError: the tensors are not those of the modules.
    """

    def __init__(self, folder: Path, weight_map: WeightMap, dtype: torch.dtype):
        whole = skeleton(folder)
        config, body, text = whole.config, whole.base_model, whole.get_decoder()
        self._text = _Text(config.get_text_config().hidden_size, dtype)
        for name, part in list(body.named_children()):
            inner = any(one is text for one in part.modules())
            # What sees is built once more, for buffers that are in no file.
            setattr(body, name, self._text if inner else type(part)(getattr(part, "config", config)))
        state = {name.removeprefix(f"{whole.base_model_prefix}."): tensor.to(dtype)
                 for name, tensor in carried(folder, weight_map)}
        try:
            body.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise CheckpointError("what reads images does not fit the model that config.json describes",
                                  code="vision-tensors-differ", got=" ".join(str(error).split())[:300], who=str(folder),
                                  fix="fetch the checkpoint again, or train it with --trainer fsdp") from error
        self.model = body.eval().requires_grad_(False).to(cpu.device())

    def rows(self, sample: Sample, seen: Seen) -> dict[int, torch.Tensor]:
        """See the hook embedding_rows."""
        if not names_of(sample.prompt, sample):
            return {}
        inputs = {name: one.to(cpu.device()) for name, one in seen.of_sample(self.model, sample).items()}
        tokens = inputs.pop("input_ids")
        places = (tokens == seen.placeholders[0]).nonzero()[:, 0]
        arguments = {name: one[..., None, :] if name.endswith("_ids") else one for name, one in inputs.items()}
        with torch.no_grad():
            self.model(input_ids=tokens[None], **arguments, use_cache=False)
        rows, self._text.embedded = self._text.embedded[0, places], torch.empty(0)
        runs = (places.diff(prepend=places.new_tensor([-2])) != 1).nonzero()[:, 0].tolist()
        sizes = [end - begin for begin, end in zip(runs, [*runs[1:], len(places)], strict=True)]
        return dict(zip(places[runs].tolist(), rows.split(sizes), strict=True))


def rope_positions(body: Any, sample: Sample, seen: Seen) -> dict[int, torch.Tensor]:
    """See the hook of that name.

    Args:
        body: with or without weights.
    """
    if not names_of(sample.prompt, sample) or not hasattr(body, "get_rope_index"):
        return {}
    return {0: seen.of_sample(body, sample)["position_ids"]}


def with_tower(stream: Stream, folder: Path, weight_map: WeightMap) -> Stream:
    """A stream to an engine, and behind it what the checkpoint has beside the text model: engines that were asleep have
    lost it, and some take nothing but all tensors."""
    device = torch.device("cpu")
    for name, tensor in stream:
        device = tensor.device
        yield name, tensor
    for name, tensor in carried(folder, weight_map):
        yield name, tensor.to(device)
