import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from miles_local import rendezvous
from miles_megatron import cpu

from miles_core.errors import ConfigError
from miles_core.types import Rank


def core() -> Path:
    return Path(importlib.util.find_spec("megatron").submodule_search_locations[0], "core")


def source_of(module: str) -> str:
    path = Path(core().parent, *module.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.fixture(scope="module")
def all_sources():
    return [path.read_text() for path in core().rglob("*.py")]


@pytest.mark.parametrize("rule", cpu.RULES, ids=lambda rule: rule.name)
def test_a_rule_is_still_needed(rule, all_sources):
    sources = all_sources if rule.module is None else [source_of(rule.module)]
    assert any(rule.pattern.search(source) for source in sources), f"{rule.name} finds nothing: remove it"
    assert rule.why


@pytest.mark.parametrize("rule", [r for r in cpu.RULES if r.module], ids=lambda rule: rule.name)
def test_a_mended_module_compiles_and_is_mended_once(rule):
    source = source_of(rule.module)
    mended, count = rule.pattern.subn(rule.replacement, source)
    assert count >= 1 and mended != source
    compile(mended, rule.module, "exec", dont_inherit=True)


def test_a_megatron_that_a_rule_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"router gemm.*megatron-core 0\.16\.1"):
        cpu.patched("megatron.core.transformer.moe.moe_utils", "    if torch.is_tensor(tensor) and tensor.is_cuda:\n")


def test_install_is_idempotent():
    cpu.install()
    before = list(sys.meta_path)
    cpu.install()
    assert sys.meta_path == before


def test_torch_itself_is_untouched(megatron):
    import torch

    assert "cuda" in torch.cuda.current_device.__module__
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_install_after_megatron_is_refused():
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from miles_megatron import cpu\n"
        "try: cpu.install()\nexcept Exception as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy(),
                         cwd=Path(cpu.__file__).parents[4], check=True).stdout  # fmt: skip
    assert "megatron.core was imported before" in out and "Fix:" in out


EARLY = """
from megatron.core import parallel_state
from miles_core import hookimpl

class Early:
    name = "early"

    @hookimpl
    def megatron_init(self, config):
        parallel_state.get_data_parallel_rank()
"""


@pytest.mark.full
def test_a_plugin_file_may_import_megatron_at_its_top(tmp_path):
    """In the trainer plugins are imported before the trainer's own modules are."""
    (tmp_path / "early.py").write_text(EARLY)
    code = (
        "import warnings; warnings.simplefilter('error', UserWarning)\n"
        "from miles_core.config.tables import RunConfig\n"
        "from miles_core.plugins import bind, select\n"
        f"chosen = select.select([({str(tmp_path / 'early.py')!r}, 'flag')], select.built_in())\n"
        "hooks = bind.bind(chosen, RunConfig(), 'trainer')\n"
        "from miles_megatron import cpu, step\n"
        "cpu.initialize(); hooks.megatron_init(None); print('initialised')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy(),
                          cwd=Path(cpu.__file__).parents[4])  # fmt: skip
    assert done.returncode == 0 and "initialised" in done.stdout, done.stderr


HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy",
         "torch.distributed.checkpoint", "torch.utils.tensorboard", "torch.utils.cpp_extension", "wandb")


@pytest.mark.skipif(not cpu.no_cuda(), reason="with CUDA these are wanted")
def test_the_trainer_imports_nothing_that_it_does_not_use():
    code = (
        "import sys\nfrom miles_megatron import cpu, step\n"
        "import torch\nfrom miles_megatron.adam import AdamW\n"
        "weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)\n"
        "optimizer = AdamW([{'params': [weight]}], lr=0.1)\n"
        "optimizer.step(); optimizer.zero_grad(); optimizer.state_dict()\n"
        "for wanted in (True, False):\n"
        "    cpu.deterministic(wanted); assert torch.are_deterministic_algorithms_enabled() is wanted\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         cwd=Path(cpu.__file__).parents[4]).stdout  # fmt: skip
    assert out.strip() == "[]"


def test_what_is_left_out_is_refused_with_a_sentence(megatron):
    from megatron.core import utils
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if cpu.no_cuda():
        assert not utils.HAVE_DTENSOR and not mcore_fsdp_adapter.HAVE_MEGATRON_FSDP
        assert "does not train with FSDP" in str(mcore_fsdp_adapter.IMPORT_MEGATRON_FSDP_ERROR)


def test_one_process_needs_no_port(megatron):
    import torch.distributed as dist

    cpu.process_group()
    assert dist.get_world_size() == 1 and dist.get_backend() == rendezvous.host_backend()


@pytest.mark.parametrize("seen", [0, 2])
def test_a_rank_whose_gpu_is_not_there_says_so_before_it_is_taken(seen, monkeypatch):
    """A placement that counts on GPUs gets none computed on the CPU; one that does not, may."""
    import torch
    import torch.distributed as dist

    taken = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises(ConfigError, match=rf"trainer rank 5 on {platform.node()}: no GPU 3.*got {seen} GPUs"):
        cpu.process_group(Rank(5, 8, 3, gpu=True))
    assert not taken
    cpu._take_gpu(Rank(1, 8, 1))
    assert taken == ([1] if seen else [])


def test_a_layout_that_does_not_divide_is_refused(megatron):
    with pytest.raises(ConfigError, match="do not divide"):
        cpu.initialize(tensor=2)


def test_the_generator_tracker_tracks_the_cpu_generator(megatron):
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), first)


def test_a_layout_after_another_leaves_no_groups_behind(megatron):
    """Each would be a thread of gloo that wakes all the time."""
    import torch.distributed as dist

    cpu.initialize()
    before = len(dist.distributed_c10d._world.pg_map)
    cpu.initialize()
    assert len(dist.distributed_c10d._world.pg_map) == before
