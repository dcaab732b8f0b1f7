"""Every option of Megatron-core that a run accepts changes what is built or computed, or the run says that it does not.

The options are those of the installed Megatron-core, each with another value than its default; what becomes of one is
refused, announced by the plan, refused by the trainer with the option's name, read by what runs, or warned of.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from miles_megatron.flags import taken
from miles_megatron.surface import surface

from miles_core.build import trainer_part
from miles_core.errors import MilesError
from miles_core.plugins.plan import Plan, prepare
from miles_core.types import Batch, Group, Prompt, Rank, Sample, Status

DENSE, MIXTURE = [], ["--hf-checkpoint", "examples/arithmetic/tiny-qwen3-moe"]
VALUES = {"pipeline_model_parallel_layout": "EttttL", "recompute_modules": "mlp", "offload_modules": "core_attn",
          "cp_comm_type": "a2a", "attention_backend": "local", "moe_layer_freq": "1", "moe_expert_capacity_factor": "1",
          "config_logger_dir": "{folder}"}
"""Of options whose type does not say what to write."""


def batch() -> Batch:
    """Two groups of two samples of 16 tokens."""
    draw = np.random.default_rng(0)

    def sample(prompt: Prompt, index: int) -> Sample:
        columns = {"tokens": draw.integers(0, 250, 16).astype(np.int32), "loss_mask": np.ones(14, np.uint8),
                   "versions": np.ones(14, np.int32), "rollout_log_probs": np.full(14, -5.0, np.float32)}
        return Sample(prompt, index, columns, 14, status=Status.COMPLETED, reward=float(index))

    prompts = [Prompt(number, number, "", (0, 1)) for number in range(2)]
    return Batch(0, [Group(prompt, [sample(prompt, i) for i in range(2)]) for prompt in prompts])


def planned(folder: Path, *words: str) -> Plan:
    return prepare(Path("examples/demo.toml"), ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", *words] + [
        "--run-dir", str(folder / "run"), "--save", str(folder / "saved"), "--load", str(folder / "saved")])


def step(plan: Plan) -> float:
    """The gradient's norm of a trainer's first step."""
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    try:
        trainer.load()
        trainer.take_batch(batch())
        trainer.score()
        trainer.advantage()
        return trainer.step(0)["train/grad_norm"]
    finally:
        trainer.close()
        for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron-core notes the attention's backend there
            os.environ.pop(f"NVTE_{name}_ATTN", None)


def another(name: str) -> list[str]:
    """The flag of an option, with a value other than its default."""
    field, flag = surface()[name], name.replace("_", "-")
    kind = field.type.split(" | ")[0]
    if kind == "bool" and name not in VALUES:
        return [f"--no-{flag}" if field.default else f"--{flag}"]
    if name in VALUES:
        return [f"--{flag}", VALUES[name]]
    number = field.default if isinstance(field.default, (int, float)) else 0
    plain = {"int": number + 1, "float": number + 0.25, "dtype": "bf16", "list[int]": 1}
    chosen = next((c for c in kind[7:-1].split("|") if c != field.default), "x") if kind[:7] == "choice[" else "x"
    return [f"--{flag}", str(plain.get(kind, chosen))]


def outcome(name: str, model: list[str], folder: Path, caplog, plain: float) -> str:
    """What becomes of an option."""
    caplog.clear()
    try:
        plan = planned(folder, *model, *(word.format(folder=folder) for word in another(name)))
        if name not in plan.config.surface("megatron") or any(name in note for note in plan.notes):
            return "announced, or an option of Miles's own"
        norm = step(plan)
    except MilesError as error:
        return "refused" if name in str(error) or name.replace("_", "-") in str(error) else f"refused: {error}"
    if norm != plain:
        return "changes the step"
    return "warned of" if any(name in record.getMessage() for record in caplog.records) else "read"


@pytest.mark.slow
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_every_option_is_used_or_not_silent(model, tmp_path, caplog):
    """Megatron-core's fields are read where they act: an option that is neither refused nor warned of has been."""
    caplog.set_level(logging.WARNING)
    plain = step(planned(tmp_path, *model))
    found = {field.name: outcome(field.name, model, tmp_path, caplog, plain) for field in taken()}
    print(json.dumps(found, indent=1))
    assert {text for text in found.values()} >= {"changes the step", "refused", "warned of", "read"}


@pytest.mark.parametrize(("flags", "names"), [
    ("--moe-router-dtype fp64 --fp8-margin 2", {"moe_router_dtype", "fp8_margin"}),  # a dense model, no FP8
    ("--recompute-granularity selective --recompute-modules mlp --adam-eps 1e-7", set()),
])
def test_options_without_an_effect_are_named(flags, names, tmp_path, caplog):
    step(planned(tmp_path, *flags.split()))
    said = " ".join(record.getMessage() for record in caplog.records if "no effect" in record.getMessage())
    assert {name for name in surface() if f"megatron.{name} " in said} == names


@pytest.mark.parametrize("flags", [
    "--nccl-ub", "--cpu-offloading-num-layers 1", "--fused-single-qkv-rope",
])
def test_options_that_megatron_core_cannot_do_here_end_with_their_names(flags, tmp_path):
    with pytest.raises(MilesError, match=flags.split()[0][2:].replace("-", "_")):
        step(planned(tmp_path, *flags.split()))


@pytest.mark.parametrize("flags", [
    "--qk-l2-norm", "--qk-clip", "--experimental-attention-variant dsa", "--dsa-indexer-n-heads 2",
    "--apply-residual-connection-post-layernorm", "--moe-latent-size 8", "--fp4-format e2m1", "--fp4 e2m1",
])
def test_another_architecture_is_refused_by_the_plan(flags, tmp_path):
    with pytest.raises(MilesError, match=flags.split()[0]):
        planned(tmp_path, *flags.split())
