"""The checkpoint's files against each other: weights that are all there, and of the sizes that config.json states.

Read are the index, and of each *.safetensors file the header, which names tensors, shapes and places; no weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from miles_core.config.architecture import Architecture, architecture_of
from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError
from miles_core.reading import parse_json
from miles_preflight.paths import found_in

LOOKED_AT = 64 * 1024
"""Bytes of tokenizer.json, at whose start the special tokens stand."""
AGAIN = "fetch the checkpoint again"
POINTER = b"version https://git-lfs"
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype as safetensors spells it, and shape."""
MARKS = {"q_norm": ({"qwen3", "qwen3_moe"}, {"llama", "qwen2", "mistral"}),
         "q_proj.bias": ({"qwen2"}, {"qwen3", "qwen3_moe"})}
"""Part of a tensor's name -> families that have such, and that have not."""
SPECIAL = r'"id":\s*(\d+),\s*"content":\s*("(?:[^"\\]|\\.)*")'
"""How tokenizer.json writes a token that was added to the vocabulary: its id, and itself as JSON."""
_PLAIN = re.compile(r'("(?:[^"\\]|\\.)*"):\s*(\d+)\s*,')
_WRAPPED = re.compile(r"^(module|_fsdp_wrapped_module|_forward_module)\.|\._orig_mod\.|\.base_layer\.|"
                      r"^(?!base_model\.).*\.lora_[AB]\.")
_SCALED = re.compile(r"\.(weight_scale(_inv)?|qweight|qzeros|weight_packed|absmax|SCB)$")
EVEN = {"llama", "mistral", "qwen2", "qwen3"}
"""Families of which all layers have the same parts."""
_LAYER = re.compile(r"(?:model\.|language_model\.)layers\.(\d+)\.")


def check_files(config: RunConfig) -> None:
    """

    Raises:
        CheckpointError: files that are missing or cut short, or that are of another model than config.json.
    """
    folder, (_, constants) = Path(str(config.checkpoint.hf_checkpoint)), config_json(config)
    if constants is None:
        return
    tensors = check_whole(folder)
    if tensors and not (folder / "adapter_config.json").is_file():
        _named(folder, tensors, constants)
        shapes, model = {name: shape for name, (_, shape) in tensors.items()}, architecture_of(config)
        _sizes(folder, shapes, model, constants)
        if constants.get("model_type") in EVEN and not constants.get("quantization_config"):
            _parts(folder, shapes, model)
    _special_tokens(folder, constants)
    layers, kinds = constants.get("num_hidden_layers"), constants.get("layer_types")
    if isinstance(layers, int) and isinstance(kinds, list) and len(kinds) != layers:
        raise _error(folder / "config.json", f"layer_types speaks of {len(kinds)} layers", layers,
                     "make it as long as there are layers")
    reference = config.checkpoint.ref_load
    if reference is not None and not config.debug.debug_rollout_only:
        check_other(config, Path(reference))


def check_whole(folder: Path) -> Tensors:
    """The tensors of a folder, by the headers of its files.

    Raises:
        CheckpointError: a file is missing, cut short or a pointer.
    """
    for path in sorted(path for kind in ("*.json", "*.safetensors", "*.model") for path in folder.glob(kind)):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise _error(path, "this is a pointer of Git LFS, whose file was not fetched", None,
                             "git lfs pull, or fetch the checkpoint again")
    files = {path.name: _header(path) for path in sorted(folder.glob("*.safetensors"))}
    _complete(folder, files)
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def check_other(config: RunConfig, folder: Path, head: str | None = None) -> None:
    """A Hugging Face folder of another model that reads the policy's tokens.

    Raises:
        CheckpointError: files that are not whole, no head of one number where it should have one, or other tokens.
    """
    policy = Path(str(config.checkpoint.hf_checkpoint))
    if folder == policy or not (folder / "config.json").is_file():
        return
    tensors = check_whole(folder)
    if head and tensors and tensors.get(head, ("", (0,)))[1][0] != 1:
        near = {name: shape for name, (_, shape) in tensors.items() if "head" in name or "score" in name}
        raise _error(folder, f"the checkpoint has no head of one number, {head}", near or "none",
                     "name a checkpoint that was trained as one")
    if other := other_tokens(policy, folder):
        raise _error(folder, "its tokens are not the policy's", other,
                     "name a model of the policy's family, with the same tokenizer")


def other_tokens(one: Path, other: Path) -> str | None:
    """A token that has another id in another folder, of those at the start of both tokenizers."""
    ours, theirs = ({token: int(number) for number, token in re.findall(SPECIAL, head)} |
                    {token: int(number) for token, number in _PLAIN.findall(tail)}
                    for head, tail in (_starts(folder / "tokenizer.json") for folder in (one, other)))
    return next((f"{token} is {ours[token]} and {theirs[token]}" for token in ours
                 if token in theirs and ours[token] != theirs[token]), None)


