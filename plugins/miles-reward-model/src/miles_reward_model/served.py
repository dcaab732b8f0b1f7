"""The folder that servers load: the reward model's own, or one of links beside which a bias of zeros stands.

SGLang 0.5.16 gives the head of a classifier a bias. Checkpoints of transformers have none, and it stays what it was
made with: another random number in every server, which would be in all its rewards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from miles_core.errors import CheckpointError

HEAD, BIAS, ADDED = "score.weight", "score.bias", "miles-score-bias.safetensors"
INDEX = "model.safetensors.index.json"


def served(model: Path, folder: Path) -> Path:
    """Where servers load a classifier from.

    Args:
        folder: for links and the bias, made anew where they are needed.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    import numpy
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

    places: dict[str, str] = {}
    classes = 1
    try:
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                places |= dict.fromkeys(file.keys(), path.name)
                if places.get(HEAD) == path.name:
                    classes = file.get_slice(HEAD).get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise CheckpointError("the reward model's weights cannot be read", code="reward-weights-unreadable",
                              got=str(error), who=str(model), fix="use a checkpoint that is whole") from error
    if HEAD not in places or BIAS in places:
        return model
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in model.resolve().iterdir():
        if path.name != INDEX:
            (folder / path.name).symlink_to(path)
    save_file({BIAS: numpy.zeros(classes, numpy.float32)}, folder / ADDED)
    index = {"metadata": {}, "weight_map": places | {BIAS: ADDED}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder
