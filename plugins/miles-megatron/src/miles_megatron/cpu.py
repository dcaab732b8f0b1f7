"""Megatron-core where CUDA or Transformer Engine is absent: its source is patched while it is imported.

Nothing of torch is patched and nothing on disk is changed. A finder in front of `sys.meta_path` (finder.py) reads each
`megatron.core` module, applies the rules below and compiles the result, so that line numbers and tracebacks stay those
of the installed files. Modules that no rule touches keep their bytecode cache.

A rule is a line of a table: what it looks for, what it writes instead, when it applies and why. The table is for
megatron-core 0.16.1; a test per rule shows that what it patches is still there.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import queue
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from miles_local import rendezvous

from miles_core.errors import ConfigError
from miles_core.types import Rank
from miles_megatron import finder

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_ALONE = Rank()
_left = False
"""From `leave` until the next `process_group`."""
_HERE = f"__import__('sys').modules[{__name__!r}]"


def no_cuda() -> bool:
    """No GPU that torch can use."""
    return not torch.cuda.is_available()


def no_transformer_engine() -> bool:
    """Transformer Engine is not installed."""
    return importlib.util.find_spec("transformer_engine") is None


def no_fused_adam() -> bool:
    """Neither Transformer Engine nor Apex: Megatron's optimizers then wrap torch.optim.AdamW."""
    return no_transformer_engine() and importlib.util.find_spec("apex") is None


def always() -> bool:
    """On every machine."""
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """One adaptation.

    Args:
        name: for messages and tests.
        pattern: regular expression over the source of a module.
        replacement: as in `re.sub`.
        when: the condition under which the rule applies.
        why: what fails without it.
        module: the only module it looks at; None for all of megatron.core.
    """

    name: str
    pattern: re.Pattern[str]
    replacement: str
    when: Callable[[], bool]
    why: str
    module: str | None = None

    def applies(self, module: str) -> bool:
        return self.module in (None, module) and self.when()