def _starts(path: Path) -> tuple[str, str]:
    """Of a tokenizer.json, special tokens and as much of the vocabulary."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * LOOKED_AT).decode("utf-8", "ignore")
    except OSError:
        return "", ""
    head, _, tail = text.partition('"vocab"')
    return head, tail[:LOOKED_AT]


def _complete(folder: Path, files: Mapping[str, Tensors]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(re.search(r"-\d{5}-of-\d{5}\.", name) for name in files):
            raise _error(folder, "the weights are in several files, and no index says which is where",
                         f"no {index.name}", AGAIN)
        return
    try:
        places = {str(name): str(file) for name, file in parse_json(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _error(index, "the index of the weights cannot be read", error, AGAIN) from None
    if missing := sorted(file for file in set(places.values()) if not (folder / file).is_file()):
        raise _error(folder, f"files of weights that {index.name} names are not there",
                     ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else ""), AGAIN)
    if (folder / "model.safetensors").is_file() and "model.safetensors" not in places.values():
        raise _error(folder, "the folder has weights twice: model.safetensors, and files that an index names", None,
                     f"remove what is older: model.safetensors, or {index.name} and its files")
    if lost := [f"{name} in {file}" for name, file in places.items()
                if name not in (files.get(file) or (name,)) and "rotary_emb" not in name]:
        raise _error(index, "the index names tensors that the files do not hold", lost[0], AGAIN)


def _header(path: Path) -> Tensors:
    """What a file holds, once it is certain that it is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = parse_json(file.read(length) if length < size else "")
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            end = 8 + length + max((one["data_offsets"][1] for one in entries.values()), default=0)
            tensors = {name: (str(one["dtype"]), tuple(one["shape"])) for name, one in entries.items()}
        except (ValueError, AttributeError, LookupError, TypeError):
            raise _error(path, "a tensor file cannot be read: it is not whole", f"{size} bytes", AGAIN) from None
    if size != end:
        raise _error(path, "a tensor file cannot be read: it is cut short", f"{size} of {end} bytes", AGAIN)
    return tensors


def _named(folder: Path, tensors: Tensors, constants: Mapping[str, object]) -> None:
    """Names and kinds of tensors that are those of the family, and plain where config.json says nothing else."""
    if wrapped := next((name for name in tensors if _WRAPPED.search(name)), None):
        raise _error(folder, "the tensors have names that a wrapper around the model gave them", wrapped,
                     "save the model within: merge adapters, and take the wrapper's prefix away")
    if empty := next((name for name, (_, shape) in tensors.items() if shape == (0,)), None):
        raise _error(folder, "the tensors are empty", f"{empty} [0]",
                     "save again: under ZeRO-3 the parts have to be gathered first")
    scaled = next((name for name, (kind, _) in tensors.items() if _SCALED.search(name) or kind.startswith("F8")
                   or kind in ("I8", "I32", "I64") and name.endswith("proj.weight")), None)
    if scaled and not constants.get("quantization_config"):
        raise _error(folder, "the weights are quantised, and config.json says nothing of it", scaled,
                     "fetch config.json again, or name the plain checkpoint")
    for part, (having, lacking) in MARKS.items():
        present = any(part in name for name in tensors)
        others = lacking if present else having
        if constants.get("model_type") in others and any("self_attn.q" in name for name in tensors):
            raise _error(folder, f"the weights are of another family than config.json's {constants['model_type']}",
                         part if present else f"no {part}", "both files have to be of one checkpoint")


