"""Execute: carry out a plan in its run directory, and end cleanly however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.config.environment import relevant
from miles_core.config.load import with_values
from miles_core.errors import CheckpointError, DiedError, EngineDiedError, MilesError, RunDirectoryError
from miles_core.plugins import lock
from miles_core.plugins.plan import Plan
from miles_core.record import stall
from miles_core.record.console import Console
from miles_core.record.directory import Lock, RunDirectory, make_folder, publish
from miles_core.record.events import EventLog, read
from miles_core.record.journal import Journal, Views
from miles_core.types import LOCK, TRACKER

if TYPE_CHECKING:
    from miles_core.build import Parts
    from miles_core.run import Run


def execute(plan: Plan, *, live: bool | None = None) -> int:
    """Run a plan to its end; returns the exit code.

    Raises:
        MilesError: what ended the run; it is in events.jsonl as well.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads must not spin beside the engine's
    with (RunDirectory(plan.config.checkpoint.run_dir) as directory, directory.open_log("run.log") as log,
          _saving(plan, directory)):
        publish(directory.plan_text, plan.to_text())
        publish(directory.plan_json, _json(plan))
        attempt = Attempt.first(plan, directory)
        while True:
            console = Views(Console(live), Console(False, log, details=True))
            try:
                return asyncio.run(stall.terminable(_run(attempt, directory, console)))
            except (KeyboardInterrupt, asyncio.CancelledError):
                console.stop("interrupted")
                if not attempt.recorded:  # the signal came before the record was open, or in the middle of its end
                    with contextlib.suppress(MilesError):
                        EventLog(directory.events).run_end("interrupted")
                with contextlib.suppress(OSError):  # a SIGHUP is the terminal's end
                    print(f"Interrupted. {_how_to_go_on(plan, attempt.resumes())}", file=sys.stderr)
                return 130
            except MilesError as error:
                if attempt.survives(error):
                    attempt = attempt.next()
                    continue
                console.stop("failed")
                if error.exit_code == 1 and not isinstance(error.__cause__, OSError | None):
                    for note in _blame(error.__cause__):
                        error.add_note(note)
                    error.add_note(_traceback(directory))
                if attempt.begun:
                    error.add_note(f"`miles doctor {directory}` says which side to look at")
                raise
            except (Exception, SystemExit) as error:
                console.stop("failed")
                text = next((line for line in str(error).splitlines() if line.strip()), "no message")
                raise MilesError(f"{type(error).__name__}: {text}", code="unexpected-error",
                                 who=" ".join(_blame(error)).removeprefix("in ") or "miles",
                                 fix=f"look at the code that raised it; {_traceback(directory)}") from error


@dataclass
class Attempt:
    """One start of a run, of which --max-restarts allows several.

    Args:
        digest: of the plan as it was given, whatever a restart loads.
        restarts: how many starts there were before.
        published: what the tracker of --save was at the first start.
        made_of: the plan's lock, likewise.
        begun: whether this start, or one before, came to its first rollout.
        recorded: whether the record has the end of this start.
    """

    plan: Plan
    digest: str
    published: object
    made_of: dict
    restarts: int = 0
    begun: bool = False
    recorded: bool = False

    @classmethod
    def first(cls, plan: Plan, directory: RunDirectory) -> Attempt:
        publish(directory.lock, text := lock.text(lock.of(plan)))
        return cls(plan, plan.digest, _published(plan.config.checkpoint.save), json.loads(text))

    def survives(self, error: BaseException) -> bool:
        """Whether the run goes on after it: a process is gone, and a new one may fare better."""
        died = isinstance(error, DiedError | EngineDiedError)
        return died and self.begun and self.restarts < self.plan.config.perf.max_restarts

    def resumes(self) -> str | None:
        """Where the next start goes on; None for where the first began."""
        checkpoint, tracker = self.plan.config.checkpoint, _published(self.plan.config.checkpoint.save)
        own = tracker is not None and (checkpoint.load == checkpoint.save or tracker != self.published)
        return checkpoint.save if own else None

    def next(self) -> Attempt:
        """The start after this one."""
        plan = self.plan
        if (folder := self.resumes()) is not None:
            own = _published(folder) != self.published  # made by this run, which has left out what it should
            drop = [] if own else plan.config.checkpoint.drop_plugin_state
            plan = replace(plan, config=with_values(plan.config, "restart", checkpoint__load=folder,
                                                    checkpoint__drop_plugin_state=drop, rollout__start_rollout_id=None))
        return replace(self, plan=plan, restarts=self.restarts + 1, recorded=False)


