"""Any architecture through its transformers module: the decoder for families without a fast path.

The rows are those of the fast path: left-aligned, position p in column p, each with a length of its own. The module
gets position ids, a cache that writes each row at its own position, and masks made by the architecture's own rule
(causal, sliding, chunked) from the rows' positions; its attention is its own eager one. What a module does otherwise
stays its own: softcaps, biases, experts. Not bit-identical in any batch, unlike the fast path: log-probs agree with a
full forward to rounding.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from miles_core.errors import CheckpointError, EngineError
from miles_local.architectures import LAYERS, WITH_STATES, cache_word, class_of, config_of, inside_text, taken_out
from miles_local.cache import CPU, Cache, Prefill, round_up
from miles_local.decode import BaseDecoder
from miles_local.inputs import AHEAD, SequenceInputs, laid_out
from miles_local.operands import Rounded, RoundInputs, round_inputs
from miles_local.recomputed import Recomputing
from miles_local.recurrent import Recurrent, States, by_length
from miles_local.routing import chosen_experts, experts_of, stacked
from miles_local.weights import beside_text, eos_ids, read_tensors

ROWS_ATTENTION = "miles-rows"
"""Name under which transformers finds the attention and the masks of this file."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Of the check of a module: largest difference of logits, in standard deviations of the logits."""

logger = logging.getLogger(__name__)
_building = threading.Lock()  # transformers sets torch's default dtype, the whole process's, while it builds a module


def _attend(module, *args, **kwargs):
    """The architecture's own eager attention: every modeling file of transformers has one under this name."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _mask(batch_size: int, kv_length: int, q_offset: torch.Tensor, mask_function: Callable, dtype: torch.dtype, **_):
    """[B, 1, Q, T], 0 where a query sees a key; `q_offset` [B, Q] is what `_Rows` says: every query's position."""
    device = q_offset.device
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    seen = mask_function(rows, 0, q_offset[:, None, :, None], torch.arange(kv_length, device=device))
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


ALL_ATTENTION_FUNCTIONS.register(ROWS_ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ROWS_ATTENTION, _mask)


class _Rows(Recurrent, TransformersCache):
    """What a module takes for its cache during one forward of B rows.

    Args:
        positions: [B, Q] of the tokens that are fed.
        width: positions that `store` returns.
        store: (layer, new keys and values [B, kv_heads, Q, head_dim]) -> all keys and values [B, kv_heads, width, ...].
        states: of layers that have them.
    """

    def __init__(self, positions: torch.Tensor, width: int, store: Callable, states: States):
        super().__init__(layers=[])
        self._positions, self._width, self._store, self.states = positions, width, store, states

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self._store(layer_idx, key_states, value_states)

    def get_query_offset(self, layer_idx=0):
        return self._positions

    def get_mask_sizes(self, query_length, layer_idx):
        return self._width, 0

    def get_seq_length(self, layer_idx=0):
        # Where transformers has no get_query_offset yet (5.12), masks get the queries' positions from here.
        return 0 if hasattr(TransformersCache, "get_query_offset") else self._positions


@dataclass(frozen=True)
class ModuleShape:
    """What the engine has to know of a model; see ModelShape for the names. `sparse` are layers whose experts can be
    told; without any, topk is 0."""

    vocab: int
    layers: int
    context: int
    eos: frozenset[int]
    layer_weights: int
    topk: int = 0
    sparse: frozenset[int] = frozenset()


