"""The surface read from source is the surface of the imported megatron-core, at a price --help can pay."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from miles_megatron import source, surface
from miles_megatron.plan_lines import lines

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

WARM_SECONDS = 0.15

# Prints every dataclass field of the really imported megatron-core with its default, as JSON.
IMPORTED = """
import dataclasses, enum, json, torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
dtypes = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
def plain(value):
    if isinstance(value, torch.dtype): return dtypes[value]
    if isinstance(value, enum.Enum): return value.name
    return value.__name__ if callable(value) else value
found = {}
kinds = (ModelParallelConfig, TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
for kind in kinds:
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        found.setdefault(field.name, [plain(default), getattr(field.type, "__name__", str(field.type))])
print(json.dumps(found))
"""

# Reads the surface as --help would and reports what that cost and what it dragged in.
WARM = """
import json, resource, sys
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
import dataclasses, pathlib
before = cpu()
from miles_megatron.surface import surface
count = len(surface())
heavy = {"torch", "megatron", "megatron.core", "pydantic"} & set(sys.modules)
print(json.dumps([cpu() - before, count, sorted(heavy)]))
"""


def python(code: str, **environment: str) -> object:
    """What a fresh interpreter prints as JSON in its last line."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, with nothing remembered in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    surface._load.cache_clear()
    yield tmp_path / "miles"
    surface._load.cache_clear()


@pytest.fixture(scope="module")
def imported() -> dict[str, list]:
    return python(IMPORTED)


@pytest.mark.full
def test_every_field_of_the_imported_dataclasses_is_found(imported):
    read = set(surface.surface()) | set(surface.inexpressible())
    parameters = {name for names in source.PARAMETERS.values() for name in names}
    assert read == set(imported) | parameters


def test_every_default_is_that_of_the_imported_dataclasses(imported):
    fields = surface.surface()
    wrong = {
        name: (fields[name].default, default)
        for name, (default, _) in imported.items()
        if name in fields and fields[name].owner not in source.PARAMETERS and fields[name].default != default
    }
    assert wrong == {}


def test_plain_types_are_those_of_the_imported_dataclasses(imported):
    """A scalar annotation is the type text itself; None joins it only where None is the default."""
    fields = surface.surface()
    wrong = {
        name: (fields[name].type, kind)
        for name, (default, kind) in imported.items()
        if kind in source.SCALARS and name in fields and fields[name].owner not in source.PARAMETERS
        and fields[name].type.removesuffix(" | None" if default is None else "") != kind
    }
    assert wrong == {}


def test_type_texts_are_canonical():
    one = r"(int|float|bool|str|dtype|choice\[[\w|.-]+\]|list\[(int|float|str)\])"
    for field in surface.surface().values():
        assert re.fullmatch(rf"{one}( \| {one})*( \| None)?", field.type), field


@pytest.mark.parametrize(("name", "kind", "default", "table"), [
    ("num_moe_experts", "int | None", None, "model"),
    ("attention_backend", "choice[flash|fused|unfused|local|auto]", "auto", "perf"),
    ("recompute_modules", "list[str] | None", None, "perf"),
    ("moe_layer_freq", "int | list[int]", 1, "model"),
    ("window_size", "list[int] | None", None, "model"),
    ("activation_func", "choice[gelu|quick_gelu|relu|silu|squared_relu]", "gelu", "model"),
    ("params_dtype", "dtype", "fp32", "perf"),
    ("rotary_base", "float", 10000, "model"),
    ("initial_loss_scale", "float", 2**32, "optimizer"),
    ("use_distributed_optimizer", "bool", False, "perf"),
    ("moe_token_dispatcher_type", "choice[allgather|alltoall|flex]", "allgather", "perf"),
    ("calculate_per_token_loss", "bool", False, "algorithm"),
])
def test_one_field_of_each_sort(name, kind, default, table):
    field = surface.surface()[name]
    assert (field.type, field.default, field.table) == (kind, default, table)


def test_a_parameter_without_a_default_says_so():
    assert not surface.surface()["lr_decay_style"].has_default


def test_help_is_one_line_and_there_for_almost_all():
    texts = [field.help for field in surface.surface().values()]
    assert not any("\n" in text for text in texts)
    assert sum(bool(text) for text in texts) > 0.95 * len(texts)


def test_what_no_text_can_express_is_listed_and_not_offered():
    assert {"timers", "init_method", "quant_recipe", "grad_scale_func"} <= set(surface.inexpressible())
    assert not set(surface.inexpressible()) & set(surface.surface())


def test_a_warm_read_is_cheap_and_imports_no_heavy_package(tmp_path):
    python(WARM, XDG_CACHE_HOME=str(tmp_path))
    seconds, count, heavy = python(WARM, XDG_CACHE_HOME=str(tmp_path))
    assert count > 300
    assert heavy == []
    assert seconds < WARM_SECONDS


def test_the_version_is_read_without_importing_the_package():
    from importlib.metadata import version

    assert surface.version() == version("megatron-core")


def test_the_cache_is_written_whole_and_used(fresh, monkeypatch):
    first = dict(surface.surface())
    assert [path.name for path in fresh.iterdir()] == [f"megatron-surface-{surface.version()}-{surface.SCHEMA}.json"]
    surface._load.cache_clear()
    monkeypatch.setattr(source, "read_surface", lambda folder: pytest.fail("read again"))
    assert dict(surface.surface()) == first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"stamp": 0}', "\x00", '{"fields": 1}'])
def test_an_unreadable_cache_is_rebuilt(fresh, content):
    count = len(surface.surface())
    file = next(fresh.iterdir())
    file.write_text(content)
    surface._load.cache_clear()
    assert len(surface.surface()) == count
    assert json.loads(file.read_text())["stamp"]


def test_a_cache_of_another_source_is_rebuilt(fresh):
    surface.surface()
    file = next(fresh.iterdir())
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "stamp": data["stamp"] + 1, "fields": []}))
    surface._load.cache_clear()
    assert len(surface.surface()) > 300


def test_an_unwritable_cache_folder_is_ignored(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    surface._load.cache_clear()
    assert len(surface.surface()) > 300
    surface._load.cache_clear()


def test_an_absent_megatron_core_is_named(monkeypatch):
    monkeypatch.setattr(surface.importlib.util, "find_spec", lambda name: None)
    surface.root.cache_clear()
    with pytest.raises(ConfigError, match="pip install megatron-core"):
        surface.root()
    surface.root.cache_clear()


def test_a_checkout_before_the_installed_one_is_named_in_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(Path(__file__).parents[3])
    config = prepare(Path("examples/demo.toml")).config
    assert surface.is_installed() and not [line for _, line in lines(config) if "megatron-core" in line]
    own = tmp_path / "megatron" / "core"
    shutil.copytree(surface.root(), own, ignore=lambda folder, names: [name for name in names if name.endswith(".so")])
    monkeypatch.syspath_prepend(str(tmp_path))
    surface.root.cache_clear()
    try:
        assert surface.root() == own and not surface.is_installed()
        assert [title for title, line in lines(config) if f"{surface.version()} of {own}" in line] == ["layout"]
    finally:
        surface.root.cache_clear()