def _published(save: str | None) -> object:
    """Tells one checkpoint published into a folder from the next; None where none was."""
    try:
        status = os.stat(os.path.join(save or "", TRACKER))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _how_to_go_on(plan: Plan, checkpoint: str | None) -> str:
    """`checkpoint` is the folder that has one of this run, or that it began from; None where it has saved none."""
    options = plan.config.checkpoint
    if options.save is None:
        return "Nothing was saved; with --save FOLDER and --save-interval N a run can be resumed."
    if checkpoint is None:
        return "Nothing was saved yet: the same command starts over. A smaller --save-interval saves earlier."
    again = "The same command" if options.load == options.save else f"The same command with --load {options.save}"
    return f"{again} goes on from the last checkpoint."


def _blame(error: BaseException) -> list[str]:
    """Which plugin and hook; what a worker process tells of itself has many lines and is left to the traceback."""
    return [note for note in getattr(error, "__notes__", ()) if "\n" not in note]


def _traceback(directory: RunDirectory) -> str:
    """Keep the traceback of the current exception; a full disk must not hide the run's own error."""
    try:
        return f"the traceback is in {publish(directory.logs / 'traceback.txt', traceback.format_exc())}"
    except MilesError as error:
        return f"the traceback could not be kept: {error.what}"


async def _run(attempt: Attempt, directory: RunDirectory, console: Views) -> int:
    from miles_core.build import build, parts
    from miles_core.loop import train

    plan, rollout = attempt.plan, attempt.plan.config.rollout
    components = parts(plan)
    journal = Journal(directory, console, hooks=components.driver, strict=plan.config.debug.strict_trackers,
                      decode_piece=lambda token: components.tokenizer.decode([token]),
                      samples=plan.config.checkpoint.sample_tokens,
                      print_every=plan.config.debug.debug_rollout_print_every)
    run, status, error = None, "failed", None
    try:
        run = await build(plan, components, journal)
        _tell(attempt, components, run, journal)
        attempt.begun = True
        gc.collect()
        gc.freeze()  # modules above all: each look through them costs more than one through a rollout's answers
        with stall.watched(journal, run.beat, rollout.heartbeat_interval):
            await train(run)
        status = "completed"
    except (asyncio.CancelledError, KeyboardInterrupt):
        status = "interrupted"
        raise
    except BaseException as caught:
        error = caught
        status = "restarting" if attempt.survives(caught) else "failed"
        if attempt.begun:
            error.exit_code = 1  # whatever it is, it was not there to be seen before the start
        with contextlib.suppress(MilesError):  # a full disk takes no more of it; whoever reads the terminal is told
            journal.events.append("message", level="error", text=str(error))  # first: a stop may hang
        raise
    finally:
        gc.unfreeze()
        console.stop(status)
        late = await _stop(run, components, journal, status)
        try:
            if status == "restarting":
                count, most, resumes = attempt.restarts + 1, plan.config.perf.max_restarts, attempt.resumes()
                place = f"last checkpoint in {resumes}" if resumes else "start of the run"
                journal.event("restart", count=count, most=most, culprit=error.what, error=str(error), resumes=resumes,
                              text=f"restart {count} of {most} from the {place}: {error.what}")
            else:
                journal.events.run_end(status, error)
            attempt.recorded = True
        except MilesError as full:
            late.append(full)
        if late and status == "completed":
            late[0].exit_code = 1
            raise late[0]
        for other in late if error is not None else ():  # a full disk is one thing to say, and a cancelled wait none
            if str(other) not in ("", str(error)) and not {type(error), type(other)} <= {RunDirectoryError}:
                error.add_note(f"while stopping: {other}")
    return 0


