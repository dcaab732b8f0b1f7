"""What megatron-core itself says to layouts, with process groups that only claim to have other members.

Reads a JSON list of cases from stdin and prints the list of verdicts: null, or {"at", "says", "where"}. A process of
its own, because groups and generators are global. `torch.distributed`'s "fake" backend lets one process be any rank of
any world; communication does nothing, so only what comes before the first exchange can be asked:

    groups     parallel_state.initialize_model_parallel
    batch      megatron.core.num_microbatches_calculator, which Megatron-LM divides batches with
    config     TransformerConfig
    build      the model of the first and of the last rank
    export     our weight map over every fused query-key-value matrix of the first rank
    forward    the first expert layer in training, as far as its checks
    schedule   forward_backward_func, as far as its first forward step
"""

from __future__ import annotations

import json
import sys
import traceback

import torch
import torch.distributed as dist
from miles_megatron import cpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

cpu.install()

from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel  # noqa: E402 - after install()
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from miles_megatron import model  # noqa: E402
from miles_megatron.ownership import hf_tensors  # noqa: E402
from miles_megatron.plugin import Megatron  # noqa: E402

STAGES = ("groups", "batch", "config", "build", "export", "forward", "schedule")


class Passed(Exception):
    """Every check of a stage is behind us."""


class Start:
    """The start of a trainer, stage by stage; each raises what refuses it."""

    def __init__(self, case):
        self.case, self.sizes = case, dict(case["sizes"])
        hf = AutoConfig.from_pretrained(case["checkpoint"])
        family = getattr(Megatron(), hf.model_type)(hf)
        self.spec, self.weight_map = family.model_spec(hf), family.weight_map(hf)

    def groups(self):
        begin(self.case["world"], 0, self.sizes)

    def batch(self):
        data = parallel_state.get_data_parallel_world_size()
        calculator = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
        self.micro_batches = calculator(self.case["batch"], self.case["micro_batch"], data, False, 0).get()

    def config(self):
        sequence_parallel, overrides = self.case["sequence_parallel"], self.case["overrides"]
        self.made = model.transformer_config(self.spec, overrides, sequence_parallel=sequence_parallel, **self.sizes)

    def build(self):
        stages = range(self.sizes["virtual_pipeline"]) if "virtual_pipeline" in self.sizes else [None]
        for rank in (self.case["world"] - 1, 0):
            begin(self.case["world"], rank, self.sizes)
            self.chunks = [model.build(self.made, self.spec, stage) for stage in stages]

    def export(self):
        rule = next(rule for rule in self.weight_map.rules if rule.join == "qkv")
        for name, parameter in self.chunks[0].named_parameters():
            if name.endswith("linear_qkv.weight"):
                hf_tensors(rule, parameter, self.weight_map)

    def forward(self):
        layer = next((part for part in self.chunks[0].modules() if isinstance(part, MoELayer)), None)
        if layer is not None:
            layer.router.register_forward_pre_hook(passed)
            layer.train()(torch.zeros(4, 1, self.made.hidden_size))

    def schedule(self):
        data = [iter(()) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=passed, data_iterator=data if len(data) > 1 else data[0], model=self.chunks,
            num_microbatches=self.micro_batches, seq_length=1, micro_batch_size=1, forward_only=True,
        )  # fmt: skip


def passed(*_args, **_kwargs):
    """Stands where the checks end."""
    raise Passed


def begin(world, rank, sizes):
    """Be one rank of a world."""
    end()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        sizes.get("tensor", 1), sizes.get("pipeline", 1), sizes.get("virtual_pipeline"),
        context_parallel_size=sizes.get("context", 1), expert_model_parallel_size=sizes.get("expert", 1),
        expert_tensor_parallel_size=sizes.get("expert_tensor"), create_gloo_process_groups=False,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def end():
    """Forget the world, whole or half made."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def verdict(case):
    """None, or the first refusal: the stage, the message, and where it was raised."""
    start = Start(case)
    for name in STAGES:
        try:
            getattr(start, name)()
        except Passed:
            continue
        except (AssertionError, RuntimeError, ValueError) as error:
            origin = error.__cause__ or error
            last = traceback.extract_tb(origin.__traceback__)[-1]
            return {"at": name, "says": str(error), "where": f"{last.filename.rpartition('/')[2]}:{last.lineno}"}
    return None


if __name__ == "__main__":
    answers = []
    for each in json.load(sys.stdin):
        try:
            answers.append(verdict(each))
        finally:
            end()
    print(json.dumps(answers))
