"""One causal language model of transformers, sharded: body, head, and whether its layers keep packed samples apart."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from miles_local import repairs  # noqa: F401 - models are built here
from miles_local.inputs import joined
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import Transpose
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging

from miles_core.columns import Packed
from miles_core.errors import CheckpointError, ConfigError
from miles_core.types import Sample
from miles_fsdp.attention import NAME, PACKED, Boundaries, attend_by
from miles_fsdp.lean import keep_less
from miles_fsdp.memory import stored_shapes
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.scored import Scored, Temperature
from miles_fsdp.server_kernels import attend
from miles_fsdp.tensor_parallel import split

logger = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # the run has a terminal of its own to fill

FARTHEST = 136
"""Tokens from which on no architecture shows anything new of what its attention sees."""
T = TypeVar("T")
Inputs = Callable[[Any, Sample], dict[str, torch.Tensor]]
Around = Callable[[Callable[[Packed], torch.Tensor], Packed], torch.Tensor]


class _Output(BaseModelOutput):
    """Hidden states; whatever else some body returns beside them is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Passed(torch.nn.Module):
    """In the body's place: its output is what the model is given. What else a head reads of a body is that body's."""

    def __init__(self, body: torch.nn.Module):
        super().__init__()
        self._body = (body,)  # a tuple hides it from torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"][0], name)

    def forward(self, input_ids: Any = None, inputs_embeds: torch.Tensor | None = None, **_: Any) -> Any:
        return _Output(last_hidden_state=inputs_embeds)


