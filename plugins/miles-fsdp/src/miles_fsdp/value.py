"""The head of a model that says one number for each position."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from miles_core.errors import CheckpointError

HEAD, BIAS = "score.weight", "score.bias"
"""Names on disk: the head is that of transformers' AutoModelForSequenceClassification with one label. Its
AutoModelForTokenClassification has the bias as well."""
STD = 0.02
"""Of a fresh head's weights."""


def head_of(folder: Path, size: int, seed: int, *, fresh: bool) -> torch.nn.Linear:
    """[1, size] of a Hugging Face directory.

    Args:
        fresh: the folder is a policy's and need not have a head: then it is drawn from N(0, STD^2) by the seed.

    Raises:
        CheckpointError: no head there, and none may be made up; or one with a bias, which values here do not have.
    """
    weight, bias = _stored(folder, HEAD), _stored(folder, BIAS)
    if bias is not None and bias.any():
        raise CheckpointError("the value head has a bias, and a critic's values are without", who=str(folder),
                              got=f"{BIAS} = {bias.tolist()}", code="fsdp-value-head-bias",
                              fix=f"take {BIAS} out of the files: the critic has to learn that much again")
    if weight is None and not fresh:
        raise CheckpointError("the checkpoint has no value head", got=f"no tensor {HEAD}", who=str(folder),
                              code="fsdp-value-head-missing", fix="name a checkpoint that has one, or leave it out to "
                              "start from --hf-checkpoint with a new head")
    if weight is None:
        weight = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * STD
    head: torch.nn.Linear = torch.nn.utils.skip_init(torch.nn.Linear, size, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def _stored(folder: Path, name: str) -> torch.Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 - no mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
