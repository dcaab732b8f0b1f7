"""Rules of what lies under both sides: processes, collectives, disks, time; and how the run ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from miles_core.config.tables import TABLES
from miles_core.record.events import Kind, stage_seconds
from miles_report.doctor.finding import Finding, Side
from miles_report.doctor.record import WINDOW, Cause, Record

WATCHDOG = ("Watchdog caught collective operation timeout", "Timeout at NCCL work", "watchdog timeout (",
            "ms for recv operation to complete", "ms for send operation to complete")
"""What NCCL, SGLang's own watchdog and gloo say of a collective that never ends."""

DIED = ("RaySystemError", "WorkerCrashed", "ActorDiedError", "killed due to memory pressure", "Fatal Python error",
        "Received sigquit from a child process")
"""What Ray, Python and SGLang say of a process that is gone."""

_TABLES: dict[str, Side] = {"rollout": "rollout", "eval": "rollout", "sglang": "rollout", "model": "training",
                            "algorithm": "training", "optimizer": "training"}
"""Tables of options whose flags, in an error, say which side it is of."""

DOMINATES, SHORT = 0.6, 0.1
"""A stage with more than this share of the time, and less time per rollout than which nothing is worth a word."""


def hang(run: Record) -> Iterator[Finding]:
    """A collective, a weight sync or a call that did not end."""
    sync = run.cause is Cause.TIMEOUT and "weight sync" in run.error
    lines = list(run.find(*WATCHDOG))
    debug = ("NCCL_DEBUG=INFO (with NCCL_DEBUG_SUBSYS=COLL,P2P) shows which rank is missing; a cluster that is only "
             "slow needs NCCL_TIMEOUT=900")
    if run.cause is Cause.TIMEOUT:
        engine = "engine" in run.error.partition(":")[0] or "the engine did not answer" in run.error
        why = ("a rank or an engine did not take part in it" if sync else
               "whoever it waited for hangs, is dead, or needs longer than the limit")
        limit = ("--weight-sync-timeout" if sync else "--rollout-timeout" if engine else "--trainer-timeout")
        yield Finding("error", f"the run ended with: {run.said}", why,
                      run.remedy(debug, f"the limit is {limit}"), run.where(run.end),
                      side="both" if sync else "rollout" if engine else "training")
    for line in lines:
        yield Finding("error", f"a wait ran out: {line.text}", "one rank waits for another that never arrives",
                      f"{debug}; the first rank that says something else is the culprit", line.where,
                      side=_side(line.where))


def dead_process(run: Record) -> Iterator[Finding]:
    """A process of the run died on its own."""
    restarts = run.of(Kind.RESTART)
    if run.cause is Cause.DEATH:
        yield Finding("error", f"the run ended with: {run.said}",
                      "a negative exit code is a signal; -9 is most often the kernel's, for lack of memory",
                      run.remedy("--max-restarts N lets a run go on from its last checkpoint"), run.where(run.end),
                      side="rollout" if "engine" in run.error.partition(":")[0] else "training")
    elif len(restarts) > 1:
        yield Finding("warning", f"the run was started {len(restarts) + 1} times; last: {restarts[-1].get('culprit')}",
                      "each restart does the rollouts since the last checkpoint again",
                      "look at the logs from before it; a lower --save-interval loses less", run.where(restarts[-1]),
                      side="training")
    if run.end is not None and run.end.get("status") == "completed":
        return
    for line in run.find(*DIED):
        if _side(line.where) == "rollout" and run.of(Kind.ENGINE_RESTARTED):
            continue  # of which another rule speaks
        yield Finding("error", f"a process died: {line.text}", "what it worked on is lost, and others wait for it",
                      "see what stands above that line; dmesg tells of the machine's memory", line.where,
                      side=_side(line.where))


def killed(run: Record) -> Iterator[Finding]:
    """It neither runs nor ended."""
    if run.end is not None or run.holder is not None:
        return
    if not run.of(Kind.RUN_START):
        if not any(run.directory.samples.glob("*")):  # else it did begin, and its record is lost
            yield Finding("error", "the run began no rollout, wrote no end, and no process writes to it any more",
                          "it was refused, or killed while it loaded models and data: kill -9, a lack of memory, a "
                          "time limit of the cluster", "see what its command printed, logs/ and dmesg; then start it "
                          "again", run.where(run.events[-1]) if run.events else "plan.json")
        return
    age, done, of = run.now - run.events[-1]["time"], len(run.metrics), run.of(Kind.RUN_START)[-1].get("rollouts")
    yield Finding("error", f"the run was killed: {done} of {of} rollouts are done, its last word is {age:.0f} s old, "
                  "and no process writes to it any more",
                  "it had no time to say why: kill -9, a lack of memory, a time limit of the cluster, a terminal that "
                  "was closed, a machine that went down", f"see dmesg and the scheduler; {_go_on(run)}",
                  run.where(run.events[-1]))


def interrupted(run: Record) -> Iterator[Finding]:
    """Somebody stopped it."""
    if run.end is not None and run.end.get("status") == "interrupted":
        yield Finding("note", f"the run was interrupted after {len(run.metrics)} rollouts",
                      "it ended cleanly, by Ctrl-C, SIGTERM or a closed terminal", _go_on(run), run.where(run.end))


