"""The plugin: the trainer and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.config import option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miles_core.columns import Columns
    from miles_core.config import RunConfig
    from miles_core.plugins.bind import Hooks
    from miles_core.plugins.select import Selected
    from miles_core.stages.step import Trainer
    from miles_core.types import Rank


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """How the module computes and what is kept of it on the device."""

    attn_implementation: str = option(
        "packed", "packed: by the boundaries of samples, where the architecture allows it, on a GPU torch's flash "
        "attention. Others are transformers': sdpa, eager, flash_attention_2 and whatever is installed.",
        flags=("--attn-implementation",))
    gradient_checkpointing: bool = option(
        False, "Keep only each layer's input of a forward pass, and compute the layer again in the backward pass.",
        flags=("--gradient-checkpointing",))
    torch_compile: bool = option(
        False, "Compile each layer of text with torch.compile: norms, ropes, gates and sums become a few kernels. The "
        "first steps take half a minute longer.", flags=("--torch-compile",))
    torch_compile_backend: Literal["inductor", "aot_eager", "eager"] = option(
        "inductor", "Of --torch-compile. The others compile nothing, and show whether layers can be traced.",
        flags=("--torch-compile-backend",))
    context_parallel_size: int = option(
        1, "Ranks that share each sample's rows, by an all-to-all over heads around attention (Ulysses).")
    tensor_parallel_size: int = option(
        1, "Ranks that share the projections of each layer, by the plan that transformers has of the architecture.")
    cpu_offload: bool = option(
        False, "Keep parameters, gradients and optimizer state in host memory; the optimizer runs there.",
        flags=("--fsdp-cpu-offload",))
    muon_momentum: float = option(
        0.95, "With --optimizer muon: decay of the momentum of matrices.", within=(0, 1), flags=("--muon-momentum",))
    muon_use_nesterov: bool = option(
        False, "Orthogonalize what the next momentum would be (Nesterov).", flags=("--muon-use-nesterov",))
    muon_num_ns_steps: int = option(
        5, "Newton-Schulz steps that orthogonalize a matrix.", within=(1,), flags=("--muon-num-ns-steps",))
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option(
        "spectral", "An orthogonal matrix is multiplied by the root of this: its larger size, outputs / inputs, or the "
        "latter, at least 1.", flags=("--muon-scale-mode",))
    muon_extra_scale_factor: float = option(
        1.0, "A further factor; with spectral and 0.2 a matrix moves about as far as by AdamW.",
        flags=("--muon-extra-scale-factor",))
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] | None = option(
        None, "Newton-Schulz steps in bfloat16, in TF32 where the GPU has it, or in float32; default: medium where the "
        "run is in bfloat16, else highest.", flags=("--muon-fp32-matmul-prec",))


class Fsdp:
    """Trains the Hugging Face module of any causal language model, sharded by PyTorch's FSDP2."""

    hookspecs = "miles_fsdp.hookspecs"
    provides = ("trainer:fsdp:transformers",)
    conflicts = ("fp8", "int4-qat", "mtp")

    def __init__(self, options: FsdpOptions):
        self._options = options

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Nothing follows, once what this trainer would leave without effect is refused."""
        from miles_local.muon_options import MUON

        from miles_fsdp.refusals import refuse

        ours, muon = config.perf.trainer == "fsdp", config.optimizer.optimizer in MUON
        if ours:
            refuse(config, self._options)
        if not ours and (keys := _set(config, "fsdp.")):
            note(f"{keys}: no effect, as the trainer is {config.perf.trainer} (--trainer fsdp)")
        elif not muon and (keys := _set(config, "fsdp.muon_")):
            note(f"{keys}: no effect, as the optimizer is {config.optimizer.optimizer} (--optimizer muon)")
        return config

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
        """No pass for old log-probs that the only step of a rollout computes itself."""
        from miles_core.plugins.one_pass import one_pass
        from miles_fsdp.on_policy import check_on_policy

        if config.perf.trainer != "fsdp":
            return config
        if config.algorithm.true_on_policy_mode:
            check_on_policy(config)
        return one_pass(config, note, plugins)

    @hookimpl
    def plan_lines(self, config: RunConfig, plugins: Sequence[Selected]) -> Iterable[tuple[str, str]]:
        """Ranks, micro-batches, and the memory of what is sharded."""
        from miles_fsdp.memory import lines

        frozen = any("frozen-base" in one.manifest.provides for one in plugins)
        images = any(offer.hook == "forward_inputs" for one in plugins for offer in one.manifest.offers)
        return lines(config, self._options, frozen=frozen, images=images) if config.perf.trainer == "fsdp" else []

    @hookimpl(name="fsdp")
    def trainer(self, config: RunConfig, hooks: Hooks, columns: Columns, rank: Rank) -> Trainer:
        """The trainer "fsdp"."""
        from miles_fsdp.trainer import FsdpTrainer

        return FsdpTrainer(config, hooks, columns, rank, self._options)


def _set(config: RunConfig, prefix: str) -> str:
    """The options of a prefix that somebody has set."""
    return ", ".join(key for key in config.origin if key.startswith(prefix))
