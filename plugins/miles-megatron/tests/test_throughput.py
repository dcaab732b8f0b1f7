"""Rates of the trainer, against sums by hand."""

import pytest
import torch
from miles_megatron.throughput import Throughput, Trained, peak_tflops

from miles_core.config import RunConfig
from miles_core.config.tables import Perf

DENSE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 4,
         "ffn_hidden_size": 16}
MATRICES = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16) + 8 * 32
"""Attention, MLPs, output layer."""


def of_megatron(**perf):
    return RunConfig(perf=Perf(**perf), surfaces={"megatron": {**DENSE, "vocab_size": 32}})


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA GB200", 2500.0),
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L4", None), ("", None),
])  # fmt: skip
def test_peaks_by_the_device_s_name(name, peak):
    assert peak_tflops(name) == peak


def test_two_steps_and_a_pass_over_two_ranks():
    rates = Throughput(of_megatron(mfu_peak_tflops=1e-6), ranks=2)
    rates.add({"perf/log_probs_time": 0.5, "rollout/log_probs": -1.0}, [10, 30])
    rates.add({"perf/actor_train_time": 2.0}, [10])
    rates.add({"perf/actor_train_time": 3.0}, [30])
    found = rates.rates()
    assert found["perf/log_probs_tokens_per_gpu_per_sec"] == 40 / 0.5 / 2
    assert found["perf/actor_train_tokens_per_gpu_per_sec"] == 40 / 5 / 2
    assert found["perf/actor_train_tok_per_s"] == 8
    attention = 2 * 2 * 4
    whole = sum(6 * MATRICES * n + 6 * attention * n * n for n in (10, 30))
    assert found["perf/actor_train_tflops"] == pytest.approx(whole / 5 / 2 / 1e12)
    assert found["perf/log_probs_tflops"] == pytest.approx(whole / 3 / 0.5 / 2 / 1e12)
    assert found["perf/actor_train_mfu"] == pytest.approx(found["perf/actor_train_tflops"] / 1e-6)
    assert rates.rates() == {}, "the next rollout begins with nothing"


def test_frozen_matrices_have_no_gradients_to_compute(megatron):
    """In a step 6 operations for each number of a matrix that trains, and 4 where its input's gradient is all."""
    rates = Throughput(of_megatron(), ranks=1)
    with torch.device("meta"):
        chunk = torch.nn.Sequential(torch.nn.Linear(8, 30).requires_grad_(False), torch.nn.Linear(30, 10))
    rates.trained = Trained.of([chunk], 0)
    assert rates.trained == Trained(300 / 540, 0)
    rates.add({"perf/log_probs_time": 1.0}, [10])
    rates.add({"perf/actor_train_time": 1.0}, [10])
    found, attention = rates.rates(), 6 * 2 * 2 * 4 * 10**2
    assert found["perf/log_probs_tflops"] == pytest.approx((6 * MATRICES * 10 + attention) / 3 / 1e12)
    assert found["perf/actor_train_tflops"] == pytest.approx(((4 + 2 * 300 / 540) * MATRICES * 10 + attention) / 1e12)


@pytest.mark.parametrize("trains", [True, False])
def test_layers_that_predict_more_tokens_count_where_they_train(megatron, trains):
    """A third layer, a projection [8, 16], and the output layer, for whose weight there is no gradient."""
    rates, chunk = Throughput(of_megatron(), ranks=1), torch.nn.Module()
    chunk.decoder, chunk.mtp = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(trains)
    assert Trained.of([chunk], 1) == Trained(1.0 if trains else 0.5, int(trains))
    rates.trained = Trained(predictors=int(trains))
    rates.add({"perf/log_probs_time": 1.0}, [10])
    rates.add({"perf/actor_train_time": 1.0}, [10])
    found, attention = rates.rates(), 6 * 2 * 4 * 10**2
    assert found["perf/log_probs_tflops"] == pytest.approx((6 * MATRICES * 10 + 2 * attention) / 3 / 1e12)
    layer = (MATRICES - 8 * 32) // 2 + 8 * 16
    more = 10 * (6 * layer + 4 * 8 * 32) + attention if trains else 0
    assert found["perf/actor_train_tflops"] == pytest.approx((6 * MATRICES * 10 + 2 * attention + more) / 1e12)


def test_a_window_makes_no_operations_beyond_itself(config):
    """Of two layers one sees 4 tokens: of 40 the share of 1 - 0.9^2 of what the other sees."""
    keys = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 4, "intermediate_size": 16, "vocab_size": 32, "sliding_window": 4}
    rates = Throughput(config({**keys, "layer_types": ["sliding_attention", "full_attention"]}), ranks=1)
    rates.add({"perf/actor_train_time": 1.0}, [40])
    operations = 6 * MATRICES * 40 + 6 * 40**2 * (8 + round(8 * (1 - 0.9**2)))
    assert rates.rates()["perf/actor_train_tflops"] == pytest.approx(operations / 1e12)


def test_a_model_of_unknown_size_has_tokens_and_no_operations():
    rates = Throughput(RunConfig(), ranks=1)
    rates.add({"perf/actor_train_time": 2.0}, [10])
    assert rates.rates() == {"perf/actor_train_tokens_per_gpu_per_sec": 5.0, "perf/actor_train_tok_per_s": 5.0}
