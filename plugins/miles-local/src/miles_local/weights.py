"""The engine's own copy of a checkpoint's weights, fused for decoding and filled from Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_core.errors import CheckpointError, EngineError
from miles_core.reading import parse_json, reading
from miles_local.operands import RoundInputs, memory, round_inputs

ROPES = ("default", "linear", "yarn", "llama3")
LINE = 16
"""float32 numbers of a cache line."""


@dataclass(frozen=True)
class Family:
    """What transformers builds into the layers of a model type. A name is the key of config.json that decides.

    Args:
        qk_norm: an RMS norm of every head of the queries and the keys.
        qkv_bias, o_bias, mlp_bias: biases of the projections.
        windows: "sliding_window", which holds for every layer, or "layer_types", which names the layers it holds for.
        experts: mixtures of experts.
    """

    qk_norm: bool = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: str | None = None
    experts: bool = False


FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(windows="sliding_window"),
    "qwen2": Family(qkv_bias=True, windows="layer_types"),
    "qwen3": Family(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias", windows="layer_types"),
    "qwen3_moe": Family(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias", windows="sliding_window",
                        experts=True),
}  # fmt: skip
"""By model_type; all else that decode.py computes is common to them."""


@dataclass(frozen=True)
class ModelShape:
    """The constants of a checkpoint: what decode.py computes.

    Args:
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: sizes; `intermediate` is that of dense layers.
        eps: of every RMS norm.
        tied: the output projection is the embedding.
        context: longest sequence that the checkpoint was made for, in tokens.
        experts, topk, expert_intermediate, renormalise, sparse: mixture of experts; `sparse` names the layers that
            have one, and is empty for a dense model.
        qk_norm, qkv_bias, o_bias, mlp_bias: what every layer has; see Family.
        windows: per layer the number of positions that a query sees, its own included; None where it sees all.
        inverse_frequencies, rope_scale: rotary embedding, [head_dim / 2] and the factor on its sines and cosines.
        eos: ids that end a response.
        init_std: standard deviation of random weights.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    tied: bool
    context: int
    experts: int
    topk: int
    expert_intermediate: int
    renormalise: bool
    sparse: frozenset[int]
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    inverse_frequencies: tuple[float, ...]
    rope_scale: float
    eos: frozenset[int]
    init_std: float

    @property
    def layer_weights(self) -> int:
        """Weights of a layer that one token meets."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * max(self.intermediate, self.topk * self.expert_intermediate)

    @classmethod
    def read(cls, folder: Path) -> ModelShape | None:
        """Read config.json and generation_config.json; None where decode.py does not know the architecture."""
        from transformers import AutoConfig  # seconds of import, and only here

        config = AutoConfig.from_pretrained(folder)
        family = FAMILIES.get(config.model_type)
        if family is None or not _known(config, family):
            return None
        frequencies, rope_scale = _rotary(config)
        moe = family.experts and config.num_experts > 0
        dense_only = set(getattr(config, "mlp_only_layers", None) or ())
        step = getattr(config, "decoder_sparse_step", 1)
        sparse = {i for i in range(config.num_hidden_layers) if moe and i not in dense_only and (i + 1) % step == 0}

        def has(key: bool | str) -> bool:
            return bool(getattr(config, key)) if isinstance(key, str) else key

        return cls(
            hidden=config.hidden_size, layers=config.num_hidden_layers, heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, head_dim=_head_dim(config), intermediate=config.intermediate_size,
            vocab=config.vocab_size, eps=config.rms_norm_eps, tied=bool(config.tie_word_embeddings),
            context=config.max_position_embeddings, experts=config.num_experts if moe else 0,
            topk=config.num_experts_per_tok if moe else 0,
            expert_intermediate=config.moe_intermediate_size if moe else 0,
            renormalise=bool(moe and config.norm_topk_prob), sparse=frozenset(sparse), qk_norm=family.qk_norm,
            qkv_bias=has(family.qkv_bias), o_bias=has(family.o_bias), mlp_bias=has(family.mlp_bias),
            windows=tuple(config.sliding_window if kind == "sliding_attention" else None
                          for kind in _layer_types(config, family)),
            inverse_frequencies=tuple(frequencies.tolist()), rope_scale=rope_scale,
            eos=eos_ids(config, folder), init_std=config.initializer_range,
        )  # fmt: skip


def _known(config, family: Family) -> bool:
    window = getattr(config, "sliding_window", None)
    return (
        config.hidden_act == "silu" and config.rope_parameters["rope_type"] in ROPES
        and set(_layer_types(config, family)) <= {"full_attention", *(["sliding_attention"] if window else [])}
    )  # fmt: skip


def _layer_types(config, family: Family) -> list[str]:
    if family.windows == "layer_types":
        return config.layer_types
    slides = family.windows is not None and config.sliding_window is not None
    return ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary(config) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on sines and cosines, exactly as transformers has them."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        steps = torch.arange(0, _head_dim(config), 2, dtype=torch.float) / _head_dim(config)
        return 1.0 / (config.rope_parameters["rope_theta"] ** steps), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    return frequencies, float(factor)


def eos_ids(config, folder: Path) -> frozenset[int]:
    """generation_config.json has the last word, as in transformers' generate."""
    eos = config.eos_token_id
    path = folder / "generation_config.json"
    with reading(str(path), CheckpointError):
        if path.is_file():
            eos = parse_json(path.read_text(encoding="utf-8")).get("eos_token_id", eos)
        if eos is None:
            return frozenset()
        return frozenset(map(int, [eos] if isinstance(eos, int) else eos))