RULES = (
    Rule("device literal", re.compile(r"""device\s*=\s*(['"])cuda\1"""), 'device="cpu"', no_cuda,
         "tensors are made with device='cuda' by optimizers, gradient clipping and schedules"),
    Rule("current device", re.compile(r"torch\.cuda\.current_device\(\)"), "torch.get_default_device()", no_cuda,
         "it is the device= of nearly every buffer, beginning with the rotary embedding"),
    Rule("tensor type", re.compile(r"""(['"])torch\.cuda\.(\w+Tensor)\1"""), r'"torch.\2"', no_cuda,
         "DistributedOptimizer, Float16Optimizer and clip_grads compare param.type() with the names of CUDA types"),
    Rule("device calls", re.compile(r"torch\.cuda\.(?:synchronize|empty_cache|set_device)\("), f"{_HERE}.nothing(",
         no_cuda, "pipeline p2p and checkpoints synchronise the device"),
    Rule("get generator", re.compile(r"torch\.cuda\.(?:random\.)?get_rng_state\("), f"{_HERE}.get_rng_state(", no_cuda,
         "the RNG tracker reads the CUDA generator; without CUDA it tracks the CPU's"),
    Rule("set generator", re.compile(r"_lazy_call\(cb\)"), f"{_HERE}.set_rng_state(new_state)", no_cuda,
         "the RNG tracker sets the CUDA generator lazily, which without CUDA means never",
         "megatron.core.tensor_parallel.random"),
    Rule("seed", re.compile(r"torch\.cuda\.manual_seed\("), "torch.manual_seed(", no_cuda,
         "model_parallel_cuda_manual_seed seeds the generator that the tracker holds"),
    Rule("generator warning", re.compile(r"if not torch\.all\(cpu_rng_state == torch\.get_rng_state\(\)\)\.item\(\):"),
         "if False:", no_cuda, "it warns at each draw, since here the tracked generator is the CPU's",
         "megatron.core.tensor_parallel.random"),
    Rule("streams", re.compile(r"torch\.cuda\.(?:Stream|Event|current_stream|default_stream|stream)\("),
         f"{_HERE}.Inert(", no_cuda, "the alltoall dispatcher and DDP order their work on side streams"),
    Rule("tensor.cuda()", re.compile(r"(?<!torch)\.cuda\([^()]*(?:\(\))?[^()]*\)"), ".cpu()", no_cuda,
         "context parallelism slices rope on the device; the optimizer moves its state"),
    Rule("pinned memory", re.compile(r",\s*pin_memory=True"), "", no_cuda, "pinning needs CUDA"),
    Rule("split sizes", re.compile(r"(    if torch\.is_tensor\(tensor\) and tensor\.is_cuda:\n)"),
         r"    if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:\n        return tensor.numpy()\n\1",
         no_cuda, "a tensor that is on the CPU already stays one where all_to_all_single wants integers (EP > 1)",
         "megatron.core.transformer.moe.moe_utils"),
    Rule("router gemm", re.compile(r"(        te_general_gemm,\n.*?except ImportError:\n)    HAVE_TE = False", re.S),
         r"\1    HAVE_TE = False\n    te_general_gemm = None", no_transformer_engine,
         "an upstream fault: the name stays undefined without Transformer Engine, so every router raises NameError",
         "megatron.core.transformer.moe.moe_utils"),
    Rule("bias of a frozen weight", re.compile(r"return grad_input, None, None, None, None"),
         "bias = grad_output.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None\n"
         "        return grad_input, None, bias, None, None", always,
         "an upstream fault: the bias of a layer whose weight is frozen has no gradient, and stays as it is",
         "megatron.core.tensor_parallel.layers"),
    Rule("gate of a cut group", re.compile(r"query = query\[:, :, idx \* size : \(idx \+ 1\) \* size, :\]"),
         r"\g<0>" "\n            if output_gate:\n"
         "                gate = gate.reshape(*gate.shape[:2], -1, self.hidden_size_per_attention_head)\n"
         "                gate = gate[:, :, idx * size : (idx + 1) * size]", always,
         "an upstream fault: with more tensor-parallel ranks than keys, the gate stays that of a whole group's queries",
         "megatron.core.transformer.attention"),
    Rule("padding of a bias", re.compile(r"routing_map & \(~padding_mask\)"),
         "routing_map & ~padding_mask.unsqueeze(-1)", always,
         "an upstream fault: a mask of tokens meets one of tokens by experts, whose shapes do not fit",
         "megatron.core.transformer.moe.router"),
    Rule("tokens of a router loss", re.compile(r"valid_token_count=local_num_tokens"),
         "valid_token_count=total_num_tokens", always,
         "an upstream fault: its gradient, a sum over tensor- and context-parallel ranks, is too small by their number",
         "megatron.core.transformer.moe.router"),
    Rule("z loss over ranks", re.compile(r"(self\.config\.moe_z_loss_coeff) / self\.tp_cp_group\.size\(\)"), r"\1",
         always,
         "an upstream fault: the same, once more; and ranks have unequal numbers of tokens that are no padding",
         "megatron.core.transformer.moe.router"),
    Rule("tokens of a mask", re.compile(r"(local|global)_tokens_per_expert\.sum\(\) / topk"),
         r"\1_tokens_per_expert.sum().clamp(min=topk) // topk", always,
         "an upstream fault: a micro-batch that is all padding would divide 0 by 0; and a fused loss wants an integer",
         "megatron.core.transformer.moe.moe_utils"),
    Rule("latent projections", re.compile(
            r"assert HAVE_TE, \"TransformerEngine is required for MoE latent projections\.\"\n"),
         f"TELinear = {_HERE}.latent_projection(self.config)\n", always,
         "Megatron makes them of Transformer Engine alone, whatever the model's other layers are made of",
         "megatron.core.transformer.moe.moe_layer"),
    Rule("environment of attention", re.compile(r"os\.environ\[env_variable_name\] = str\(expected_value\)"), "pass",
         no_transformer_engine, "Transformer Engine alone reads it; a variable that the trainer's thread adds may move "
         "the environment away from C code in the driver's thread that looks through it, which ends the process",
         "megatron.core.models.common.language_module.language_module"),
    Rule("checkpoint writers", re.compile(r"mp\.get_context\(\"(?:fork|spawn)\"\)"), f"{_HERE}.InProcess", always,
         "forking beside gloo, OpenMP or CUDA threads is unsafe and slow, and hangs for ever if psutil is missing",
         "megatron.core.dist_checkpointing.strategies.filesystem_async"),
    Rule("garbage while writing", re.compile(r"    @_disable_gc\(\)\n"), "", always,
         "the writer is no forked process here but may be a thread, and training needs the collector meanwhile",
         "megatron.core.dist_checkpointing.strategies.filesystem_async"),
    Rule("views while planning", re.compile(r"return ten\.clone\(\) if is_view else ten"), "return ten", always,
         "all views would be copied at once; checkpoint_write.py copies each when it is written or staged",
         "megatron.core.dist_checkpointing.strategies.filesystem_async"),
    Rule("compiler", re.compile(r"jit_fuser = torch\.compile\n"), "jit_fuser = noop_decorator\n", no_cuda,
         "torch.compile as a decorator imports dynamo and inductor (1.4 CPU s, 70 MiB), and compiles at the first step",
         "megatron.core.jit"),
    Rule("sharded by torch", re.compile(
            r"(    )from (?:torch\.distributed\.(?:_tensor|fsdp)|megatron\.core\.distributed\.fsdp\.src\.megatron_fsdp)"
            r" import [^(\n]+\n"), r'\1raise ImportError("left out: miles does not train with FSDP")\n',
         no_cuda,
         "Megatron works without DTensor and FSDP, which import half a second of torch and 40 MiB for nothing"),
    Rule("FSDP planner", re.compile(r"\nfrom torch\.distributed\.checkpoint import default_planner\n"), "\n", no_cuda,
         "one function of FSDP's wants it; torch.distributed.checkpoint then waits until a run loads or saves",
         "megatron.core.transformer.fsdp_dtensor_checkpoint"),
    Rule("C++ extensions", re.compile(r"\nfrom torch\.utils(?: import cpp_extension|\.cpp_extension import .*)\n"),
         "\n", no_cuda, "allocators for CUDA are built with it, and it imports setuptools (0.1 CPU s)"),
    Rule("tensorboard", re.compile(r"(    )from torch\.utils\.tensorboard import SummaryWriter\n"),
         r'\1raise ImportError("left out: miles keeps its own metrics")\n', no_cuda,
         "Megatron's timers could write there, and importing it costs 0.1 s", "megatron.core.timers"),
    Rule("wandb", re.compile(r"(    )import wandb(?: .*)?\n"),
         r'\1raise ImportError("left out: miles keeps its own metrics")\n', always,
         "Megatron's timers and inference could write there, and importing it costs half a second"),
    Rule("adam", re.compile(r"adam_cls = torch\.optim\.AdamW if"),
         "from miles_megatron.adam import AdamW\n\n                adam_cls = AdamW if", no_fused_adam,
         "torch's own loops over the parameters, and imports dynamo (1 CPU s, 70 MiB)", "megatron.core.optimizer"),
    Rule("adam step kept", re.compile(r"for key in dst_tensors:\n(\s+)dst_tensors\[key\]\.copy_\(tensors\[key\]\)"),
         r'for key in dst_tensors.keys() - {"step"}:\n\1dst_tensors[key].copy_(tensors[key])', no_fused_adam,
         "an upstream fault: the loader drops torch AdamW's 'step' and then asks for it (KeyError)",
         "megatron.core.optimizer.distrib_optimizer"),
    Rule("adam step shared", re.compile(r's\["step"\] = step\n'), 's["step"] = step.clone()\n', no_fused_adam,
         "an upstream fault: all parameters get ONE step tensor, which then counts once per parameter: after a resume "
         "the bias correction is silently wrong", "megatron.core.optimizer.distrib_optimizer"),
)  # fmt: skip


