"""The argument surface of the installed megatron-core, read from its source without importing it.

Importing megatron-core costs about 4.8 CPU seconds and pulls torch in; `miles --help`, `--plan` and every check
that must come before torch cannot pay that. The dataclasses and two signatures that hold all of Megatron's options
are plain source, so they are parsed (about 0.05 s, once per version) and the result is kept (cache.py).

Type texts are alternatives joined by " | ", each one of: int, float, bool, str, dtype, choice[a|b], list[int],
list[float], list[str], and None last when the option may be unset. A dtype is written fp32, bf16, fp16, fp8 ...
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from miles_core.errors import ConfigError
from miles_megatron import cache

# Raised when the shape or the meaning of the cached JSON changes, so that an older file is not read.
SCHEMA = 1

# Files below megatron/core that are read, in the order in which owners are decided: a name that several classes
# hold (bf16, use_distributed_optimizer ...) means the same in each, so the first owner speaks for all.
SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("models/gpt/gpt_model.py", "GPTModel"),
    ("transformer/transformer_config.py", "MLATransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ("optimizer_param_scheduler.py", "OptimizerParamScheduler"),
)
ENUMS = "transformer/enums.py"


@dataclass(frozen=True, slots=True)
class SurfaceField:
    """One option of megatron-core.

    Args:
        name: the field or parameter name, such as "num_moe_experts".
        owner: the class that declares it.
        type: canonical type text, see the module docstring.
        default: the default as JSON, or the text of its expression when it is not a plain value.
        help: the first sentences of upstream's description, on one line; empty where it has none.
        table: the run-file table of the key: "model", "perf", "optimizer" or, for one field, "algorithm".
        has_default: False where megatron-core demands a value; `default` is then None and means nothing.
    """

    name: str
    owner: str
    type: str
    default: object
    help: str
    table: str
    has_default: bool = True


def surface() -> Mapping[str, SurfaceField]:
    """Every option that a flag or a run-file key can express, by field name, in the order of the source."""
    return _load()[0]


def inexpressible() -> Mapping[str, str]:
    """Fields that no text can express (callables, timers, contexts), with the owner of each."""
    return _load()[1]


def version() -> str:
    """The version of the installed megatron-core, from its package_info.py."""
    text = (root() / "package_info.py").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)", text, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**{"PRE_RELEASE": "", **parts})


def is_installed() -> bool:
    """Whether `root` is the installed distribution's, and not that of a checkout before it on the path."""
    try:
        installed = metadata.distribution("megatron-core").locate_file("megatron/core")
        return root().samefile(str(installed))
    except (metadata.PackageNotFoundError, FileNotFoundError):
        return False


@functools.lru_cache(maxsize=1)
def root() -> Path:
    """The folder of megatron.core.

    Asking for the spec of "megatron.core" would execute its __init__, hence torch; "megatron" is a namespace
    package, whose spec runs nothing, and the rest of the way is by path.
    """
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "core"
        if (folder / "package_info.py").is_file():
            return folder
    raise ConfigError("megatron-core is not installed", code="megatron-not-installed", who="trainer megatron",
                      fix="pip install megatron-core==0.16.1")


@functools.lru_cache(maxsize=1)
def _load() -> tuple[Mapping[str, SurfaceField], Mapping[str, str]]:
    folder = root()
    files = [folder / name for name in sorted({file for file, _ in SOURCES} | {ENUMS})]
    stamp = cache.stamp([*files, Path(__file__).with_name("source.py")])
    data = cache.cached(f"megatron-surface-{version()}-{SCHEMA}", stamp, lambda: _read(folder))
    fields = {entry["name"]: SurfaceField(**entry) for entry in data["fields"]}
    return MappingProxyType(fields), MappingProxyType(data["inexpressible"])


def _read(folder: Path) -> dict:
    # Only now: a warm start has no use for the reader.
    from miles_megatron.source import read_surface

    fields, left_out = read_surface(folder)
    return {"fields": [asdict(field) for field in fields.values()], "inexpressible": left_out}