def _bias(exists: bool, size: int, dtype: torch.dtype) -> torch.Tensor | None:
    return torch.empty(size, dtype=dtype) if exists else None


def beside_text(module: torch.nn.Module) -> set[str]:
    """Parameters and buffers that text does not meet, such as a vision tower's, which a trainer of text does not send.

    Args:
        module: a PreTrainedModel.
    """
    text = {id(one) for part in (module.get_decoder(), module.get_output_embeddings())
            for one in part.state_dict(keep_vars=True).values()}
    return {name for name, one in module.state_dict(keep_vars=True).items() if id(one) not in text}


def _matrix(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[..., out, in]; in float32 its memory is [..., in, out]: products of 16 rows then take two thirds of the time.

    The bits are those of the other order of memory, which the trainer has (tests/integration/test_on_policy.py).
    """
    if dtype != torch.float32:
        return torch.empty(shape, dtype=dtype)
    *lead, out, into = shape
    return torch.empty(*lead, into, out, dtype=dtype).transpose(-1, -2)


class Layer:
    """One layer's tensors. All are [out, in]; those of a mixture of experts have a leading expert axis.

    qkv [(heads + 2 kv_heads) x head_dim, hidden] and gate_up [2 x intermediate, hidden] are fused; head_norm
    [heads + kv_heads, head_dim] repeats the query's and the key's norm per head, so that one product applies both.
    Norms and biases that the shape does not have are None.
    """

    def __init__(self, shape: ModelShape, index: int, dtype: torch.dtype):
        s = shape
        self.input_norm = torch.empty(s.hidden, dtype=dtype)
        self.post_norm = torch.empty(s.hidden, dtype=dtype)
        self.qkv = _matrix((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, dtype=dtype)
        self.qkv_bias = _bias(s.qkv_bias, len(self.qkv), dtype)
        self.head_norm = torch.empty(s.heads + s.kv_heads, s.head_dim, dtype=dtype) if s.qk_norm else None
        self.o = _matrix(s.hidden, s.heads * s.head_dim, dtype=dtype)
        self.o_bias = _bias(s.o_bias, s.hidden, dtype)
        self.router = None
        if index in s.sparse:
            # Whole cache lines per row of scores: where rows of a narrow product begin anywhere, some libraries sum
            # a row in another order at another place of the batch.
            self.router = _matrix(-(-s.experts // LINE) * LINE, s.hidden, dtype=dtype).zero_()
            self.gate_up = _matrix(s.experts, 2 * s.expert_intermediate, s.hidden, dtype=dtype)
            self.down = _matrix(s.experts, s.hidden, s.expert_intermediate, dtype=dtype)
        else:
            self.gate_up = _matrix(2 * s.intermediate, s.hidden, dtype=dtype)
            self.down = _matrix(s.hidden, s.intermediate, dtype=dtype)
            self.gate_up_bias = _bias(s.mlp_bias, len(self.gate_up), dtype)
            self.down_bias = _bias(s.mlp_bias, s.hidden, dtype)

    def slots(self, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """(name inside the layer, where it is kept, shape on disk)."""
        for name, norm in (("input_layernorm", self.input_norm), ("post_attention_layernorm", self.post_norm)):
            yield f"{name}.weight", norm, tuple(norm.shape)
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = zip("qkv", self.qkv.split((q, kv, kv)), _split(self.qkv_bias, (q, kv, kv)), strict=True)
        for name, weight, bias in (*qkv, ("o", self.o, self.o_bias)):
            yield from _projection_slots(f"self_attn.{name}_proj", weight, bias)
        if self.head_norm is not None:
            yield "self_attn.q_norm.weight", self.head_norm[: shape.heads], (shape.head_dim,)
            yield "self_attn.k_norm.weight", self.head_norm[shape.heads :], (shape.head_dim,)
        if self.router is None:
            yield from _mlp_slots("mlp", self.gate_up, self.down, self.gate_up_bias, self.down_bias)
            return
        yield "mlp.gate.weight", self.router[: shape.experts], (shape.experts, shape.hidden)
        for expert in range(shape.experts):
            yield from _mlp_slots(f"mlp.experts.{expert}", self.gate_up[expert], self.down[expert])


def _mlp_slots(prefix: str, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None,
               down_bias: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    halves = (len(gate_up) // 2,) * 2
    for name, weight, bias in (*zip(("gate", "up"), gate_up.split(halves), _split(gate_up_bias, halves), strict=True),
                               ("down", down, down_bias)):
        yield from _projection_slots(f"{prefix}.{name}_proj", weight, bias)


def _split(bias: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    return [None] * len(sizes) if bias is None else bias.split(sizes)


def _projection_slots(name: str, weight: torch.Tensor,
                      bias: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    yield f"{name}.weight", weight, tuple(weight.shape)
    if bias is not None:
        yield f"{name}.bias", bias, tuple(bias.shape)


class Weights:
    """One complete set of weights. A new set is filled and checked beside the old one, then takes its place.

    rounded_inputs: by the memory of a weight, how its inputs are rounded (operands.py).
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.shape = shape
        self.rounded_inputs: dict[int, RoundInputs] = {}
        with torch.device(device):
            self.embed = torch.empty(shape.vocab, shape.hidden, dtype=dtype)
            self.head = self.embed if shape.tied else _matrix(shape.vocab, shape.hidden, dtype=dtype)
            self.norm = torch.empty(shape.hidden, dtype=dtype)
            self.layers = [Layer(shape, index, dtype) for index in range(shape.layers)]

    def slots(self) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
        """Name on disk -> (where it is kept, shape on disk)."""
        tensors = {
            "model.embed_tokens.weight": (self.embed, tuple(self.embed.shape)),
            "model.norm.weight": (self.norm, tuple(self.norm.shape)),
        }
        if not self.shape.tied:
            tensors["lm_head.weight"] = (self.head, tuple(self.head.shape))
        for index, layer in enumerate(self.layers):
            for name, tensor, shape in layer.slots(self.shape):
                tensors[f"model.layers.{index}.{name}"] = (tensor, shape)
        return tensors

    @classmethod
    def from_stream(cls, shape: ModelShape, dtype: torch.dtype, stream: Iterable[tuple[str, torch.Tensor]],
                    device: torch.device | str = "cpu") -> Weights:
        """A new set from a complete stream of (name on disk, tensor), copied to `device` and converted to `dtype`.

        Raises:
            EngineError: an unknown, repeated, missing or misshapen tensor, or a value that is not finite.
        """
        weights = cls(shape, dtype, device)
        slots = weights.slots()
        seen: set[str] = set()
        for name, tensor in stream:
            if name not in slots or name in seen:
                fix = "send each Hugging Face name of the checkpoint once"
                if name == "lm_head.weight" and shape.tied:
                    fix = "the embeddings are tied: leave it out"
                what = "a repeated" if name in seen else "an unknown"
                raise EngineError(f"{what} tensor in the weights", code="weights-tensor-unexpected", got=name, fix=fix)
            place, expected = slots[name]
            if tuple(tensor.shape) != expected:
                raise EngineError(f"tensor {name} has the wrong shape, expected {list(expected)}",
                                  code="tensor-shape-mismatch", got=list(tensor.shape),
                                  fix="send tensors in their on-disk shapes")
            place.copy_(tensor.detach())
            if (function := round_inputs(tensor)) is not None:
                weights.rounded_inputs[memory(place)] = function
            if not torch.isfinite(place).all():
                raise EngineError(f"tensor {name} holds values that are not finite", code="tensor-not-finite",
                                  fix="look at the last training step; before the first, at the checkpoint")
            seen.add(name)
        if missing := [name for name in slots if name not in seen]:
            raise EngineError("the weights are incomplete",
                              code="weights-incomplete", got=f"{len(missing)} of {len(slots)} tensors are missing, "
                              f"such as {missing[0]}", fix="send the complete stream of the checkpoint's tensors")
        return weights

    @classmethod
    def random(cls, shape: ModelShape, dtype: torch.dtype, seed: int = 0,
               device: torch.device | str = "cpu") -> Weights:
        """Normal weights with the config's standard deviation, norms of one, biases of zero; a seed fixes them."""
        weights = cls(shape, dtype, device)
        generator = torch.Generator().manual_seed(seed)
        for name, (place, expected) in weights.slots().items():
            if len(expected) == 1:
                place.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                place.copy_(torch.randn(expected, generator=generator) * shape.init_std)
        return weights


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or all that count without one.

    Raises:
        CheckpointError: no such files, or an index that cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with reading(str(index), CheckpointError):
            return [folder / name for name in sorted(set(parse_json(index.read_bytes())["weight_map"].values()))]
    if files := unindexed(folder):
        return files
    raise CheckpointError("no safetensors files found", code="safetensors-not-found", who=str(folder),
                          fix="use a checkpoint with weights, or random_init=True")


def unindexed(folder: Path) -> list[Path]:
    """The files that count in a folder without an index; of a tensor that several have, that in the last one.

    That is model.safetensors, which transformers reads. Mistral's consolidated.safetensors counts where it is alone: it
    has the weights of the other files, under other names.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda file: (file.name == "model.safetensors", file.name))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def read_tensors(folder: Path, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder's safetensors files but those in `skip`: some tied checkpoints store the head as well.

    Raises:
        CheckpointError: no such files.
    """
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name not in skip:
                    yield name, file.get_tensor(name)
