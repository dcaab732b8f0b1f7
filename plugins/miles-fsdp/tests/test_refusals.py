"""What a plan refuses with the trainer fsdp, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from miles_testing import tiny_checkpoint
from miles_testing.tiny import run_file

from miles_core.errors import MilesError
from miles_core.plugins.plan import prepare


@pytest.fixture
def plan(tmp_path):
    def made(*flags, experts=False):
        path = run_file(tmp_path / "run.toml", [], {"perf": {"trainer": "fsdp"}, "rollout": {"rollout_batch_size": 4}},
                        {}, checkpoint=tiny_checkpoint(experts=experts))
        return prepare(path, list(flags))

    return made


@pytest.mark.parametrize(("flags", "code", "fact"), [
    (["--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"], "fsdp-megatron-options",
     "tensor_model_parallel_size"),
    (["--plugin", "mtp"], "plugin-conflict", "mtp"),
    (["--mfu-peak-tflops", "989"], "fsdp-option-without-effect", "mfu_peak_tflops"),
    (["--balance-by-flops"], "fsdp-option-without-effect", "balance_by_flops"),
    (["--actor-num-gpus-per-node", "2", "--trainer-host", "thread"], "fsdp-thread-many-ranks", "2 ranks"),
    (["--actor-num-nodes", "2", "--placement", "local"], "fsdp-many-nodes", "actor_num_nodes = 2"),
    (["--actor-num-gpus-per-node", "3"], "fsdp-batch-not-divisible", "8 / 3"),
    (["--actor-num-gpus-per-node", "3", "--fsdp.context-parallel-size", "2"], "fsdp-context-size", "3 ranks, 2"),
    (["--actor-num-gpus-per-node", "3", "--fsdp.tensor-parallel-size", "2"], "fsdp-context-size", "3 ranks"),
    (["--actor-num-gpus-per-node", "4", "--fsdp.tensor-parallel-size", "2", "--fsdp.context-parallel-size", "2"],
     "fsdp-context-size", "4 ranks"),
    (["--actor-num-gpus-per-node", "2", "--fsdp.tensor-parallel-size", "2", "--optimizer", "muon"],
     "fsdp-tensor-muon", "muon"),
])  # fmt: skip
def test_what_would_have_no_effect_is_refused(plan, flags, code, fact):
    with pytest.raises(MilesError) as caught:
        plan(*flags)
    assert caught.value.code == code and fact in str(caught.value)


@pytest.mark.parametrize("name", ["fp8", "int4-qat"])
def test_plugins_that_change_megatrons_layers_are_refused(plan, name):
    """By name, or by options of Megatron-core that they imply."""
    with pytest.raises(MilesError) as caught:
        plan("--plugin", name)
    assert caught.value.code in ("plugin-conflict", "fsdp-megatron-options")


def test_functions_named_by_path_need_nothing_of_megatrons(plan):
    planned = plan("--dynamic-sampling-filter-path", "mine.keep", "--custom-megatron-before-train-step-hook-path",
                   "mine.step")
    assert "compat" in {one.manifest.name for one in planned.selected}


def test_routing_replay_needs_nothing_of_megatrons(plan):
    """What the plugin implies for Megatron's trainer is no reason to refuse it."""
    assert plan("--plugin", "r3", experts=True).config.surface("megatron") == {"moe_enable_routing_replay": True}


def test_every_plugin_with_a_hook_of_megatrons_trainer_is_in_conflict():
    """Or says that it takes modules: none of them is without effect, whichever comes next."""
    from miles_fsdp.plugin import Fsdp
    from miles_fsdp.refusals import MODULES

    from miles_core import hookspecs
    from miles_core.plugins.scan import KNOWN
    from miles_core.plugins.select import all_specs, readable

    theirs = {name for name, spec in all_specs().items()
              if spec.__module__ != hookspecs.__name__ and spec.role == "trainer" and spec.kind == "chain"}
    assert "build_model" in theirs
    able = {one.name for one in readable() if MODULES in one.provides}
    assert {plugin for plugin, offers in KNOWN.items()
            if theirs & {offer.partition(":")[0] for offer in offers}} - able <= {*Fsdp.conflicts}


@pytest.mark.parametrize("provides", [(), ("hf-modules",)])
def test_a_hook_that_builds_models_says_whether_it_takes_modules(plan, tmp_path, provides):
    """One of Megatron's would find none of the layers that it looks for."""
    from miles_fsdp.refusals import refuse_hooks

    from miles_core.plugins.bind import bind

    path = tmp_path / "mine.py"
    path.write_text("from miles_core import hookimpl\n\n\nclass Mine:\n    \"\"\"Mine.\"\"\"\n\n"
                    f"    provides = {provides!r}\n\n    @hookimpl\n    def build_model(self, chunk):\n"
                    "        return chunk\n")
    planned = plan("--plugin", str(path))
    hooks = bind(planned.selected, planned.config, "trainer")
    if provides:
        return refuse_hooks(hooks)
    with pytest.raises(MilesError) as caught:
        refuse_hooks(hooks)
    assert caught.value.code == "fsdp-hook-not-called" and "build_model" in str(caught.value)


def test_options_of_a_trainer_that_was_not_chosen_are_announced(plan):
    notes = plan("--trainer", "megatron", "--plugin", "fsdp", "--fsdp-cpu-offload").notes
    assert any("fsdp.cpu_offload" in one for one in notes)


def test_the_trainer_names_its_plugin_and_the_plan_says_what_it_takes(plan):
    from miles_fsdp.memory import lines, parameters
    from miles_fsdp.plugin import FsdpOptions

    planned = plan("--actor-num-gpus-per-node", "2")
    shared = plan("--actor-num-gpus-per-node", "2", "--fsdp.context-parallel-size", "2").to_text()
    assert "2 share the rows of a sample" in shared
    assert "fsdp" in {one.manifest.name for one in planned.selected}
    told = dict(lines(planned.config, FsdpOptions()))
    assert "2 trainer ranks" in told["layout"] and "optimizer" in told["memory"]
    import transformers

    count = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint()).num_parameters()
    assert parameters(tiny_checkpoint()) == count and parameters(tiny_checkpoint(), beside_text=True) == 0


def test_what_dynamo_puts_into_the_environment_is_there_before_a_rank_is_a_thread():
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    code = "import os, sys, miles_fsdp.plugin; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], 'torch' in sys.modules)"
    unset = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    printed = subprocess.run([sys.executable, "-c", code], env=unset, check=True, timeout=60, capture_output=True)
    assert printed.stdout.decode().split() == [default_cache_dir(), "False"]
