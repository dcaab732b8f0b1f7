"""What checkpoints call the tensors of multi-token-prediction layers, and which parameters they are. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from miles_megatron.specs import Rule, WeightMap

from miles_core.errors import ConfigError
from miles_core.reading import parse_json


@dataclass(frozen=True, slots=True)
class Names:
    """How one kind of checkpoint names its layers 0, 1, ...; {k} stands for the number, {n} for it counted on from the
    model's own.

    Args:
        layer: prefix of the transformer layer's tensors, whose rest is called as in the model's own layers.
        embedding_norm, hidden_norm: of the two inputs.
        projection: of both, side by side.
        final_norm: before the output layer.
        hidden_first: the projection takes the hidden state before the embedding.
        copies: of the model's own embedding and output layer, which layers share with it and which are not read.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    copies: tuple[str, ...] = ()

    def rules(self, weight_map: WeightMap, count: int) -> tuple[Rule, ...]:
        """`count` layers made like the model's last one."""
        layers = _depth(weight_map)
        # What a checkpoint need not have is another plugin's, for instance an adapter.
        last = [rule for rule in weight_map.rules if rule.layers and layers - 1 in rule.layers and not rule.optional]
        rules = []
        for k in range(count):
            ours, place = f"mtp.layers.{k}.", {"k": k, "n": layers + k}
            own = {"enorm": self.embedding_norm, "hnorm": self.hidden_norm, "eh_proj": self.projection}
            if self.hidden_first:  # Megatron's first norm is that of the projection's first half (layers.HiddenFirst)
                own |= {"enorm": self.hidden_norm, "hnorm": self.embedding_norm}
            rules += [Rule(f"{ours}{name}.weight", (theirs.format(**place),), optional=True)
                      for name, theirs in own.items()]
            prefix = self.layer.format(**place)
            rules += [
                replace(rule, megatron=f"{ours}transformer_layer.{_inside(rule.megatron)}", layers=None, optional=True,
                        hf=tuple(prefix + _inside(name) for name in rule.hf))
                for rule in last
            ]
            rules.append(Rule(f"{ours}final_layernorm.weight", (self.final_norm.format(**place),), optional=True))
        return tuple(rules)

    def unread(self, weight_map: WeightMap, count: int) -> frozenset[str]:
        """The copies' names."""
        layers = _depth(weight_map)
        return frozenset(name.format(k=k, n=layers + k) for name in self.copies for k in range(count))


SCHEMES = MappingProxyType({
    # Qwen3-Next and Qwen3.5; what SGLang's draft of Qwen3-MoE reads. There is one such layer at most.
    "mtp": Names("mtp.layers.{k}.", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
                 "mtp.fc.weight", "mtp.norm.weight"),
    # DeepSeek-V3 (arXiv:2412.19437, section 2.2) and GLM-4.5.
    "nextn": Names("model.layers.{n}.", "model.layers.{n}.enorm.weight", "model.layers.{n}.hnorm.weight",
                   "model.layers.{n}.eh_proj.weight", "model.layers.{n}.shared_head.norm.weight",
                   copies=("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight")),
    # MiMo (arXiv:2505.07608).
    "mimo": Names("model.mtp_layers.{k}.", "model.mtp_layers.{k}.token_layernorm.weight",
                  "model.mtp_layers.{k}.hidden_layernorm.weight", "model.mtp_layers.{k}.input_proj.weight",
                  "model.mtp_layers.{k}.final_layernorm.weight", hidden_first=True),
})  # fmt: skip
"""By the names that the option `names` takes."""


COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""What config.json calls their number, by family; the first where it has none of them."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a run has: how many, under which names, whether the checkpoint has them, and the key of
    config.json that counts them."""

    count: int
    scheme: str
    stored: bool
    counted: str = COUNTS[0]

    @property
    def names(self) -> Names:
        return SCHEMES[self.scheme]

    def prefixes(self, weight_map: WeightMap) -> tuple[str, ...]:
        """Of the tensors of each transformer layer, however they are packed."""
        depth = _depth(weight_map)
        return tuple(self.names.layer.format(k=k, n=depth + k) for k in range(self.count))

    def added(self, weight_map: WeightMap) -> WeightMap:
        """The map with these layers, which what is written has as well, by whatever names."""
        return replace(weight_map, rules=(*weight_map.rules, *self.names.rules(weight_map, self.count)), left_counts=(),
                       added_counts=() if self.stored else ((self.counted, self.count),),
                       ignored=weight_map.ignored | self.names.unread(weight_map, self.count))


def layers_of(folder: Path, number: int | None, scheme: str) -> Layers:
    """The layers of a Hugging Face directory, or those that a run adds to it.

    Args:
        number: --mtp-num-layers.
        scheme: a name of SCHEMES, or "auto".

    Raises:
        ConfigError: the checkpoint has another number of them, or other names; several layers under names for one.
        CheckpointError: the files' index or headers cannot be read.
    """
    present, (layers, counted) = _present(folder), _of_config(folder)
    counts = {name: _count(names, present, layers) for name, names in SCHEMES.items()}
    stored = next((name for name, count in counts.items() if count), None)
    if stored is not None:
        if number not in (None, counts[stored]):
            raise ConfigError("the checkpoint has a different number of multi-token-prediction layers",
                              got=counts[stored], code="mtp-layer-count-differs",
                              who=f"--mtp-num-layers {number}, {folder}", fix="leave --mtp-num-layers out")
        if scheme not in ("auto", stored):
            raise ConfigError("the checkpoint uses other names for its multi-token-prediction layers", got=stored,
                              who=f"mtp.names {scheme}, {folder}", code="mtp-names-differ", fix="leave mtp.names out")
        return Layers(counts[stored], stored, True, counted)
    number = number or 1
    scheme = ("mtp" if number == 1 else "nextn") if scheme == "auto" else scheme
    if scheme == "mtp" and number > 1:
        raise ConfigError("the names mtp.* are for one layer", got=f"--mtp-num-layers {number}", who="mtp.names mtp",
                          fix="write --mtp.names nextn, or leave it out", code="mtp-names-need-one-layer")
    return Layers(number, scheme, False, counted)


def _count(names: Names, present: Collection[str], layers: int) -> int:
    if names.projection.format(k=0, n=layers) not in present:
        return 0
    if "{" not in names.projection:  # no number in it: one for all
        return 1
    return next(k for k in range(1, len(present) + 1) if names.projection.format(k=k, n=layers + k) not in present)


def _depth(weight_map: WeightMap) -> int:
    """Layers of the model itself."""
    return 1 + max(layer for rule in weight_map.rules for layer in rule.layers or ())


def _present(folder: Path) -> Collection[str]:
    """Names of a folder's tensors; none where it holds a configuration alone."""
    from miles_megatron.shards import tensor_files

    return tensor_files(folder) if any(folder.glob("*.safetensors")) else ()


def _of_config(folder: Path) -> tuple[int, str]:
    """(how many layers the model has of its own, the key that counts those for drafting)."""
    path = folder / "config.json"
    try:
        hf_config = parse_json(path.read_text(encoding="utf-8"))
        inside = hf_config.get("text_config", hf_config)
        return int(inside["num_hidden_layers"]), next((key for key in COUNTS if key in inside), COUNTS[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError("config.json does not say how many layers the model has", got=str(error), who=str(path),
                          fix="fetch the checkpoint again", code="mtp-layer-count-unknown") from error


def _inside(name: str) -> str:
    """What stands behind the number of the layer."""
    return name.partition("{layer}.")[2]