def patched(module: str, source: str) -> str:
    """The source of a megatron.core module with every rule that applies.

    Raises:
        ConfigError: a rule for this very module finds nothing, so this is not the megatron-core it was written for.
    """
    for rule in RULES:
        if rule.applies(module):
            source, count = rule.pattern.subn(rule.replacement, source)
            if rule.module is not None and count == 0:
                raise ConfigError(f"the adaptation {rule.name!r} finds nothing to adapt in {module}",
                                  code="megatron-adaptation-failed", who="miles_megatron.cpu",
                                  fix="install megatron-core 0.16.1")
    return source


def nothing(*_args, **_kwargs) -> None:
    """Stands for calls that only concern a device."""


def get_rng_state(*_args, **_kwargs) -> torch.Tensor:
    """The CPU generator's state, for torch.cuda's."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Set the CPU generator's state, for torch.cuda's."""
    torch.set_rng_state(state)


def latent_projection(config: TransformerConfig) -> type:
    """The linear layer between hidden states and the latents of experts, of the set that the config names."""
    if config.transformer_impl != "local":
        from megatron.core.extensions.transformer_engine import TELinear

        return TELinear
    from miles_megatron.latent_attention import Projection

    return Projection


class Inert:
    """A stream or event where there is no device: every method returns it, and `with` does nothing."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __getattr__(self, name: str):
        return lambda *_args, **_kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert)

    def __hash__(self) -> int:
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *_exc) -> bool:
        return False


class InProcess:
    """What the checkpoint writer wants of a multiprocessing context, in this process and one after the other."""

    Queue = JoinableQueue = queue.Queue

    @classmethod
    def Manager(cls) -> type[InProcess]:
        return cls

    class Process:
        def __init__(self, target: Callable, kwargs: dict):
            self.target, self.kwargs = target, kwargs

        def start(self) -> None:
            self.target(**self.kwargs)

        def join(self) -> None:
            pass


def install() -> None:
    """Patch megatron.core from now on; call it before the first import of megatron.core. Idempotent.

    Raises:
        ConfigError: megatron.core was imported before.
    """
    if not finder.installed() and "megatron.core" in sys.modules:
        raise ConfigError("megatron.core was imported before miles could adapt it", code="megatron-imported-too-early",
                          who="miles_megatron.cpu.install",
                          fix="import miles_megatron (or call install()) before megatron.core")
    finder.install()
    # Megatron warns of every optional package that a CPU host lacks and torch of names that Megatron still uses.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # Megatron's checkpoints go through older names of torch's: nothing that a user could fix.
    for source in (r"megatron\.core\.dist_checkpoint", r"torch\.distributed\.checkpoint"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=source)


def device() -> torch.device:
    """Where this rank computes: its GPU (see `process_group`), or the CPU."""
    return torch.device("cpu") if no_cuda() else torch.device("cuda", torch.cuda.current_device())


def deterministic(wanted: bool) -> None:
    """Whether torch takes deterministic kernels alone, and refuses operations that have none.

    Memory that is not written to stays as it is: filling it would hide no difference and cost time.
    """
    if no_cuda():  # the same for kernels; the other function imports dynamo and inductor (0.6 CPU s, 70 MiB)
        torch.set_deterministic_debug_mode("error" if wanted else "default")
    else:
        torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = not wanted


def process_group(rank: Rank = _ALONE, timeout: float | None = None) -> None:
    """Join the trainer's processes; one process alone needs no port. Keeps a group that already exists.

    Args:
        timeout: seconds after which a collective that some process does not join is an error.

    Raises:
        ConfigError: the rank's GPU is not there.
    """
    if dist.is_initialized():
        return
    global _left
    if _left:
        gc.collect()  # what only cycles refer to, of which each process group that was left has threads
        _left = False
    _take_gpu(rank)
    rendezvous.join(rank, timeout)


def _take_gpu(rank: Rank) -> None:
    """Compute on the rank's GPU from now on, if there are GPUs or ought to be."""
    seen = 0 if no_cuda() else torch.cuda.device_count()
    if not (seen or rank.gpu):
        return
    if rank.local >= seen:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(f"no GPU {rank.local} for it", who=f"trainer rank {rank.index} on {platform.node()}",
                          got=f"{seen} GPUs that torch sees there, CUDA_VISIBLE_DEVICES "
                              f"{'not set' if visible is None else repr(visible)}", code="rank-without-gpu",
                          fix="look at nvidia-smi and torch.cuda.is_available() there, or ask for fewer GPUs")
    torch.cuda.set_device(rank.local)


def leave() -> None:
    """Leave all process groups; where the process serves another trainer, `process_group` first ends their threads."""
    global _left
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _left = True


def initialize(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    seed: int = 1234,
) -> None:
    """Make Megatron's process groups for a layout and seed its generators; again with another layout starts afresh.

    Without a process group one of this process alone is made; `process_group` joins several before.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
    """
    install()
    process_group()
    from megatron.core import parallel_state, tensor_parallel

    world = dist.get_world_size()
    dense, sparse = tensor * pipeline * context, (expert_tensor or tensor) * pipeline * expert
    if world % dense or world % sparse:
        raise ConfigError(
            f"{world} processes do not divide by the layout", code="processes-not-divisible",
            got=f"tensor {tensor} x pipeline {pipeline} x context {context}; experts {expert_tensor or tensor} x "
            f"{pipeline} x {expert}",
            fix="choose sizes whose products divide the number of processes",
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()  # its groups stay, each with threads
        for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
            dist.destroy_process_group(group)
        gc.collect()
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual_pipeline, context_parallel_size=context, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