def disk(run: Record) -> Iterator[Finding]:
    """The disk is full."""
    if run.cause is Cause.DISK:
        yield Finding("error", f"the run ended with: {run.said}", "nothing can be written any more",
                      "free some space; samples/ and checkpoints are the large parts", run.where(run.end))
        return
    for line in run.find("No space left on device"):
        yield Finding("error", f"a disk is full: {line.text}", "logs, caches and checkpoints end up cut off",
                      "free some space, or point TMPDIR, --save and --run-dir to a larger disk", line.where)


def damaged(run: Record) -> Iterator[Finding]:
    """events.jsonl cannot be read in order."""
    if run.damage:
        yield Finding("warning", run.damage, "what follows is from the lines that are whole, superseded ones included",
                      "remove that line", "events.jsonl")


def inductor_cache(run: Record) -> Iterator[Finding]:
    """torch.compile reads a cache that is damaged."""
    for line in run.find("JSONDecodeError"):
        if any(run.find("_inductor", "'inductor'", within=line.where.removeprefix("logs/").partition(":")[0])):
            yield Finding("error", f"torch.compile could not read its cache: {line.text}",
                          "two processes wrote one cache file at the same time, or a kill left half of it",
                          "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, or remove the folder TORCHINDUCTOR_CACHE_DIR",
                          line.where, side=_side(line.where))


def imbalance(run: Record) -> Iterator[Finding]:
    """One stage takes most of the time."""
    seconds = [stage_seconds(event["metrics"]) for event in list(run.metrics.values())[1:][-4 * WINDOW:]]
    if len(seconds) < WINDOW or run.option("debug_train_only"):  # no engine idles
        return
    mean = {stage: fmean(one.get(stage, 0.0) for one in seconds) for stage in ("rollout", "score", "train", "sync")}
    total = sum(mean.values())
    stage, most = max(mean.items(), key=lambda item: item[1])
    if total < SHORT or most < DOMINATES * total:
        return
    ahead, shared = int(run.option("max_lag") or 0), run.option("colocate") or run.owner("engine") == "local"
    advice = {
        "rollout": ("fewer or shorter answers, or hardware of their own for the engines" if shared else
                    "training waits for samples: more engines (--rollout-num-gpus), shorter answers" if ahead else
                    "let sampling run ahead with --max-lag 1, or give it more GPUs (--rollout-num-gpus)"),
        "train": "more ranks for the trainer, larger micro-batches (--max-tokens-per-gpu), less recomputation",
        "score": "larger passes (--log-probs-max-tokens-per-gpu), or no reference where its KL is not used",
        "sync": "another --weight-sync (ipc or broadcast), or a larger --update-weight-buffer-size",
    }[stage]
    yield Finding("note", f"{most / total:.0%} of a rollout's {total:.1f} s are {stage}",
                  "both sides share the same hardware" if shared else "the other side idles meanwhile", advice,
                  run.where(list(run.metrics.values())[-1]),
                  side="rollout" if stage == "rollout" else "both" if stage == "sync" else "training")


def told(run: Record) -> Iterator[Finding]:
    """What the run itself warned of; plugins warn so, too."""
    texts: dict[str, dict] = {}
    for event in run.of(Kind.MESSAGE):
        own = run.end is not None and event.get("text") == run.end.get("error")  # which a rule of its own has told
        if event.get("level") in ("warning", "error") and not own:
            texts.setdefault(str(event.get("text")), event)
    for text, event in list(texts.items())[:5]:
        yield Finding("note", f"the run warned: {text[:300]}", "the code that wrote it saw something "
                                                               "unexpected", "see the log around that line",
                      run.where(event), event["rollout_id"])


def failed(run: Record) -> Iterator[Finding]:
    """It ended with an error of which no other rule speaks."""
    if run.error and run.cause is None and run.end.get("status") == "failed":
        trace = next((f"logs/{path.name}:1" for path in run.logs("traceback")), run.where(run.end))
        flags = [flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]+)", run.error)]
        table = next((table for flag in flags for table in TABLES if hasattr(TABLES[table], flag)), "")
        yield Finding("error", f"the run ended with: {run.said}", "an error has a cause, and a sentence about it",
                      run.remedy() or "read the traceback; report it with miles doctor --bundle FILE.tar.gz", trace,
                      side=_TABLES.get(table))


def _go_on(run: Record) -> str:
    save, load = run.option("save"), run.option("load")
    if not save:
        return "nothing was saved: with --save FOLDER and --save-interval N a run can be resumed"
    if not run.of(Kind.CHECKPOINT):
        interval = run.option("save_interval")
        return f"no checkpoint was reached with --save-interval {interval}: the same command starts over"
    last = run.of(Kind.CHECKPOINT)[-1]
    again = "the same command" if load == save else f"the same command with --load {save}"
    return f"{again} goes on after rollout {last['rollout_id']}, whose checkpoint is the last"


def _side(where: str) -> Side:
    """The side that a log belongs to."""
    name = where.rpartition("/")[2]
    if name.startswith(("engine-", "router")):
        return "rollout"
    return "training" if name.startswith("trainer-") else "both"
