"""Make the checkpoints of the arithmetic example: random weights, then `miles run sft.toml`.

    python examples/arithmetic/make_models.py [tiny-qwen3] [tiny-qwen3-moe] [tiny-qwen3-moe-128]

Run it from the repository's root. Each takes about three minutes on two cores and replaces the folder of its name. The
data hold systematic mistakes on purpose (make_data.py), so that the models answer in the right form and are often
wrong: something for reinforcement learning to do. The last one, whose sizes are multiples of 128 as FP8 kernels want
them, is kept in bfloat16.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORK = Path("runs/models")
SEED = 0


def random_checkpoint(name: str, folder: Path) -> None:
    """A Hugging Face directory with seeded random weights of the architecture in NAME.json, and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    constants = json.loads((HERE / f"{name}.json").read_text())
    config = AutoConfig.for_model(constants.pop("model_type"), **constants)
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    subprocess.run([sys.executable, HERE / "make_tokenizer.py", folder], check=True)


def in_bfloat16(folder: Path) -> None:
    """Halve a checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(torch.bfloat16).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Make the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3-moe-128"])
    for name in parser.parse_args().names:
        shutil.rmtree(WORK, ignore_errors=True)
        random_checkpoint(name, WORK / "random")
        subprocess.run([Path(sys.executable).with_name("miles"), "run", HERE / "sft.toml"], check=True)
        target = HERE / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(WORK / "trained", target)
        if name.endswith("-128"):
            in_bfloat16(target)
        print(f"wrote {target}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
