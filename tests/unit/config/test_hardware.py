"""What follows from the hardware that a run asks for, and yields to what somebody says; what excludes itself."""

import pytest
from miles_sglang import hardware

from miles_core.errors import ConfigError

BATCH = ("--rollout-batch-size", 8, "--n-samples-per-prompt", 4)


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch):
    """A machine without GPUs or SGLang, whatever it has."""
    machine(monkeypatch, gpus=0, sglang=False)


def machine(monkeypatch, gpus, sglang):
    monkeypatch.setattr(hardware, "gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "folder_of", lambda package: sglang or None)


SGLANG = ("--engine", "sglang")
GPUS = "perf.rollout_num_gpus"

# flags -> what they imply
IMPLIED = [
    ((), {"rollout.engine": None, GPUS: None, "perf.weight_sync": "in-process", "perf.placement": "local"}),
    (("--actor-num-gpus-per-node", 2), {"perf.weight_sync": "shared-memory", "perf.trainer_host": "process"}),
    (SGLANG, {GPUS: 1, "perf.weight_sync": "broadcast", "sglang.router": "none", "perf.offload_train": None}),
    ((*SGLANG, "--rollout-num-gpus-per-engine", 4), {GPUS: 4, "sglang.router": "none"}),
    ((*SGLANG, "--rollout-num-gpus", 4), {GPUS: 4, "sglang.router": "smg"}),
    ((*SGLANG, "--colocate", "--actor-num-gpus-per-node", 8),
     {GPUS: 8, "perf.offload_train": True, "perf.offload_rollout": True, "perf.weight_sync": "ipc",
      "sglang.router": "smg", "perf.placement": "local"}),
    ((*SGLANG, "--colocate", "--no-offload-train"), {"perf.offload_train": False, "perf.offload_rollout": True}),
    ((*SGLANG, "--colocate", "--debug-rollout-only"), {"perf.offload_train": False, "perf.offload_rollout": False}),
    ((*SGLANG, "--offload"), {"perf.offload_train": True, "perf.offload_rollout": True}),
    ((*SGLANG, "--colocate", "--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 2), {GPUS: 2}),
    ((*SGLANG, "--actor-num-nodes", 2), {"perf.placement": "ray", GPUS: 1}),
    ((*SGLANG, "--rollout-num-gpus-per-engine", 16), {"perf.placement": "ray", GPUS: 16}),
    ((*SGLANG, "--rollout-num-gpus-per-engine", 16, "--placement", "local"), {"perf.placement": "local"}),
    (("--rollout-external", "--rollout-external-engine-addrs", "a:1", "b:2"),
     {"rollout.engine": "sglang", GPUS: 2, "sglang.router": "smg", "perf.weight_sync": "broadcast"}),
    ((*SGLANG, "--weight-sync", "disk", "--update-weight-disk-dir", "x"), {"perf.weight_sync": "disk"}),
    ((*SGLANG, "--router-ip", "10.0.0.9", "--sglang-router-port", 1), {"sglang.router": "smg"}),
    ((*SGLANG, "--sglang-dtype", "float32"), {"rollout.engine_dtype": "float32"}),
    ((*SGLANG, "--sglang-context-length", 512), {"rollout.rollout_max_context_len": 512}),
    ((*SGLANG, "--sglang-context-length", 512, "--rollout-max-context-len", 100),
     {"rollout.rollout_max_context_len": 100}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "values"), IMPLIED, ids=[" ".join(map(str, flags)) for flags, _ in IMPLIED])
def test_what_is_not_said_is_derived_and_what_is_said_stands(plan, flags, values):
    options = plan(*flags, *BATCH).to_json()["options"]
    assert {key: options[key] for key in values} == values


def test_the_plan_says_what_colocate_implies_and_where_it_is_from(plan):
    text = plan(*SGLANG, "--colocate", "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 2).to_text()
    for line in ("  perf.rollout_num_gpus = 4  (--colocate)", "  perf.offload_train = True  (--colocate)",
                 "  2 SGLang engines of 2 GPUs, bfloat16; router smg",
                 "  placement local, GPUs: trainer and engines alternate on 4",
                 "  weights travel by ipc, in buckets of at most 512 MiB"):
        assert line in text.splitlines()
    assert "in the driver's process" not in text and "in the driver's process" in plan().to_text()


def test_a_run_without_an_engine_plans_none(plan):
    """Supervised fine-tuning that evaluates nothing: no servers, no weight sync, and nobody to park the trainer for."""
    flags = (*SGLANG, "--colocate", "--generate", "sft", "--loss-type", "sft_loss", "--n-samples-per-prompt", 1)
    made = plan(*flags)
    text = made.to_text()
    assert "  no engine" in text and "SGLang engine" not in text and "KV cache" not in text
    assert made.config.debug.debug_train_only and not made.config.perf.offload_train
    assert not {"engine", "weight_sync"} & {one.hook for one in made.choices}
    sent = plan(*flags, "--weight-sync", "shared-memory").config
    assert sent.perf.weight_sync == "shared-memory" and not sent.understood, "a replay may name what is not used"
    assert "SGLang engine" in plan(*flags, "--eval-prompt-data", made.config.rollout.prompt_data,
                                    "--eval-interval", 1).to_text()


def test_the_plan_says_by_how_many_processes_answers_are_read(plan, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)), raising=False)
    line = "  answers are read by {} beside the driver"
    assert line.format("4 processes") in plan(*SGLANG).to_text().splitlines()
    assert line.format("1 process") in plan(*SGLANG, "--readers", 1).to_text().splitlines()
    assert "answers are read" not in plan(*SGLANG, "--readers", 0).to_text()


def test_a_context_beyond_config_json_is_taken_with_a_note(plan, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 128}')
    made = plan(*SGLANG, "--sglang-context-length", 4096, "--hf-checkpoint", tmp_path, "--plan-without-weights")
    assert made.config.rollout.rollout_max_context_len == 4096
    assert any("longer than the 128" in one for one in made.notes)


@pytest.mark.parametrize(("given", "note"), [
    (4, "--rollout-num-gpus is not needed with --colocate"), (2, "2 of the trainer's 4 GPUs are idle"),
    (8, "8 is ignored"),
])
def test_gpus_of_colocated_engines_are_noted(plan, given, note):
    made = plan(*SGLANG, "--colocate", "--actor-num-gpus-per-node", 4, "--rollout-num-gpus", given)
    assert any(note in one for one in made.notes)
    assert made.config.perf.rollout_num_gpus == min(given, 4)


@pytest.mark.parametrize(("gpus", "sglang", "engine"), [(0, True, None), (2, False, None), (1, True, None),
                                                       (2, True, "sglang")])
def test_the_engine_is_sglang_where_a_gpu_and_sglang_are(plan, monkeypatch, gpus, sglang, engine):
    machine(monkeypatch, gpus, sglang)
    made = plan("--bf16")
    assert made.config.rollout.engine == engine
    assert made.owner("engine").name == (engine or "local")
    assert plan("--engine", "local").owner("engine").name == "local"


@pytest.mark.parametrize(("gpus", "flags", "engine", "noted"), [
    (2, (), None, True), (2, ("--engine-dtype", "bfloat16"), "sglang", False), (1, (), None, True),
    (2, ("--rollout-num-gpus", 1), "sglang", True), (1, (*SGLANG, "--colocate"), "sglang", True),
    (0, SGLANG, "sglang", False), (1, (*SGLANG, "--server-command", "x"), "sglang", False),
    (1, (*SGLANG, "--sglang-dtype", "bfloat16"), "sglang", False), (2, ("--engine", "local"), "local", False),
])
def test_float32_on_gpus_is_for_the_local_engine(plan, monkeypatch, gpus, flags, engine, noted):
    """SGLang's kernels there have no float32: nobody gets a server that dies while it starts without a word."""
    machine(monkeypatch, gpus, True)
    made = plan("--no-bf16", *flags)
    assert made.config.rollout.engine == engine
    assert any(hardware.SIXTEEN in one for one in made.notes) == noted


@pytest.mark.parametrize(("gpus", "flags", "placement"), [
    (8, ("--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 4), "local"),
    (8, ("--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 8, "--ray-address", "a:1"), "ray"),
    (4, ("--actor-num-gpus-per-node", 4, "--colocate"), "local"),
    (4, ("--actor-num-gpus-per-node", 8, "--colocate", "--ray-address", "a:1"), "ray"),
    (4, ("--actor-num-gpus-per-node", 4, "--colocate", "--placement", "local"), "local"),
    (4, (*SGLANG, "--actor-num-gpus-per-node", 4, "--load-debug-rollout-data", "x/{rollout_id}"), "local"),
    (4, ("--actor-num-gpus-per-node", 8, "--load-debug-rollout-data", "x/{rollout_id}", "--ray-address", "a:1"), "ray"),
])
def test_the_placement_is_ray_where_the_machine_has_too_few_gpus(plan, monkeypatch, gpus, flags, placement):
    machine(monkeypatch, gpus, True)
    assert plan(*flags, *BATCH).config.perf.placement == placement


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("-1", 0), ("0", 1), ("2,3", 2)])
def test_gpus_are_those_that_the_environment_leaves_visible(monkeypatch, visible, number):
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == number


REFUSED = {
    "3 GPUs do not divide into engines of 2": ["--rollout-num-gpus", 3, "--rollout-num-gpus-per-engine", 2],
    "1 GPUs do not divide into engines of 2": ["--rollout-num-gpus", 1, "--rollout-num-gpus-per-engine", 2],
    "rollout_num_gpus should be at least 1": ["--rollout-num-gpus", 0],
    "engines of 12 GPUs do not fill nodes of 8": ["--rollout-num-gpus-per-engine", 12],
    "engines of 3 GPUs do not fill nodes of 4": ["--colocate", "--actor-num-nodes", 3, "--actor-num-gpus-per-node", 4,
                                                 "--rollout-num-gpus-per-engine", 3, *BATCH[:3], 6],
    "need both flags": ["--rollout-external"],
    "servers that already run need both flags": ["--rollout-external-engine-addrs", "a:1"],
    "the address of a server should be HOST:PORT": ["--rollout-external", "--rollout-external-engine-addrs", "a"],
    "cannot hand over their GPUs": ["--rollout-external", "--rollout-external-engine-addrs", "a:1", "--colocate"],
    "a router that already runs needs a port": ["--router-ip", "10.0.0.9"],
    "[weight-sync-engine-mismatch]": ["--weight-sync", "in-process"],
    "[ipc-needs-colocate]": ["--weight-sync", "ipc"],
    "needs a folder that trainer and engines share": ["--weight-sync", "disk-delta"],
    "server_concurrency should be at least 1": ["--sglang-server-concurrency", 0],
    "the tensor-parallel size is": ["--sglang-tp-size", 2],
    "do not divide by its pipeline of 2": ["--sglang-pp-size", 2],
    "dp_size is for data-parallel attention": ["--sglang-dp-size", 2],
    "[engine-dtype-twice]": ["--engine-dtype", "float32", "--sglang-dtype", "bfloat16"],
    "beyond the servers' context length": ["--sglang-context-length", 64, "--rollout-max-context-len", 65],
    "without an algorithm": ["--sglang-speculative-num-steps", 3],
    "there is no such draft model": ["--sglang-speculative-algorithm", "EAGLE",
                                     "--sglang-speculative-draft-model-path", "./nowhere"],
    "no stop strings": ["--sglang-skip-tokenizer-init", "--rollout-stop", "x"],
    "drops routed experts": ["--rollout-num-gpus", 2, "--router", "sglang-router",
                             "--sglang-enable-return-routed-experts"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_excludes_itself_does_not_start(plan, message):
    with pytest.raises(ConfigError) as caught:
        plan(*SGLANG, *REFUSED[message])
    assert message in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize("flags", [
    ("--engine", "local", "--weight-sync", "broadcast"),
    ("--engine", "local", "--rollout-external", "--rollout-external-engine-addrs", "a:1"),
])
def test_what_is_for_sglang_alone_does_not_start_with_the_local_engine(plan, flags):
    with pytest.raises(ConfigError):
        plan(*flags)


HF = '''
from miles_core import hookimpl


class Hf:
    """An engine of somebody else's, and a weight sync of its own."""

    name = "hf"
    provides = ({})

    @hookimpl
    def engine(self, config, tokenizer):
        return self

    @hookimpl(name="hf-sync")
    def weight_sync(self, config):
        return self
'''


@pytest.mark.parametrize(("provides", "flags", "sync"), [
    ("", (), "in-process"), ("", ("--actor-num-gpus-per-node", 2), "shared-memory"),
    ("", ("--weight-sync", "hf-sync"), "hf-sync"),
    ("'engine:hf:servers:checkpoints',", ("--update-weight-disk-dir", "x"), "disk"),
    ("'engine:hf:servers:nccl',", (), "broadcast"),
    ("'engine:hf:servers:mine', 'weight_sync:hf-sync:mine',", (), "hf-sync"),
])
def test_an_engine_of_others_gets_the_weight_sync_that_it_understands(plan, tmp_path, provides, flags, sync):
    (tmp_path / "hf.py").write_text(HF.format(provides))
    made = plan("--plugin", tmp_path / "hf.py", "--engine", "hf", *flags, *BATCH)
    assert made.config.perf.weight_sync == sync
    (cache,) = (line for line in made.to_text().splitlines() if line.startswith("  KV cache"))
    assert "float32" not in cache and "bfloat16" not in cache, "its plugin says nothing of it"


@pytest.mark.parametrize(("provides", "flags", "named"), [
    ("", ("--weight-sync", "disk"), ("'disk'", "'hf'", "checkpoints", "in-process", "shared-memory")),
    ("'engine:hf:servers:mine', 'weight_sync:hf-sync:mine',", ("--weight-sync", "in-process"), ("tensors", "hf-sync")),
])
def test_a_weight_sync_that_an_engine_of_others_does_not_understand_is_refused(plan, tmp_path, provides, flags, named):
    (tmp_path / "hf.py").write_text(HF.format(provides))
    with pytest.raises(ConfigError) as caught:
        plan("--plugin", tmp_path / "hf.py", "--engine", "hf", *flags, *BATCH)
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize(("flags", "note"), [
    (("--sglang-mem-fraction-static", 0.8, "--server-start-timeout", 9),
     "the engine is local: what is for SGLang is not used (--sglang-mem-fraction-static, --server-start-timeout)"),
    ((*SGLANG, "--sglang-router-policy", "random"), "no router is in front of the engine"),
    (("--rollout-external", "--rollout-external-engine-addrs", "a:1", "--sglang-mem-fraction-static", 0.8),
     "the servers run already"),
    ((*SGLANG, "--offload-train"), "--offload-train parks nothing without --colocate"),
    ((*SGLANG, "--sglang-context-length", 512), "at most 512 tokens together (--sglang-context-length)"),
    ((*SGLANG, "--use-fault-tolerance"), "--max-engine-restarts"), (("--use-miles-router",), "smg"),
])
def test_what_is_without_effect_or_changes_something_else_is_said(plan, flags, note):
    assert any(note in one for one in plan(*flags).notes), plan(*flags).notes


@pytest.mark.parametrize("flags", [("--sglang-tp-size", 2, "--rollout-num-gpus-per-engine", 2),
                                   ("--sglang-dtype", "bfloat16", "--engine-dtype", "bfloat16")])
def test_saying_what_holds_anyway_is_accepted(plan, flags):
    assert plan(*SGLANG, *flags).config.rollout.engine == "sglang"
