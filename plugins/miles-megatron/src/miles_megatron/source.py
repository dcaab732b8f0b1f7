"""Reads megatron-core's option classes as syntax trees. `surface` caches what this returns."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from dataclasses import replace
from pathlib import Path

from miles_core.config.options import brief
from miles_core.errors import ConfigError
from miles_megatron.surface import ENUMS, SOURCES, SurfaceField

# Parameters of the two signatures that a user may set. The rest is placement (pre_process), derived (vocab_size) or
# for what Miles does itself (Megatron's loss). The scheduler counts in samples and Miles in optimizer steps, so the
# lengths of a schedule are options of Miles's own.
PARAMETERS = {
    "GPTModel": (
        "share_embeddings_and_output_weights",
        "position_embedding_type",
        "rotary_percent",
        "rotary_base",
        "rope_scaling",
        "rope_scaling_factor",
        "seq_len_interpolation_factor",
    ),
    "OptimizerParamScheduler": ("lr_decay_style",),
}

# Callables that are architecture constants in truth: a name from this list stands for the function of that name.
NAMED_CALLABLES = {"activation_func": ("gelu", "quick_gelu", "relu", "silu", "squared_relu")}

SCALARS = ("int", "float", "bool", "str")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8", "int16": "int16"}
ARITHMETIC = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.Add: operator.add, ast.Sub: operator.sub}

# TransformerConfig mixes what a model is with how it is run. These of its fields change speed, memory or numerics
# of the same architecture, so they belong to [perf]; everything else in it belongs to [model].
PERF = re.compile(
    r"recompute_|distribute_saved_activations|.*_fusion$|fused_|fp8|fp4|first_last_layers_bf16|num_layers_at_|"
    r"tp_only_amax_red|disable_parameter_transpose_cache|activation_func_fp8|use_kitchen|kitchen_|cuda_graph_|"
    r"enable_cuda_graph|external_cuda_graph|.*offload|moe_token_dispatcher_type|moe_enable_deepep|moe_deepep_|"
    r"moe_hybridep_|moe_flex_|moe_grouped_gemm|moe_use_legacy_grouped_gemm|moe_shared_expert_overlap|"
    r"moe_layer_recompute|moe_router_padding_|moe_per_layer_logging|cp_comm_type|attention_backend|transformer_impl|"
    r"num_layers_in_(first|last)_pipeline|pipeline_model_parallel_layout|account_for_|mtp_standalone|"
    r"attention_softmax_in_fp32|memory_efficient_layer_norm|persist_layer_norm|symmetric_ar_type|"
    r"disable_bf16_reduced|flash_decode|batch_invariant_mode|use_te_|inference_|use_inference_|config_logger_dir|"
    r"clone_scatter_output|use_mamba_mem_eff_path|mlp_chunks_for_prefill|hetereogenous_dist_checkpoint|"
    r"cache_mla_latents|init_model_with_meta_device|use_fused_"
)


def read_surface(folder: Path) -> tuple[dict[str, SurfaceField], dict[str, str]]:
    """The options of the megatron-core under `folder`, and those left out with their owners."""
    trees = {name: _parse(folder / name) for name in {file for file, _ in SOURCES} | {ENUMS}}
    enums = _enums(trees[ENUMS])
    fields: dict[str, SurfaceField] = {}
    left_out: dict[str, str] = {}
    for file, owner in SOURCES:
        node = next((n for n in trees[file].body if isinstance(n, ast.ClassDef) and n.name == owner), None)
        if node is None:
            raise ConfigError(f"this megatron-core has no class {owner}", code="megatron-class-missing", who=file,
                              fix="install megatron-core 0.16.1")
        entries = _parameters(node) if owner in PARAMETERS else _attributes(node)
        for name, annotation, value, text in entries:
            field = _field(owner, name, annotation, value, text, enums)
            if field is None:
                left_out.setdefault(name, owner)
            else:
                _merge(fields, field)
    return fields, left_out


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError("megatron-core's source cannot be read", code="megatron-source-unreadable", got=error,
                          who=str(path), fix="install megatron-core 0.16.1") from error


def _enums(tree: ast.Module) -> dict[str, list[str]]:
    """Members of every enum class in a module, by class name."""
    return {
        node.name: [t.id for s in node.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases)
    }


def _attributes(node: ast.ClassDef):
    """(name, annotation, default, description) of each dataclass field; the description is the string after it."""
    for statement, after in itertools.pairwise([*node.body, ast.Pass()]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            known = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield statement.target.id, statement.annotation, statement.value, after.value.value if known else ""


def _parameters(node: ast.ClassDef):
    """The same of the chosen parameters of a class's __init__; descriptions come from its "Args:" section."""
    init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    text = ast.get_docstring(node) or ""
    about = dict(re.findall(r"^ +(\w+) \([^\n]*?\): *(.*?)(?=^ +\w+ \(|\Z)", text, re.MULTILINE | re.DOTALL))
    arguments = init.args.args
    defaults = [None] * (len(arguments) - len(init.args.defaults)) + init.args.defaults
    for parameter, value in zip(arguments, defaults, strict=True):
        if parameter.arg in PARAMETERS[node.name] and parameter.annotation is not None:
            yield parameter.arg, parameter.annotation, value, about.get(parameter.arg, "")