def _sizes(folder: Path, shapes: Mapping[str, tuple[int, ...]], model: Architecture,
           constants: Mapping[str, object]) -> None:
    values, heads = (model.groups or 0) * (model.head_dim or 0), (model.heads or 0) * (model.value_dim or 0)
    stated = {"embed_tokens.weight": (model.vocab, model.hidden), "lm_head.weight": (model.vocab, model.hidden),
              "layers.0.mlp.gate_proj.weight": (model.ffn, model.hidden),
              "layers.0.self_attn.k_proj.weight": (values or None, model.hidden),
              "layers.0.self_attn.o_proj.weight": (model.hidden, heads or None)}  # fmt: skip
    stated = {} if constants.get("quantization_config") else stated
    for name, shape in shapes.items():
        wanted = next((size for end, size in stated.items() if name.endswith(end) and "vis" not in name), None)
        if wanted is not None and None not in wanted and len(shape) == 2 and shape != wanted:
            raise _misshapen(folder, name, shape, wanted)
    experts = {int(match[1]) for name in shapes if (match := re.search(r"\.experts\.(\d+)\.", name))}
    if model.experts and experts and len(experts) != model.experts:
        raise _error(folder, f"config.json has {model.experts} experts, and the weights are of others", len(experts),
                     "both files have to be of one checkpoint")
    strange = [name for name in shapes if ".experts." in name and not re.search(r"\.experts\.(\d+\.|\w+$)", name)]
    if model.experts and strange and not experts:
        raise _error(folder, "experts have other names than transformers gives them", strange[0],
                     "save the model with transformers: ...experts.0.NAME.weight, or one tensor of all")
    layers = {int(match[1]) for name in shapes if (match := _LAYER.search(name))}
    # Layers behind the model's own, which predict tokens further on, take two inputs; config.json need not count them.
    further = {int(match[1]) for name in shapes if "eh_proj" in name and (match := _LAYER.search(name))}
    if model.layers and layers and not len(layers - further) <= model.layers <= len(layers):
        raise _error(folder, f"config.json has {model.layers} layers, and the weights are of others", len(layers),
                     "both files have to be of one checkpoint")
    if constants.get("tie_word_embeddings") is False and layers and not any("lm_head" in name for name in shapes):
        raise _error(folder, "config.json says that the output layer has weights of its own, and they are not there",
                     "no lm_head.weight", "set tie_word_embeddings to true there, or fetch the checkpoint again")


def _parts(folder: Path, shapes: Mapping[str, tuple[int, ...]], model: Architecture) -> None:
    """Of a family whose layers are all alike: every part of every layer, as wide as config.json says."""
    queries, values = ((number or 0) * (model.head_dim or 0) for number in (model.heads, model.groups))
    hidden, ffn = model.hidden, model.ffn
    wanted = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (values, hidden), "self_attn.v_proj":
              (values, hidden), "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj":
              (ffn, hidden), "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,),
              "post_attention_layernorm": (hidden,)}  # fmt: skip
    names = {f"model.layers.{layer}.{part}.weight": size for layer in range(model.layers or 0)
             for part, size in wanted.items()} | {"model.embed_tokens.weight": None, "model.norm.weight": (hidden,)}
    if lost := next((name for name in names if name not in shapes), None):
        like = next((name for name in shapes if name.endswith(lost.rpartition(".layers.")[2])), None)
        raise _error(folder, f"the weights lack {lost}", like or f"{len(shapes)} others, such as {next(iter(shapes))}"
                     if shapes else "no tensor at all", "save the whole model with transformers' names, neither fused "
                     "nor wrapped, or fetch it again")
    for name, size in names.items():
        if size and all(size) and shapes[name] != size:
            raise _misshapen(folder, name, shapes[name], size)


def _special_tokens(folder: Path, constants: Mapping[str, object]) -> None:
    """Tokens that end an answer or pad are the model's. Special tokens stand at the start of tokenizer.json."""
    vocab, ids = constants.get("vocab_size"), constants.get("eos_token_id")
    end_tokens = {("config.json", one) for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    end_tokens |= {("generation_config.json", one) for one in found_in(folder / "generation_config.json",
                                                                       ["eos_token_id"]) if isinstance(one, int)}
    try:
        text = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        with (folder / "tokenizer.json").open("rb") as file:
            start = file.read(LOOKED_AT).decode("utf-8", "ignore")
        spelled = rf'"id":\s*(\d+),\s*"content":\s*{re.escape(json.dumps(text, ensure_ascii=False))}'
        end_tokens |= {("tokenizer.json", int(one)) for one in re.findall(spelled, start)}
    except (OSError, ValueError, AttributeError):  # the start says what is wrong with it
        pass
    used, pad = [(name, one, "ends a sequence") for name, one in sorted(end_tokens)], constants.get("pad_token_id")
    if isinstance(pad, int) and pad >= 0:  # transformers does not build a model with one beyond its rows
        used.append(("config.json", pad, "pads"))
    for name, one, does in used:
        if isinstance(vocab, int) and not 0 <= one < vocab:
            raise _error(folder / name, f"the token that {does} is none of the model's",
                         f"{one}, and config.json has a vocab_size of {vocab}",
                         "tokenizer, config.json and weights have to be of one checkpoint")


def _misshapen(folder: Path, name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> CheckpointError:
    return _error(folder, "the tensors do not fit the sizes that config.json states",
                  f"misshapen {name}: {shape}, not {wanted}", "both files have to be of one checkpoint")


def _error(path: Path, what: str, got: object, fix: str) -> CheckpointError:
    return CheckpointError(what, got=got, who=str(path), fix=fix)
