"""The faults of docs/reliability.md: what is done, and what a run has to do about it. test_faults.py runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODES = {"sync": 0, "one-off": 1, "async": 3}
"""Name of a mode -> its --max-lag."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
SECONDS = 5.0
"""In which a fault has to be seen, beside the timeout that the run is given for what hangs."""


@dataclass(frozen=True)
class Fault:
    """One way to fail.

    Args:
        words: what the run has to say; gaps are " ... ".
        flags: of the run, beside those of all.
        end: how it ends: "failed" (exit code 1), "refused" (2), "interrupted" (130) or "completed" (0).
        timeout: seconds that the run is given for what hangs.
    """

    words: str
    flags: tuple[str, ...] = ()
    end: str = "failed"
    timeout: float = 0.0


ENGINE = ("--engine", "faulty")
IN_TIME = (*ENGINE, "--rollout-timeout", "3")
REWARD = (*ENGINE, "--rm-type", "faulty", "--rm-timeout", "2")
SYNC = (*ENGINE, "--weight-sync", "faulty", "--weight-sync-timeout", "3")
RANK = (*ENGINE, "--trainer-host", "process")
ANSWER = "the engine's answer to request train- ... "

FAULTS = {
    "engine kill": Fault("the local engine failed (got MemoryError: the engine's thread is to die)", ENGINE),
    "engine hang": Fault("the engine did not answer request train- ... within 3 s", IN_TIME, timeout=3),
    "engine slow": Fault("heartbeat: oldest_s ", (*ENGINE, "--heartbeat-interval", "0.2"), "completed"),
    "engine too slow": Fault("the engine did not answer request train- ... within 3 s", IN_TIME, timeout=3),
    "garbage": Fault(ANSWER + "has token ids outside the vocabulary of 264 (got 100", ENGINE),
    "negative token": Fault(ANSWER + "has token ids outside the vocabulary of 264 (got -", ENGINE),
    "NaN log-probs": Fault(ANSWER + "has log-probs that are not finite (got nan)", ENGINE),
    "positive log-probs": Fault(ANSWER + "has log-probs above 0", ENGINE),
    "empty answer": Fault(ANSWER + "ended by 'stop' and is empty", ENGINE),
    "wrong length": Fault(ANSWER + "has parts of different lengths", ENGINE),
    "unknown version": Fault(ANSWER + "is of weight versions that the engine did not have", ENGINE),
    "version that no trainer sent": Fault(ANSWER + "is of weight versions that the engine did not have", ENGINE),
    "versions go backwards": Fault(ANSWER + "has weight versions that go backwards", ENGINE),
    "generator hang": Fault("generator 'faulty', train prompt ... neither finished nor called the engine for 3 s",
                            (*IN_TIME, "--generate", "faulty"), timeout=3),
    "reward hang": Fault("scorer 'faulty' took longer than 2 s for train prompt", REWARD, timeout=2),
    "reward raises": Fault("scorer 'faulty' failed on train prompt ... ZeroDivisionError", REWARD),
    "reward NaN": Fault("scorer 'faulty' did not return a finite float32 for train prompt ... (got nan)", REWARD),
    "filter drops everything": Fault("filters dropped ... (dull ... every answer is dull",
                                     (*ENGINE, "--max-over-sampling-waves", "2")),
    "prompt source raises": Fault("prompt source 'faulty': it failed (got ConnectionError: the data server is gone",
                                  (*ENGINE, "--prompt-source", "faulty")),
    "prompt source ends": Fault("prompt source 'faulty': it ended", (*ENGINE, "--prompt-source", "faulty")),
    "weight-sync stall": Fault("weight_sync 'faulty': the weight sync to version 2 did not finish within 3 s", SYNC,
                               timeout=3),
    "partial sync": Fault("the weights are incomplete (got 1 of 24 tensors are missing, such as model.", SYNC),
    "NaN weights": Fault("not finite", SYNC),
    "flipped bit": Fault("weights changed on their way through shared memory", (*RANK, "--weight-sync", "faulty")),
    "rank kill": Fault("the process 'trainer' died in step()", (*RANK, "--max-restarts", "1"), "completed"),
    "rank hang": Fault("the trainer did not finish step() within 12 s", (*RANK, "--trainer-timeout", "12"), timeout=12),
    "loss NaN": Fault("policy loss 'faulty': the loss of train prompt ... is not finite",
                      (*ENGINE, "--policy-loss", "faulty")),
    "disk full": Fault("run/checkpoints/iter_ ... the disk is full", ENGINE),
    "corrupted checkpoint": Fault("run/checkpoints/iter_0000003/__0_0.distcp: the checkpoint cannot be read", ENGINE,
                                  "refused"),
    "torn event": Fault("run_start: start 2, resumed_from 3", ENGINE, "completed"),
    "damaged event": Fault("run/events.jsonl: line 2 is damaged", ENGINE, "refused"),
    "driver SIGTERM": Fault("Interrupted. The same command goes on from the last checkpoint", ENGINE, "interrupted"),
}
"""Name -> fault; the names are those of faulty.py where the fault is one inside of the run."""

SERVER_SECONDS = 15.0
SERVERS = {
    "engine kill": ("sync", Fault("engine_lost: engine 0: its process ended with code -9", end="completed")),
    "router kill": ("one-off", Fault("router_lost: router: its process ended with code -9", ("--rollout-num-gpus", "2"),
                              "completed")),
    "engine hang": ("async", Fault("engine_lost: engine 0: no sign of life for 5 s", end="completed")),
    "garbage": ("sync", Fault(ANSWER + "has token ids outside the vocabulary of 264 (got 100")),
}
"""The same for runs on real SGLang servers, each in one mode: tests/sglang/test_faults.py."""