class ModuleDecoder(Recomputing, BaseDecoder):
    """The forward pass of any causal language model of transformers; weights are whole modules.

    Args:
        folder: with config.json.
        dtype: of weights, activations and cache; logits are float32.
        device: where modules are put.
        inputs: the bound hook prefill_inputs. With it a model that reads images is built whole.

    Raises:
        CheckpointError: an architecture that transformers does not know, or whose past is not keys and values.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU,
                 inputs: SequenceInputs | None = None):
        self._dtype, self.device, self._checked, self._inputs = dtype, device, False, inputs
        self._rounded = Rounded()
        self._config = config_of(folder, whole=inputs is not None)
        self._class = class_of(self._config, whole=inputs is not None)
        self._taken_out = inputs is None and taken_out(self._config)
        text = self._config.get_text_config()
        if self._class.config_class is type(text):  # of a model that reads images too, the part that decodes text
            text.tie_word_embeddings = self._config.tie_word_embeddings
            self._config = text
        with _building, torch.device("meta"):
            skeleton = self._class._from_config(copy.deepcopy(self._config))
        embedded = skeleton.get_input_embeddings().weight.numel()
        sparse = frozenset(experts_of(skeleton))
        self.shape = ModuleShape(
            vocab=text.vocab_size, layers=text.num_hidden_layers, context=text.max_position_embeddings,
            eos=eos_ids(text, folder),
            layer_weights=(skeleton.num_parameters() - embedded) // text.num_hidden_layers,
            topk=getattr(text, "top_k_experts", None) or text.num_experts_per_tok if sparse else 0, sparse=sparse,
        )  # fmt: skip
        kinds = set(getattr(text, "layer_types", None) or ())
        self._recurrent, self._recomputes = bool(kinds & WITH_STATES), bool(kinds - LAYERS)
        self._slots: dict[int, int] = {}  # layer -> place in the cache; layers that borrow another's keys have none

    def stage(self, stream: Iterable[tuple[str, torch.Tensor]]) -> PreTrainedModel:
        """A new module from a complete stream of (name on disk, tensor), copied and converted.

        Raises:
            EngineError: an unknown, repeated, missing or misshapen tensor, or a value that is not finite.
        """
        state: dict[str, torch.Tensor] = {}
        declared: dict[str, tuple[torch.Size, RoundInputs | None]] = {}
        for stored, tensor in stream:
            name = inside_text(stored) if self._taken_out else stored
            if name is None:
                continue
            if name in state:
                raise EngineError("a tensor appears twice in the weights", code="tensor-sent-twice", got=name,
                                  fix="send each name once")
            state[name] = tensor.detach().to(self._dtype if tensor.is_floating_point() else None, copy=True)
            declared[name] = tensor.shape, round_inputs(tensor)
            if not torch.isfinite(state[name]).all():
                raise EngineError(f"tensor {name} holds values that are not finite", code="tensor-not-finite",
                                  fix="look at the last training step; before the first, at the checkpoint")
        return self._rounded.noted(self._ready(self._load(state)), declared, self._load)

    def tensors(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's, for `stage`; see read_tensors."""
        return read_tensors(folder)

    def random(self) -> PreTrainedModel:
        """The architecture's own random weights; the same ones every time."""
        with _building, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = self._class._from_config(copy.deepcopy(self._config), dtype=self._dtype)
        return self._ready(module)

    @torch.inference_mode()
    def prefill(self, weights: PreTrainedModel, sequences: list[tuple[int, ...]], trace: bool = False,
                images: Sequence[tuple[bytes, ...]] = ()) -> Prefill:
        """Compute whole sequences, padded to the right; then their last tokens once more, for the logits alone.

        Args:
            images: of each sequence; none of any by default.

        Where layers have states, which would take both in, sequences of one length are computed at once instead.
        """
        if (self._recurrent or self._recomputes) and any(images):
            raise EngineError("the local engine shows no images to layers whose past is a state",
                              code="local-images-with-states", got=self._config.model_type, fix="use --engine sglang")
        if self._recomputes:
            return self._first(weights, sequences, trace)
        if self._recurrent:
            return by_length(sequences, lambda equal: self._unpadded(weights, equal, trace))
        count, width = len(sequences), round_up(max(map(len, sequences)))
        tokens = torch.zeros(count, width, dtype=torch.int64)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = torch.tensor(ids)
        result = Prefill(logits=torch.empty(0))
        store = self._filling(result)
        positions = torch.arange(width).clamp_(max=self.shape.context - 1).expand(count, -1)
        more: dict[str, torch.Tensor] = {}
        if self._inputs is not None:
            more, ahead = laid_out(self._inputs, weights, sequences, images or [()] * count, width)
            result.states[AHEAD] = ahead.to(self.device)
        with chosen_experts(weights, trace) as routes:
            self._forward(weights, tokens, positions, width, store, more=more)
        last = torch.tensor([len(ids) - 1 for ids in sequences])
        ids = torch.tensor([ids[-1] for ids in sequences])
        with chosen_experts(weights, trace) as again:
            result.logits = self._next(weights, result, ids, last, width)
        if trace:
            result.routing = stacked(routes, count * width, self.shape).view(count, width, self.shape.layers, -1)
            result.routing[torch.arange(count), last] = stacked(again, count, self.shape)
        return result

    def _unpadded(self, weights: PreTrainedModel, sequences: list[tuple[int, ...]], trace: bool) -> Prefill:
        """Sequences of one length, every token of theirs once."""
        tokens, result = torch.tensor(sequences), Prefill(logits=torch.empty(0))
        count, width = tokens.shape
        states = States(None, count)
        with chosen_experts(weights, trace) as routes:
            positions = torch.arange(width).expand(count, -1)
            logits = self._forward(weights, tokens, positions, width, self._filling(result), states)
        result.logits, result.states = logits[:, -1].float(), states.tensors
        if trace:
            result.routing = stacked(routes, count * width, self.shape).view(count, width, self.shape.layers, -1)
        return result

    def _filling(self, result: Prefill) -> Callable:
        """What keeps a prefill's keys and values, for `_Rows`."""
        def store(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self._slots.setdefault(layer, len(self._slots))
            result.k.append(k)
            result.v.append(v)
            return k, v

        return store

    @torch.inference_mode()
    def step(self, weights: PreTrainedModel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor,
             trace: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Decoder.step."""
        if self._recomputes:
            return self._again(weights, cache, tokens, positions, trace)
        width = round_up(int(positions.max()) + 1)
        with chosen_experts(weights, trace) as routes:
            logits = self._next(weights, cache, tokens, positions, width)
        return logits, stacked(routes, len(tokens), self.shape) if trace else None

    def _next(self, weights: PreTrainedModel, cache: Cache | Prefill, tokens: torch.Tensor, positions: torch.Tensor,
              width: int) -> torch.Tensor:
        """Feed one token per row (tokens, positions [R]), write keys, values, states; logits [R, V] float32."""
        rows, positions = torch.arange(len(tokens), device=self.device), positions.to(self.device)

        def store(layer: int, *new: torch.Tensor) -> list[torch.Tensor]:
            slot = self._slots[layer]
            for side, values in zip((cache.k, cache.v), new, strict=True):
                side[slot][rows, :, positions] = values[:, :, 0]
            return [side[slot][: len(rows), :, :width] for side in (cache.k, cache.v)]

        states, more = States(cache.states, len(tokens)), {}
        if AHEAD in cache.states:
            more["position_ids"] = (positions + cache.states[AHEAD][: len(tokens)])[:, None]
        return self._forward(weights, tokens[:, None], positions[:, None], width, store, states, more)[:, -1].float()

    def _forward(self, weights, tokens, positions, width, store, states=None, more=None) -> torch.Tensor:
        """`positions` are places in the cache, and what the module is told unless `more` has position_ids."""
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        cache = _Rows(positions, width, store, states or States(None, len(tokens)))
        more = {"position_ids": positions} | {name: one.to(self.device) for name, one in (more or {}).items()}
        with _building:
            return weights(input_ids=tokens, use_cache=True, logits_to_keep=1, **more,
                           **{cache_word(type(weights)): cache}).logits

    def _load(self, state: dict[str, torch.Tensor]) -> PreTrainedModel:
        """transformers' own loading, which knows each architecture's names on disk, ties and stacked experts."""
        try:
            with _building, _hushed():
                module, info = self._class.from_pretrained(
                    None, config=copy.deepcopy(self._config), state_dict=state, dtype=self._dtype,
                    output_loading_info=True, ignore_mismatched_sizes=True,
                )  # fmt: skip
        except RuntimeError as error:
            raise EngineError("the weights do not fit the architecture", code="weights-architecture-mismatch",
                              got=str(error).splitlines()[0],
                              fix="send the complete stream of the checkpoint's tensors") from error
        for kind, what in (("unexpected_keys", "an unknown tensor"), ("mismatched_keys", "a tensor of the wrong shape"),
                           ("missing_keys", "the weights are incomplete: a tensor is missing")):
            if names := sorted(set(map(str, info[kind])) - beside_text(module)):
                raise EngineError(f"{what} in the weights", code="weights-names-mismatch",
                                  got=f"{len(names)}, such as {names[0]}",
                                  fix="send each tensor of the checkpoint once, as it is on disk")
        return module

    def _ready(self, module: PreTrainedModel) -> PreTrainedModel:
        """The module with this file's attention; the first one is checked."""
        module.eval().requires_grad_(False).to(self.device)
        for part in module.modules():  # transformers limits the time steps of a Mamba-2 of whole sequences alone
            if hasattr(part, "time_step_limit"):
                part.time_step_limit = (0.0, float("inf"))
        if not self._checked:
            self._check(module)
            self._checked = True
        _attend_by(module, self._whole if self._recomputes else ROWS_ATTENTION)
        return module

    def _check(self, module: PreTrainedModel) -> None:
        """Find out whether a cache does for this architecture, or whether its sequences are computed anew.

        Raises:
            CheckpointError: neither gives what full forwards do.
        """
        self._whole = module.config.get_text_config()._attn_implementation
        problem = "layers with a past of their own" if self._recomputes else self._problem(module, ROWS_ATTENTION)
        if problem:
            self._recomputes = True
            logger.warning("engine local: %s decodes by computing a sequence anew for each of its tokens (%s)",
                           self._config.model_type, problem)
            if again := self._problem(module, self._whole):
                raise CheckpointError("the local engine cannot decode this architecture", got=again,
                                      code="local-decode-unsupported", who=self._config.model_type,
                                      fix="use --engine sglang")

    def _problem(self, module: PreTrainedModel, attention: str) -> str:
        """What keeps prefill and steps from what full forwards give; empty if nothing does."""
        try:
            with _hushed():  # transformers says which kernels it does without, in a line each
                _attend_by(module, "eager")
                expected = [_full(module, ids) for ids in _PROBES]
                _attend_by(module, attention)
                gap = self._gap(module, expected)
        except Exception as error:  # whatever a modeling file may raise
            logger.debug("%s cannot be decoded so", self._config.model_type, exc_info=True)
            return str(error) or type(error).__name__
        return "" if gap <= TOLERANCE.get(self._dtype, 0.2) else f"logits differ by {gap:.1e} standard deviations"

    def _gap(self, module: PreTrainedModel, expected: list[torch.Tensor]) -> float:
        """Prefill and two steps of two sequences of unequal lengths against full forwards: largest relative difference.

        An architecture may make positions or masks in ways of its own, which would be wrong here and silent.
        """
        cache = Cache(len(_PROBES), self.device)
        cache.reserve(len(_PROBES), max(map(len, _PROBES)))
        each = torch.arange(len(_PROBES))
        cache.put(each, each, self.prefill(module, [ids[:-2] for ids in _PROBES]))
        if self.device.type != "cpu":
            self.token_bytes = cache.token_bytes
        for back in (2, 1):
            fed = torch.tensor([ids[-back] for ids in _PROBES])
            got, _ = self.step(module, cache, fed, torch.tensor([len(ids) - back for ids in _PROBES]))
        return max(float((a - b).abs().max() / b.std()) for a, b in zip(got, expected, strict=True))


def _attend_by(module: PreTrainedModel, name: str) -> None:
    """Of a model with a tower, the part that decodes text alone."""
    text, parts = module.config.get_text_config(), module.config.sub_configs
    own = [key for key in parts if getattr(module.config, key, None) is text]
    module.set_attn_implementation(dict.fromkeys(own, name) if own else name)


_PROBES = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13), (3, 1, 4, 1, 5))


@torch.inference_mode()
def _full(module: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """[V] logits after the last token of one sequence, with nothing cached."""
    return module(input_ids=torch.tensor([ids], device=module.device), use_cache=False).logits[0, -1].float()


@contextmanager
def _hushed() -> Iterator[None]:
    """No progress bar and no table of keys: what is wrong becomes an error here."""
    logger, bars = logging.getLogger("transformers"), transformers_logging.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