def _tell(attempt: Attempt, parts: Parts, run: Run, journal: Journal) -> None:
    """Record and show how the run begins."""
    plan, directory = attempt.plan, journal.directory
    gap = _gap(journal, run.first)
    versions = attempt.made_of["packages"] | {one.manifest.name: one.version for one in plan.selected if not one.ours}
    journal.events.run_start(attempt.digest, versions, resumed_from=run.first or None, rollouts=run.last)
    journal.event("environment", role="trainer", variables={**relevant(), **run.placement.environment})
    journal.tell(parts.driver.begin, {"name": plan.config.name, **json.loads(_json(plan))}, directory.run_id,
                 run.first or None, directory.path)
    journal.console.start({"run": plan.config.name, "model": plan.config.checkpoint.hf_checkpoint,
                           "plan": attempt.digest, "directory": str(directory)}, run.last, run.first)
    if gap is not None:
        journal.message("warning", gap)
    if run.made_of.get("format") == lock.FORMAT and (changes := lock.differences(run.made_of, attempt.made_of)):
        journal.message("info", f"resumed under another plan: {'; '.join(changes)}")
    run.made_of = attempt.made_of
    for note in plan.notes:
        journal.message("info", note)
    if run.first >= run.last:
        journal.message("info", f"nothing left to do: {run.first} of {run.last} rollouts are done; "
                                "raise --num-rollout to go on")


def _gap(journal: Journal, first: int) -> str | None:
    """Which rollouts a checkpoint has behind it and the record does not, though it began before them."""
    if not (first and journal.events.starts):
        return None
    events = list(read(journal.events.path))
    known = [event["rollout_id"] + 1 for event in events if event["event"] == "metrics"]
    known += [event.get("resumed_from") or 0 for event in events if event["event"] == "run_start"]
    return None if (end := max(known)) >= first else (
        f"the record is shorter than the checkpoint: rollouts {end} to {first - 1} are in the weights, and what was "
        "recorded of them is lost")


@contextlib.contextmanager
def _saving(plan: Plan, directory: RunDirectory) -> Iterator[None]:
    """Hold --save, which two runs with run directories of their own may share by mistake.

    Raises:
        RunDirectoryError: another run saves there.
        CheckpointError: --save or --save-hf cannot be written to; otherwise that would be found out after the rollouts.
    """
    checkpoint = plan.config.checkpoint
    exports = checkpoint.save_hf and (os.path.dirname(checkpoint.save_hf.partition("{")[0]) or ".")
    folders = {f"--save {checkpoint.save}": checkpoint.save, f"--save-hf {checkpoint.save_hf}": exports}
    for who, folder in folders.items():
        if folder is None:
            continue
        try:
            make_folder(folder)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CheckpointError("checkpoints cannot be written to this folder", code="checkpoint-folder-unwritable",
                                  got=error.strerror, who=who,
                                  fix="choose a writable folder with free space") from error
    with contextlib.ExitStack() as stack:
        if checkpoint.save is not None and not os.path.samefile(checkpoint.save, directory):  # else it is held already
            lock = Lock(Path(checkpoint.save, LOCK), "--save")
            lock.take()
            stack.callback(lock.release)
        yield


async def _stop(run: Run | None, components: Parts, journal: Journal, status: str) -> list[Exception]:
    """End the engine, the trainer, their hosts and the plugins, each within seconds; returns what went wrong. A further
    signal meanwhile cuts the present wait short, and the next part's turn comes."""
    late = []
    if run is not None:
        for end in (run.engine.stop if run.engine else None, run.trainer.close, run.placement.close):
            try:
                if end is not None:
                    await asyncio.wait_for(end(), 10)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told of by the caller
                late.append(error)
    for hooks in (components.driver, components.rollout):
        try:
            journal.tell(hooks.finish, status)
        except Exception as error:  # noqa: BLE001 - told of by the caller
            late.append(error)
    return late


def _json(plan: Plan) -> str:
    return json.dumps({"digest": plan.digest, **plan.to_json()}, indent=1)