class _Reached(torch.autograd.Function):
    """Rows as they are. Backward, parameters that nothing has come to get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(one.shape, one.dtype) for one in parameters]  # their memory is given up before backward
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], *(gradients[0].new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.like)


class CausalModule(torch.nn.Module):
    """A module from transformers whose forward hands the trained rows' scores to a function.

    What needs whole parameters happens in there, since FSDP gathers them around it.

    What lies beside the text model, such as a vision tower, computes where a micro-batch has something to see. What
    ranks send must not depend on that: it is gathered with the module as a whole, and has a gradient from every
    micro-batch, if of zero.

    Args:
        attention: "packed" for the one of attention.py, where the architecture allows it; else the model's own.
        value_head: [1, H], of a model that is a body without a head of its own.
        inputs: the bound hook forward_inputs.
        backend: of torch.compile, for the layers of text; None: nothing is compiled.
    """

    def __init__(self, model: PreTrainedModel, temperature: Temperature, attention: str = PACKED,
                 value_head: torch.nn.Linear | None = None, inputs: Inputs | None = None, backend: str | None = None):
        super().__init__()
        self.model, self.temperature, self.value_head, self._inputs = model, temperature, value_head, inputs
        takes = inspect.signature(model.forward).parameters
        self.packs, self.partial = "position_ids" in takes, set[str]()
        self.boundaries = Boundaries()
        self._masked = model.config._attn_implementation
        if self.packs and attention == PACKED:
            attend_by(model, self.boundaries)
        if temperature.as_sampled:
            self.boundaries.attend = attend
        self._text = (model if inputs is None else model.get_decoder(),)  # a tuple hides it from torch
        for layer in self.text_layers() if backend else ():
            cast("Any", layer).forward = torch.compile(layer.forward, dynamic=True, backend=cast("Any", backend))
        if not backend:
            keep_less(model)
        if inputs is not None and "token_type_ids" in takes:  # tokens of an image see those after them
            self.pad()
        body, prefix = model.base_model, model.base_model_prefix
        inner: Any = getattr(model, "language_model", None)
        if body is model and hasattr(inner, "lm_head"):  # Llama 4 has the head in there: the body's passes rows on
            body, text, model = copy.copy(model), copy.copy(inner), inner
            text._modules = {**inner._modules, "lm_head": torch.nn.Identity()}
            body._modules = {**body._modules, "language_model": text}
        passed = model.base_model
        if body is model and hasattr(model, "lm_head"):  # Llama 4's text alone names a body that it has not
            body, passed, prefix = model.model, model.model, "model"
        head = copy.copy(model)  # the same parameters and code, but for the body
        head._modules = {**model._modules, prefix: _Passed(passed)}
        self._head, self._body = (head,), (body,)  # torch would take them for further models

    def forward(self, batch: MicroBatch, use: Callable[[Scored], T], around: Around | None = None) -> T:
        """
        Args:
            use: gets the trained rows and returns tensors; its result is this call's.
            around: the bound hook `microbatch`, of this pass's model.
        """
        def proceed(_: Packed) -> torch.Tensor:
            return self._hidden(batch)

        hidden = proceed(batch.packed) if around is None else around(proceed, batch.own())
        if seeing := [one for one in self.beside_text() if one.requires_grad]:
            hidden = cast("torch.Tensor", cast("Any", _Reached).apply(hidden, *seeing))
        index = batch.index[batch.mine] - batch.stretch.start
        return use(Scored(hidden[index], self._logits, batch, self.temperature,
                          None if self.value_head is None else self.value_head.weight))

    @property
    def reach(self) -> int:
        """Tokens of a sample that show whether others reach it: many where an architecture's own attention computes,
        since that may see means of 128 of them."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or FARTHEST
        return 5 if self.model.config._attn_implementation == NAME else min(FARTHEST, context)

    def text_layers(self) -> list[torch.nn.Module]:
        """Blocks that every micro-batch goes through."""
        text = set(self._text[0].modules())
        return [layer for layer in _blocks(self.model) if layer in text]

    def beside_text(self) -> list[torch.nn.Parameter]:
        """Parameters of a body that are not its text model's."""
        if self._inputs is None:
            return []
        text = set(map(id, self._text[0].parameters()))
        return [one for one in self.model.base_model.parameters() if id(one) not in text]

    def pad(self) -> None:
        """Lay samples side by side from now on, and mask what fills them up."""
        self.packs = False
        self.model.set_attn_implementation(self._masked)

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """[T, H] of this rank's rows."""
        body = self._body[0]
        if self.packs:
            self.boundaries.set(batch.lengths, batch.device, batch.context)
            tokens, positions = batch.tokens[None, batch.stretch], batch.positions[None, batch.stretch]
            arguments = {"input_ids": tokens, "position_ids": positions} | self._beside(batch)
            output = body(**arguments, use_cache=False)
            return cast("torch.Tensor", output.to_tuple()[0][0])
        tokens, mask = batch.padded()
        arguments = {"input_ids": tokens, "attention_mask": mask.long()} | self._beside(batch)
        output = body(**arguments, use_cache=False)
        return cast("torch.Tensor", output.to_tuple()[0][mask])

    def _beside(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """What the hook gives for each sample, laid out as their tokens are."""
        if self._inputs is None:
            return {}
        parts = [self._inputs(self.model, sample) for sample in batch.samples]
        names = dict.fromkeys(name for part in parts for name in part)
        values = {name: [part[name] for part in parts if name in part] for name in names}
        return {name: (self._laid_out(some) if name.endswith("_ids") else joined(some)).to(batch.device)
                for name, some in values.items()}

    def _laid_out(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """[..., L] of each sample -> [..., 1, sum of L], or [..., samples, longest] filled up with zeros."""
        if self.packs:
            return torch.cat(list(rows), -1)[..., None, :]
        longest = max(row.shape[-1] for row in rows)
        return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in rows], -2)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V], as the architecture makes them."""
        return cast("torch.Tensor", self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0])


def read(folder: str, options: FsdpOptions, dtype: torch.dtype, *, body: bool = False,
         images: bool = False) -> PreTrainedModel:
    """The module of a Hugging Face directory, without dropout.

    Args:
        body: without its output layer.
        images: of a model that reads them, what does, too.

    Raises:
        CheckpointError: the directory is none, lacks tensors, holds apart what its config.json ties, or is of an
            architecture that transformers does not have.
    """
    if not Path(folder, "config.json").is_file():
        raise CheckpointError("this is no Hugging Face directory", code="fsdp-source-unusable", who=folder,
                              got="no config.json", fix="name one; `miles convert dist-to-hf` makes it of a checkpoint")
    attention = None if options.attn_implementation == PACKED else options.attn_implementation
    try:
        parts = AutoConfig.from_pretrained(folder, local_files_only=True).sub_configs if images else ()
        kind: Any = AutoModel if body else AutoModelForCausalLM
        model: PreTrainedModel
        model, report = (AutoModelForImageTextToText if "vision_config" in parts else kind).from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise CheckpointError("transformers cannot build this model", code="fsdp-model-unbuildable", who=folder,
                              got=str(error).split("\n")[0], fix="look at its config.json and at "
                              "--attn-implementation, or train with --trainer megatron") from error
    if missing := sorted(report["missing_keys"]):  # transformers has made them up
        raise CheckpointError("tensors of the model that config.json describes are not in its files", who=folder,
                              got=f"{len(missing)} missing: {', '.join(missing[:3])}", code="fsdp-tensors-missing",
                              fix="use a complete checkpoint of this architecture")
    if apart := [name for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items()
                 if model.get_parameter(name) is not model.get_parameter(other)]:  # transformers has left it so
        raise CheckpointError("config.json ties tensors that differ in the files", code="fsdp-tied-tensors-differ",
                              got=", ".join(apart), who=folder, fix='write "tie_word_embeddings": false into its '
                              "config.json, or leave the tensor out of its files; engines would tie them")
    if (unread := sorted(report["unexpected_keys"])) and not body:
        logger.warning("%s has %d tensors that the model does not have, and that do not train: %s", folder, len(unread),
                       ", ".join(unread[:3]) + ", ..." * (len(unread) > 3))
    _turn_back(model, Path(folder))
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None  # a token of a sample is learnt from, also where it is what others fill up with
    return model.eval()


def _turn_back(model: PreTrainedModel, folder: Path) -> None:
    """What transformers turns, as files have its rows and columns the other way round, it leaves turned when it writes
    (Qwen3-VL's stacks of experts). Here the way back turns it again."""
    turns = [(conversion, each) for conversion in getattr(model, "_weight_conversions", None) or ()
             for each in getattr(conversion, "operations", ()) if isinstance(each, Transpose) and each.check_dims]
    stored = dict(itertools.chain.from_iterable(map(stored_shapes, folder.glob("*.safetensors")))) if turns else {}
    built = {name: [*one.shape] for name, one in model.named_parameters()} if turns else {}
    for conversion, turn in turns:
        sides = ((stored, conversion.source_patterns[0]), (built, conversion.target_patterns[0]))
        theirs, ours = (next((shape for name, shape in shapes.items() if re.search(pattern, name)), None)
                        for shapes, pattern in sides)
        turn.check_dims = theirs == ours


def shard(module: CausalModule, ranks: Ranks, options: FsdpOptions, *, low: bool, offload: bool) -> None:
    """Shard a module in place, a unit for each layer of text.

    Gradients are sums over ranks and not means, because the loss has divided already (miles_core/stages/loss.py).

    Args:
        low: computes in bfloat16; parameters and the sum of gradients stay in float32.
        offload: whether parameters lie in host memory between their uses.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else (
        MixedPrecisionPolicy())
    if ranks.tensor is not None:
        module.partial = split(module.model, ranks.tensor, module.text_layers())
    to_host = offload and ranks.device.type == "cuda"
    shape: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": policy, "reshard_after_forward": True,
                             "offload_policy": CPUOffloadPolicy() if to_host else OffloadPolicy()}
    factors = {name: one.lr_mult for name, one in module.named_parameters() if hasattr(one, "lr_mult")}
    if options.gradient_checkpointing:
        for layer in _blocks(module.model):
            checkpoint(layer)
    for layer in module.text_layers():
        fully_shard(layer, **shape)
    fully_shard(module, **shape)
    for name, one in module.named_parameters():  # others now, which are parts of those before
        if name in factors:
            one.lr_mult = factors[name]  # type: ignore[attr-defined]
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def check_shared(module: CausalModule, size: int) -> None:
    """
    Raises:
        ConfigError: a sample's rows cannot be shared among so many ranks.
    """
    config = module.model.config
    heads = getattr(config.get_text_config(), "num_attention_heads", 0)
    if size > 1 and (not module.packs or config._attn_implementation != NAME or heads % size):
        raise ConfigError("rows are shared in the packed attention, between whole heads",
                          code="fsdp-context-unsupported", who="[fsdp] context_parallel_size",
                          got=f"{type(module.model).__name__}, {heads} heads for {size} ranks, samples "
                          f"{'packed' if module.packs else 'padded'}, attention {config._attn_implementation}",
                          fix="take a size that divides the heads; an architecture whose layers have a state, or "
                          "another attention, is trained without it")


def _blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Blocks that transformers does not split over devices, outermost first."""
    whole = set(model._no_split_modules or ())
    blocks = [(name, part) for name, part in model.named_modules() if type(part).__name__ in whole]
    return [part for name, part in blocks if not any(name.startswith(f"{outer}.") for outer, _ in blocks)]


def keep_apart(module: CausalModule, batch: MicroBatch, ranks: Ranks) -> None:
    """Have samples padded in place of packed, if one of two that are packed reaches the other.

    Asked of the module itself: the derivative of the second sample's output by the first one's embeddings is exactly 0
    where attention is masked, and where a layer has a state that goes on it is not.

    Args:
        batch: two samples with trained rows.
    """
    if not module.packs:
        return
    seen: list[torch.Tensor] = []

    def leaf(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    weights = torch.randn(module.model.config.get_text_config().hidden_size,
                          generator=torch.Generator().manual_seed(0)).to(ranks.device)
    handle = module.model.get_input_embeddings().register_forward_hook(leaf)
    try:
        module(batch, lambda scored: (scored.hidden[batch.sample == 1].float() @ weights).sum()).backward()
    finally:
        handle.remove()
        module.zero_grad()
    (embedded,) = seen
    reached = embedded.grad is not None and bool(embedded.grad[0, : batch.lengths[0]].any())
    if any(ranks.gathered(reached)):
        module.pad()
        logger.warning("%s would let packed samples see one another: samples are padded", type(module.model).__name__)
