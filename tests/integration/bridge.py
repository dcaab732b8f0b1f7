"""The weight maps of megatron-bridge, read from its source, for its modules import Transformer Engine.

What a bridge registers is a list of mappings, made by plain Python from names and the model's config. Its method
`mapping_registry` is compiled from the source and called; classes of mappings stand for their arguments, and functions
of other modules of the package come from their source in the same way. Nothing of the package is imported.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE, BASE = "megatron.bridge", "MegatronModelBridge"
ORDER = ("q", "k", "v", "gate", "up", "qkv", "z", "qkvz", "b", "a", "ba")
"""How their mappings call the tensors that one parameter is made of."""
OURS = {
    r"^language_model\.": "",
    r"self_attention\.linear_(q|kv)_(down|up)_proj\.weight": r"self_attention.\1_\2.weight",
    r"self_attention\.linear_q_proj\.weight": "self_attention.q_up.weight",
    r"self_attention\.(linear_qkv|in_proj)\.layer_norm_weight": "input_layernorm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight": "pre_mlp_layernorm.weight",
    r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight": r"self_attention.\1_norm.weight",
    r"self_attention\.linear_proj\.post_layernorm": "self_attn_bda.norm",
    r"mlp\.linear_fc2\.post_layernorm": "mlp_bda.norm",
    r"core_attention\.softmax_offset": "core_attention.sinks",
    r"core_attention\.indexer\.linear_wq_b": "indexer.q_up",
    r"core_attention\.indexer\.linear_wk": "indexer.key",
    r"core_attention\.indexer\.linear_weights_proj": "indexer.share",
    r"core_attention\.indexer\.k_norm": "indexer.norm",
    r"self_attention\.conv1d\.weight": "self_attention.conv_weight",
    r"self_attention\.out_norm\.weight": "self_attention.norm_weight",
    r"mlp\.experts\.(linear_fc\d)\.(weight|bias)\*": r"mlp.experts.local_experts.*.\1.\2",
}
"""Names of parameters of Transformer Engine's layers, which fuse a norm with what follows, and of layers that each of
the two projects has its own of -> what they are called here."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one parameter and tensors of a checkpoint stand for each other.

    Args:
        kind: the class that transforms them.
        megatron: the parameter; * for the number of a layer or an expert.
        hf: the tensors.
    """

    kind: str
    megatron: str
    hf: tuple[str, ...]

    def of(self, parameter: str) -> tuple[str, ...] | None:
        """The tensors of a parameter, in order; None where this is no mapping of it."""
        pattern = self.megatron
        for theirs, ours in OURS.items():
            pattern = re.sub(theirs, ours, pattern)
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), parameter)
        if match is None:
            return None
        return tuple(_filled(name, match.groups()) for name in self.hf)


def _filled(name: str, numbers: tuple[str, ...]) -> str:
    parts = name.split("*")
    return "".join(part + (numbers[i] if i + 1 < len(parts) else "") for i, part in enumerate(parts))


def folder() -> Path | None:
    """Where the package lies; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else None


@functools.cache
def bridges(root: Path) -> dict[str, tuple[str, str]]:
    """Architecture of config.json -> (module, class) of the bridge that is registered for it."""
    registered: dict[str, tuple[str, str]] = {}
    for path in sorted((root / "models").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "register_bridge(" not in text:
            continue
        module = ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts))
        tree = ast.parse(text)
        words = {target.id: node.value.value for node in tree.body if isinstance(node, ast.Assign)
                 and isinstance(node.value, ast.Constant) for target in node.targets if isinstance(target, ast.Name)}
        for node in (one for one in tree.body if isinstance(one, ast.ClassDef)):
            for source in _sources(node):
                name = source.value if isinstance(source, ast.Constant) else words.get(source.id, source.id)
                registered[str(name)] = module, node.name
    return registered


def _sources(node: ast.ClassDef) -> Iterator[Any]:
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register_bridge":
            yield from (word.value for word in call.keywords if word.arg == "source")


class _Silent(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_words: None  # a class method that registers something elsewhere


class Module(dict[str, Any]):
    """The names of one module, from its source; those of other modules of the package when they are asked for."""

    def __init__(self, root: Path, name: str):
        super().__init__(__name__=name, torch=torch, re=re)
        self._root = root
        path = root.joinpath(*name.removeprefix(PACKAGE + ".").split(".")).with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self._from = {alias.asname or alias.name: str(node.module) for node in ast.walk(tree)
                      if isinstance(node, ast.ImportFrom) for alias in node.names}
        self._nodes = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self._nodes |= {target.id: node for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                        if isinstance(target, ast.Name)}

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        self[name] = value = self._value(name)
        return value

    def _value(self, name: str) -> Any:
        if re.search("Mapping|Registry", name):
            return _KINDS.setdefault(name, _Silent(name, (), {"__init__": _keep}))
        if name == BASE:
            return object
        if name in self._nodes:
            return self._made(self._nodes[name])
        module = self._from.get(name, "")
        if module.startswith(PACKAGE) and self._file(module).is_file():
            return Module(self._root, module)[name]
        return None  # of a package that plays no part in the names

    def _file(self, module: str) -> Path:
        return self._root.joinpath(*module.split(".")[2:]).with_suffix(".py")

    def _made(self, node: Any) -> Any:
        node.decorator_list = [one for one in getattr(node, "decorator_list", []) if isinstance(one, ast.Name)
                               and one.id in ("staticmethod", "classmethod", "property")]
        if isinstance(node, ast.ClassDef):
            node.bases = [base for base in node.bases if isinstance(base, ast.Name)
                          and isinstance(self.get(base.id) or self[base.id], type)]
            node.keywords = []
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    method.decorator_list = [one for one in method.decorator_list if isinstance(one, ast.Name)]
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        exec(compile(ast.fix_missing_locations(ast.Module([future, node], [])), str(self["__name__"]), "exec"), self)
        return self[node.targets[0].id if isinstance(node, ast.Assign) else node.name]


_KINDS: dict[str, type] = {}
"""Stand-ins of the classes of mappings, and of their registry, by name: one for all modules."""


def _keep(self: Any, *positions: Any, **words: Any) -> None:
    words |= dict(zip(("megatron_param", "hf_param"), positions, strict=False))
    self.mappings, self.megatron_param = positions, words.pop("megatron_param", "")
    self.hf_param = words.get("hf_param") or {word: words[word] for word in ORDER if word in words}


def mappings(root: Path, architecture: str, hf: Any) -> list[Mapping]:
    """Of the bridge of an architecture, for one config."""
    module, name = bridges(root)[architecture]
    bridge = object.__new__(Module(root, module)[name])
    bridge.hf_config = bridge._hf_config = hf
    bridge.hf_pretrained = None
    return [Mapping(type(one).__name__, one.megatron_param, tuple(
        [one.hf_param] if isinstance(one.hf_param, str) else one.hf_param.values()))
        for one in bridge.mapping_registry().mappings]
