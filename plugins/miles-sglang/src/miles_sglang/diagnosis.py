"""What `miles doctor` knows of SGLang's servers: messages about memory, and drafts that no longer fit the policy."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from miles_report.doctor.finding import Finding, Rule

from miles_sglang.acceptance import FALL, RATE, REMEDY, WINDOW

if TYPE_CHECKING:
    from miles_report.doctor.record import Record

RETRACTED = 20
"""Lines about retracted requests in one engine's log that are more than a peak."""

MEMORY = ("CUDA out of memory", "torch.OutOfMemoryError", "HIP out of memory",
          "Not enough memory. Please try to increase --mem-fraction-static", "Prefill out of memory",
          "Decode out of memory", "alloc_req_slots runs out of memory")


def disguised_oom(run: Record) -> Iterator[Finding]:
    """An engine that ran out of memory and says something else."""
    for line in run.find("illegal memory access", within="engine-"):
        yield Finding("error", f"an engine met an illegal memory access: {line.text}",
                      "in an engine that shares its GPU this is most often a lack of memory in disguise",
                      f"lower --sglang-mem-fraction-static to {_less(run)}; if it stays, CUDA_LAUNCH_BLOCKING=1 shows "
                      "which kernel it is", line.where)


def engine_oom(run: Record) -> Iterator[Finding]:
    """An engine that says that it ran out of memory."""
    for line in run.find(*MEMORY, within="engine-"):
        raise_it = "increase --mem-fraction-static" in line.text
        yield Finding("error", f"an engine ran out of memory: {line.text}",
                      "its weights leave no room for tokens" if raise_it
                      else "what it holds for good leaves too little for a batch",
                      "raise --sglang-mem-fraction-static, or give the engine more GPUs (--rollout-num-gpus-per-engine)"
                      if raise_it else f"lower --sglang-mem-fraction-static to {_less(run)}, or "
                      "--sglang-server-concurrency", line.where)


def retractions(run: Record) -> Iterator[Finding]:
    """An engine that throws sampled tokens away, as it has no room for them."""
    for line in run.find("KV cache pool is full. Retract requests.", within="engine-"):
        if line.count >= RETRACTED:
            yield Finding("note", f"an engine called requests back {line.count} times, as its cache was full",
                          "what such a request had cached is computed once more",
                          "lower --sglang-server-concurrency, or raise --sglang-mem-fraction-static", line.where)


def draft_drift(run: Record) -> Iterator[Finding]:
    """Speculative decoding whose draft is no longer the policy's."""
    rates = run.series(RATE)
    means = [fmean(value for _, value in rates[i - WINDOW:i]) for i in range(WINDOW, len(rates) + 1)]
    if means and means[-1] < (1 - FALL) * max(means):
        rollout_id = rates[-1][0]
        yield Finding("warning", f"the servers accept {means[-1]:.2f} of the draft's tokens, after {max(means):.2f} at "
                      "best", "the policy moved away from its draft, and each step of the servers gives fewer tokens",
                      REMEDY, run.where(run.metrics[rollout_id]), rollout_id)


def _less(run: Record) -> float:
    """A memory fraction below the run's own: 0.7, then 0.6."""
    fraction = run.option("mem_fraction_static")
    return 0.6 if isinstance(fraction, (int, float)) and fraction <= 0.7 else 0.7


def rules() -> list[Rule]:
    """In the order of the table in docs/debugging.md."""
    return [
        Rule("disguised-oom", "rollout", "`illegal memory access` in an engine's log", disguised_oom),
        Rule("engine-oom", "rollout", "an engine reports too little memory", engine_oom),
        Rule("retractions", "rollout", "`KV cache pool is full`, repeatedly", retractions),
        Rule("draft-drift", "rollout", "the servers accept fewer and fewer drafted tokens", draft_drift),
    ]
