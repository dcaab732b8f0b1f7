"""A lack of memory is told of in words: the real error of torch's CPU allocator, and the one of CUDA's."""

import pickle
from dataclasses import replace

import pytest
import torch
from miles_megatron.oom import explained, remedies

from miles_core.config.tables import Optimizer, Perf, RunConfig
from miles_core.errors import OutOfMemoryError

PACKED = RunConfig(perf=Perf(use_dynamic_batch_size=True, max_tokens_per_gpu=8192))


def test_an_allocation_that_fails_names_phase_rank_size_and_a_way_out():
    with pytest.raises(OutOfMemoryError) as caught, explained("step 3", 5, PACKED):
        torch.empty(2**60, dtype=torch.uint8)
    text = str(caught.value)
    assert text.startswith("trainer rank 5: out of memory in step 3 (got an allocation of 1152921504606846976 bytes)")
    assert "--recompute-granularity full, --max-tokens-per-gpu 4096" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text, "it crosses processes"


def test_cudas_error_is_read_too():
    said = "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.80 GiB."
    expected = "in log_probs .got an allocation of 2.32 GiB"
    with pytest.raises(OutOfMemoryError, match=expected), explained("log_probs", 0, PACKED):
        raise torch.OutOfMemoryError(said)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), explained("step 0", 0, PACKED):
        raise RuntimeError("shapes do not fit")


def test_every_remedy_takes_less_than_the_run_does():
    """And none is named that the run has already."""
    assert remedies("step 0", PACKED) == [
        "--log-probs-chunk-size 512", "--recompute-granularity full", "--max-tokens-per-gpu 4096",
        "--optimizer-cpu-offload", "--tensor-model-parallel-size 2, or more ranks"]
    assert remedies("step 0", replace(PACKED, perf=replace(PACKED.perf, log_probs_chunk_size=-1)))[0].endswith(" 1024")
    spare = replace(PACKED, surfaces={"megatron": {"recompute_granularity": "full", "optimizer_cpu_offload": True,
                                      "tensor_model_parallel_size": 4}},
                    perf=Perf(micro_batch_size=4, log_probs_chunk_size=128))
    assert remedies("step 0", spare) == ["--micro-batch-size 2", "--tensor-model-parallel-size 8, or more ranks"]
    assert remedies("load", PACKED) == ["--optimizer-cpu-offload", "--tensor-model-parallel-size 2, or more ranks"]
    muon, layer_wise = (replace(PACKED, optimizer=Optimizer(optimizer=name)) for name in ("muon", "dist_muon"))
    ranks = replace(muon, perf=replace(PACKED.perf, actor_num_gpus_per_node=2))
    assert remedies("load", ranks) == ["--optimizer dist_muon", "--tensor-model-parallel-size 2, or more ranks"]
    assert remedies("load", replace(muon, perf=replace(muon.perf, actor_num_gpus_per_node=1))) == remedies(
        "load", layer_wise) == ["--tensor-model-parallel-size 2, or more ranks"]
    scoring = replace(PACKED, perf=replace(PACKED.perf, log_probs_max_tokens_per_gpu=32768))
    assert "--log-probs-max-tokens-per-gpu 16384" in remedies("log_probs", scoring)
    assert "--recompute-granularity full" not in remedies("ref_log_probs", scoring)