def _field(owner, name, annotation, value, text, enums) -> SurfaceField | None:
    """The option of one declaration, or None when no text can express it."""
    kinds = [f"choice[{'|'.join(NAMED_CALLABLES[name])}]"] if name in NAMED_CALLABLES else _types(annotation, enums)
    if name.startswith("_") or kinds in ([], ["None"]):
        return None
    has_default, default = _default(value)
    if has_default and default is None and "None" not in kinds:
        kinds.append("None")
    kinds = list(dict.fromkeys(kind for kind in kinds if kind != "None")) + ["None"] * ("None" in kinds)
    return SurfaceField(name, owner, " | ".join(kinds), default, brief(text), _table(owner, name), has_default)


def _types(node: ast.expr, enums: dict[str, list[str]]) -> list[str]:
    """The alternatives of an annotation that a flag can express; empty if there are none."""
    text = ast.unparse(node)
    if text == "None" or text in SCALARS:
        return [text]
    if text == "torch.dtype":
        return ["dtype"]
    if text in enums:
        return [f"choice[{'|'.join(enums[text])}]"]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _types(node.left, enums) + _types(node.right, enums)
    if not isinstance(node, ast.Subscript):
        return []
    head = ast.unparse(node.value).rpartition(".")[2]
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "Optional":
        return [*_types(inner[0], enums), "None"]
    if head == "Union":
        kinds = [kind for part in inner for kind in _types(part, enums)]
        # A free string already covers an enum's names.
        return [kind for kind in kinds if not (kind.startswith("choice[") and "str" in kinds)]
    if head == "Literal":
        return [f"choice[{'|'.join(str(ast.literal_eval(part)) for part in inner)}]"]
    if head.lower() in ("list", "tuple"):
        kinds = _types(inner[0], enums)
        return [f"list[{kinds[0]}]"] if len(kinds) == 1 and kinds[0] in SCALARS else []
    return []


def _default(node: ast.expr | None) -> tuple[bool, object]:
    """Whether there is a default, and it: plain data, or the text of any other expression."""
    if node is None:
        return False, None
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default_factory" in keywords:
            empty = {"list": [], "dict": {}, "tuple": []}
            factory = ast.unparse(keywords["default_factory"])
            return True, empty.get(factory, f"{factory}()")
        return _default(keywords.get("default"))
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        (_, left), (_, right) = _default(node.left), _default(node.right)
        return True, ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.Attribute):
        # torch.float32, AttnBackend.auto and F.gelu: the last word says it.
        return True, DTYPES.get(node.attr, node.attr)
    try:
        return True, ast.literal_eval(node)
    except ValueError:
        return True, ast.unparse(node)


def _table(owner: str, name: str) -> str:
    """The run-file table that a user of Miles would look for the option in."""
    if name == "calculate_per_token_loss":
        return "algorithm"
    if owner in ("ModelParallelConfig", "DistributedDataParallelConfig"):
        return "perf"
    if owner in ("OptimizerConfig", "OptimizerParamScheduler"):
        return "optimizer"
    return "perf" if PERF.match(name) else "model"


def _merge(fields: dict[str, SurfaceField], field: SurfaceField) -> None:
    """Adds a field, or lets a later owner say more about one that is there."""
    known = fields.setdefault(field.name, field)
    if known is field:
        return
    if (known.type, field.type) == ("int", "float"):
        # One value feeds both owners: the wider type holds (rotary_base).
        fields[field.name] = known = replace(known, type="float")
    if field.owner == "DistributedDataParallelConfig":
        # What the gradient buffers share with the optimizer is layout and communication.
        fields[field.name] = replace(known, table="perf")
