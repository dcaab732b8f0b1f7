"""How fast the trainer is: tokens and floating-point operations per second, and their share of the GPU's peak."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from miles_core.config.tables import RunConfig
from miles_megatron import estimate
from miles_megatron.architecture import Architecture
from miles_megatron.gradients import gathered
from miles_megatron.heads import sizes_of

PEAKS = {"GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "GH200": 989.0, "H200": 989.0,
         "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0}
"""Dense bf16 TFLOP/s by NVIDIA's data sheets, under names that torch gives to the devices; the first that is found."""
PASSES = {"log_probs": 1 / 3, "ref_log_probs": 1 / 3, "actor_train": 1.0}
"""Passes of a rollout, by their perf/NAME_time, and what each takes of a forward and a backward pass."""


def peak_tflops(device: str) -> float | None:
    """Of a GPU by the name that torch knows it by; None for one that is not listed."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a step computes beside the model's forward.

    Args:
        share: of the numbers in matrices, those that have a gradient: with adapters next to nothing.
        predictors: layers for multi-token prediction that train; those that do not are not computed.
    """

    share: float = 1.0
    predictors: int = 0

    @classmethod
    def of(cls, chunks: Iterable[torch.nn.Module], predictors: int) -> Trained:
        """Of a model; every rank calls it, with its own chunks.

        Args:
            predictors: layers that the model has for multi-token prediction; their parameters are called mtp.
        """
        numbers = Counter({"all": 0, "learnt": 0, "mtp": 0})
        for name, one in itertools.chain(*(chunk.named_parameters() for chunk in chunks)):
            if one.dim() > 1:
                learnt = one.numel() * one.requires_grad
                numbers.update(all=one.numel(), learnt=learnt, mtp=learnt * name.startswith("mtp."))
        sums = {name: sum(each) for name, each in gathered(numbers).items()}
        return cls(sums["learnt"] / max(sums["all"], 1), predictors if sums["mtp"] else 0)


class Throughput:
    """The passes of one rollout, added up.

    Args:
        ranks: the trainer's. A sequence that context or tensor parallelism splits counts once.

    Attributes:
        trained: what the actor's steps train.
    """

    trained = Trained()

    def __init__(self, config: RunConfig, ranks: int):
        size = sizes_of(config)
        self._size, self._ranks = None if size.uncounted else size, ranks
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._peak = config.perf.mfu_peak_tflops or peak_tflops(device)
        self._seconds: Counter[str] = Counter()
        self._lengths: dict[str, list[int]] = {}

    def add(self, metrics: Mapping[str, float], lengths: Sequence[int]) -> None:
        """A pass over sequences of these lengths, under the name of its seconds in `metrics`; others are left out."""
        for name in PASSES:
            if seconds := metrics.get(f"perf/{name}_time"):
                self._seconds[name] += seconds
                self._lengths.setdefault(name, []).extend(lengths)

    def rates(self) -> dict[str, float]:
        """Metrics of what was added, which is forgotten.

        perf/NAME_tokens_per_gpu_per_sec and perf/NAME_tflops are per GPU (per rank where there is none), and
        perf/actor_train_mfu is the share of perf/mfu_peak_tflops. Operations are those of the model, without what is
        recomputed and without gradients of what is frozen (`estimate.flops`), and of layers for multi-token prediction
        that train.
        """
        rates: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            lengths, scale = self._lengths[name], seconds * self._ranks
            rates[f"perf/{name}_tokens_per_gpu_per_sec"] = sum(lengths) / scale
            if self._size is not None:
                whole = self._operations(self._size, lengths, self.trained if name == "actor_train" else Trained())
                rates[f"perf/{name}_tflops"] = PASSES[name] * whole / scale / 1e12
        if "actor_train" in self._seconds:
            rates["perf/actor_train_tok_per_s"] = sum(self._lengths["actor_train"]) / self._seconds["actor_train"]
        if self._peak and "perf/actor_train_tflops" in rates:
            rates |= {"perf/mfu_peak_tflops": self._peak,
                      "perf/actor_train_mfu": rates["perf/actor_train_tflops"] / self._peak}
        self._seconds.clear()
        self._lengths.clear()
        return rates

    @staticmethod
    def _operations(size: Architecture, lengths: Sequence[int], trained: Trained) -> int:
        """Of a forward and a backward pass over sequences of these lengths.

        A layer for multi-token prediction is the average one, with a projection of two hidden states and the output
        layer, whose weight gets no gradient from it.
        """
        met, head, count = float(estimate.active_parameters(size)), size.hidden * size.vocab, trained.predictors
        met += count * ((met - head) / size.layers + 2 * size.hidden**2 + head * 2 / 3)
        more = 1 + count / max(size.full, 1)
        return sum(estimate.flops(n, parameters=met, attention=more * size.attention_of(n), learnt=trained.share)
                   for n in lengths)
