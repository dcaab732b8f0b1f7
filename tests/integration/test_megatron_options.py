"""Every option of Megatron-core that a run accepts changes what is built or computed, or the run says that it does not.

The options are those of the installed Megatron-core, each with another value than its default; what becomes of one is
refused, announced by the plan, refused by the trainer, warned of, without a difference to what the model has anyway, or
seen in the figures of a step, the weights after it or the modules. What is left is listed with the reason.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_megatron.checks import HERE
from miles_megatron.flags import taken
from miles_megatron.surface import surface

from miles_core.build import trainer_part
from miles_core.errors import MilesError
from miles_core.plugins.plan import Plan, prepare
from miles_core.types import Batch, Group, Prompt, Rank, Sample, Status

DENSE, MIXTURE = [], ["--hf-checkpoint", "examples/arithmetic/tiny-qwen3-moe"]
VALUES = {"pipeline_model_parallel_layout": "EttttL", "recompute_modules": "mlp", "offload_modules": "core_attn",
          "cp_comm_type": "a2a", "attention_backend": "local", "moe_layer_freq": "1", "moe_expert_capacity_factor": "1",
          "config_logger_dir": "{folder}", "moe_router_load_balancing_type": "seq_aux_loss"}
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


@contextmanager
def stepped(plan: Plan) -> Iterator[tuple[dict[str, float], Any]]:
    """The metrics of a trainer's first step, and the trainer."""
    trainer = trainer_part(list(plan.selected), plan.config, Rank())
    try:
        trainer.load()
        trainer.take_batch(batch())
        trainer.score()
        trainer.advantage()
        yield trainer.step(0), trainer
    finally:
        trainer.close()


def step(plan: Plan) -> None:
    with stepped(plan):
        pass


def computed(plan: Plan) -> dict[str, object]:
    """What a first step computes, and of what: figures, weights after it, modules, configurations."""
    with stepped(plan) as (metrics, trainer):
        actor = trainer.models.actor
        kinds = (actor.settings, actor.wrapped[0].ddp_config, actor.optimizer.config)
        return {"figures": {key: value for key, value in metrics.items() if not key.startswith("perf/")},
                "weights": trainer.hashes(batch())["weights"], "modules": repr(actor.wrapped),
                "configurations": [{field.name: repr(getattr(kind, field.name)) for field in dataclasses.fields(kind)
                                    if not callable(getattr(kind, field.name))} for kind in kinds]}


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


def outcome(name: str, model: list[str], folder: Path, caplog, plain: dict[str, object]) -> str:
    """What becomes of an option. Any other error than one of Miles's is the test's."""
    caplog.clear()
    try:
        plan = planned(folder, *model, *(word.format(folder=folder) for word in another(name)))
        if name not in plan.config.surface("megatron") or any(name in note for note in plan.notes):
            return "announced, or an option of Miles's own"
        found = computed(plan)
    except MilesError as error:
        return "refused" if name in str(error) or name.replace("_", "-") in str(error) else f"refused: {error}"
    if any(name in record.getMessage() for record in caplog.records):
        return "warned of"
    different = [part for part in plain if found[part] != plain[part]]
    return {(): "what the model has anyway", ("configurations",): "read"}.get(tuple(different), "changes the step")


READ = {
    "who does what, and when": {
        "perform_initialization", "use_cpu_initialization", "deterministic_mode", "deallocate_pipeline_outputs",
        "recompute_granularity", "moe_layer_recompute", "config_logger_dir", "attention_backend",
        "moe_token_dispatcher_type", "use_distributed_optimizer",
        "overlap_param_gather", "overlap_grad_reduce", "align_param_gather", "check_for_large_grads", "bucket_size",
        "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split"},
    "precision that a run in float32 has": {
        "attention_softmax_in_fp32", "moe_router_dtype", "grad_reduce_in_fp32"},
    "of a loss or a decay that this run has not": {"moe_router_load_balancing_type", "apply_wd_to_qk_layernorm"},
}
"""What reaches Megatron-core, is read there, and changes no number of one step on one rank: why not."""


@pytest.mark.full
def test_every_option_acts_or_is_not_silent(tmp_path, caplog):
    """What reaches Megatron-core without a word and changes nothing that is computed is known by name."""
    caplog.set_level(logging.WARNING)
    plain = computed(planned(tmp_path, *MIXTURE))
    found = {field.name: outcome(field.name, MIXTURE, tmp_path, caplog, plain) for field in taken()}
    print(json.dumps(found, indent=1))
    assert {name for name, text in found.items() if text == "read"} <= set().union(*READ.values())
    assert {text for text in found.values()} >= {"changes the step", "refused", "warned of", "read"}


def test_a_closed_trainer_leaves_neither_models_nor_threads(tmp_path):
    others = set(os.listdir("/proc/self/task"))  # which end when they like

    def left():
        gc.collect()
        models = sum(type(one).__name__ == "LanguageModel" for one in gc.get_objects())
        return len(set(os.listdir("/proc/self/task")) - others), models

    plan = planned(tmp_path, *MIXTURE)
    for _ in range(2):  # the groups of a trainer live until the next one has its own, and the first has one fewer
        step(plan)
    before = left()
    step(plan)
    until = time.monotonic() + 10
    while (after := left()) != before and time.monotonic() < until:
        time.sleep(0.1)  # the kernel lists a thread that was waited for a moment longer
    assert after == before


@pytest.mark.parametrize(("flags", "word"), [
    ("--moe-router-load-balancing-type aux_los", "aux_los"),
    ("--moe-router-load-balancing-type sinkhorn", "sinkhorn"),
    ("--fp32-residual-connection", "fp32-residual-connection"),
    ("--overlap-param-gather-with-optimizer-step", "optimizer"),
])
def test_what_megatron_core_would_ignore_or_trip_over_is_refused_by_the_plan(flags, word, tmp_path):
    with pytest.raises(MilesError, match=word):
        planned(tmp_path, *MIXTURE, *flags.split())


@pytest.mark.parametrize(("flags", "said"), [
    ("--moe-router-load-balancing-type seq_aux_loss", {"seq_aux_loss"}),
    ("--moe-router-load-balancing-type aux_loss --no-moe-router-force-load-balancing", set()),
    ("--moe-expert-capacity-factor 1 --moe-router-force-load-balancing", {
        "moe_expert_capacity_factor", "moe_router_force_load_balancing"}),
])
def test_what_acts_otherwise_than_its_name_says_is_announced(flags, said, tmp_path):
    notes = planned(tmp_path, *MIXTURE, *flags.split()).notes
    assert {name for name in HERE if any(note.startswith(name) for note in notes)} == said


@pytest.mark.parametrize(("flags", "names"), [
    ("--moe-router-dtype fp64 --fp8-margin 2", {"moe_router_dtype", "fp8_margin"}),  # a dense model, no FP8
    ("--recompute-granularity selective --recompute-modules mlp --adam-eps 1e-7", set()),
    ("--moe-aux-loss-coeff 0.01 --moe-router-topk-limited-devices 1", {  # read before experts are looked for
        "moe_aux_loss_coeff", "moe_router_topk_limited_devices"}),
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
    "--qk-l2-norm", "--qk-clip", "--apply-residual-connection-post-layernorm", "--fp4-format e2m1", "--fp4 e2m1",
])
def test_another_architecture_is_refused_by_the_plan(flags, tmp_path):
    with pytest.raises(MilesError, match=flags.split()[0]):
        planned(tmp_path, *flags.split())
