"""Layouts that are proposed fit by the plan's estimate, pass its rules, and are the smallest that do."""

import json
import math
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from miles_megatron import memory_plan, proposals
from miles_megatron.estimate import dimensions_of
from miles_megatron.layout import check_layouts, layout_of

from miles_core.config.load import load
from miles_core.errors import ConfigError

DENSE = {"model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
         "tie_word_embeddings": False}  # fmt: skip
GIANT = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
         "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
         "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
         "vocab_size": 129280, "tie_word_embeddings": False}  # fmt: skip
FLAGS = ("--gpu-memory-gib", "80", "--rollout-max-context-len", "16384", "--colocate", "--engine", "sglang")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(the keys of a config.json, *flags) -> a run on it; a later flag wins."""
    monkeypatch.chdir(tmp_path)

    def make(said, *flags):
        (tmp_path / "config.json").write_text(json.dumps(said))
        return load(None, ["--hf-checkpoint", str(tmp_path), *FLAGS, *flags]).config

    return make


@pytest.mark.parametrize(("said", "gpus"), [(DENSE, 8), (DENSE, 64), (GIANT, 128)])
def test_what_is_proposed_fits_and_is_a_layout_that_the_plan_accepts(run, said, gpus):
    fitting = proposals.proposals(run(said), gpus, 20)
    assert fitting and [one.seconds for one in fitting] == sorted(one.seconds for one in fitting)
    notes = []
    for one in fitting:
        layout = layout_of(one.config)
        assert layout.world == gpus == layout.tensor * layout.pipeline * layout.context * layout.data
        assert one.config.perf.max_tokens_per_gpu * layout.context >= 16384
        check_layouts(one.config, notes.append)
        memory_plan.check_memory(one.config, notes.append)
        assert memory_plan.peak(one.config, dimensions_of(one.config)) == one.needed
    assert not notes  # not even that memory is tight


def test_the_best_are_the_best_of_all(run):
    """The search stops early; all of them, sorted, begin with what it finds."""
    config = run(GIANT)
    whole = proposals.proposals(config, 128, 10**6)
    assert len(whole) > 20 and [one.seconds for one in whole] == sorted(one.seconds for one in whole)
    assert [one.seconds for one in proposals.proposals(config, 128, 5)] == [one.seconds for one in whole[:5]]


def test_the_flags_of_a_proposal_make_its_layout(run):
    """61 layers divide by no number of stages: the last has fewer."""
    one = proposals.proposals(run(GIANT), 128)[0]
    stages = one.layout.pipeline
    words = " ".join(one.flags()).split()
    again = run(GIANT, *words)
    assert layout_of(again) == one.layout and again.perf.max_tokens_per_gpu == one.config.perf.max_tokens_per_gpu
    last = again.surface("megatron")["num_layers_in_last_pipeline_stage"]
    assert stages > 1 and (61 - last) % (stages - 1) == 0
    assert memory_plan.peak(again, dimensions_of(again)) == one.needed


def test_the_smallest_number_is_the_first_power_of_two_that_fits(run):
    config = run(GIANT)
    least = proposals.smallest(config)
    assert least == 64 and not proposals.proposals(config, least // 2)
    assert proposals.smallest(config, most=32) is None
    larger = replace(config, perf=replace(config.perf, gpu_memory_gib=288))
    assert proposals.smallest(larger) < least


def test_a_layout_of_the_run_itself_is_left_out(run):
    stated = run(DENSE, "--tensor-model-parallel-size", "8", "--sequence-parallel", "--recompute-granularity", "full")
    assert [one.flags() for one in proposals.proposals(stated, 64, 5)] == [
        one.flags() for one in proposals.proposals(run(DENSE), 64, 5)]


def test_an_engine_has_room_for_weights_and_samples(run):
    config = run(GIANT)
    base, model, capacity = proposals.known(config, 128)
    each = proposals.engine_gpus(base, model, capacity, 128)
    share, _ = memory_plan.engine(replace(base, perf=replace(base.perf, rollout_num_gpus_per_engine=each)), model)
    assert share < proposals.FRACTION * capacity < 2 * share + capacity / 8
    assert proposals.engine_gpus(base, model, capacity, 8) is None


def test_more_room_and_more_gpus_never_make_a_step_slower(run):
    """The order knows at least this: what fits less memory fits more, and twice the GPUs halve the work."""
    config = run(DENSE)
    larger = replace(config, perf=replace(config.perf, gpu_memory_gib=140))
    best = [proposals.proposals(one, gpus)[0].seconds for one in (config, larger) for gpus in (16, 64)]
    assert best[2] <= best[0] and best[3] <= best[1] < best[0]


def test_nodes_are_as_large_as_the_run_says(run):
    """Tensor parallelism stays within one."""
    config = run(DENSE, "--actor-num-nodes", "16", "--actor-num-gpus-per-node", "4")
    fitting = proposals.proposals(config, 64, 10**6)
    assert {one.config.perf.actor_num_gpus_per_node for one in fitting} == {4}
    assert max(one.layout.tensor for one in fitting) == 4
    assert max(one.layout.tensor for one in proposals.proposals(run(DENSE), 64, 10**6)) == 8


def test_a_search_takes_a_second_at_most(run):
    config, begin = run(GIANT), time.process_time()
    proposals.proposals(config, 1024)
    assert time.process_time() - begin < 2


def test_what_is_not_known_is_said(run):
    with pytest.raises(ConfigError) as error:
        proposals.proposals(run({"model_type": "qwen3", "hidden_size": 64}), 8)
    assert error.value.code == "layouts-model-unknown"
    with pytest.raises(ConfigError) as error:
        proposals.proposals(run(DENSE), 12)
    assert error.value.code == "layouts-nodes-not-full"
    unknown = run(DENSE)
    unknown = replace(unknown, perf=replace(unknown.perf, gpu_memory_gib=None))
    if memory_plan.capacity_of(unknown) is None:
        with pytest.raises(ConfigError) as error:
            proposals.proposals(unknown, 8)
        assert error.value.code == "layouts-memory-unknown"


def test_the_command_shows_the_best_or_how_many_gpus_would_do(run, tmp_path):
    from miles_megatron.commands.layouts import command

    run(DENSE)
    words = ["--hf-checkpoint", str(tmp_path), *FLAGS, "--actor-num-gpus-per-node", "8"]
    shown = CliRunner().invoke(command, ["--count", "2", *words]).output
    assert "1. tp" in shown and "2. tp" in shown and "3. tp" not in shown and "--use-dynamic-batch-size" in shown
    run(GIANT)
    assert "8 GPUs of 80 GiB have no layout that fits: 64 are" in CliRunner().invoke(command, words).output


def test_operations_of_the_slowest_stage_count(run):
    """The last has the output layer: with two layers a stage and a large vocabulary, stages cost more than copies."""
    small = DENSE | {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 3072}
    best = {}
    for one in proposals.proposals(run(small), 8, 100):
        best.setdefault(one.layout.pipeline, one.seconds)
    assert best[4] > 1.2 * best[1] and math.isfinite(best[8])
