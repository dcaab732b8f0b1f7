"""Execute: carry out a plan in its run directory, and end cleanly however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from miles_core.config.environment import relevant
from miles_core.config.load import with_values
from miles_core.errors import CheckpointError, DiedError, EngineDiedError, MilesError
from miles_core.plugins import lock
from miles_core.plugins.plan import Plan
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory, publish
from miles_core.record.journal import Journal, Views
from miles_core.stages.step import TRACKER

if TYPE_CHECKING:
    from miles_core.run import Run


def execute(plan: Plan, *, live: bool | None = None) -> int:
    """Run a plan to its end; returns the exit code.

    Raises:
        MilesError: what ended the run; it is in events.jsonl as well.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads must not spin beside the engine's
    with RunDirectory(plan.config.checkpoint.run_dir).acquire() as directory, directory.open_log("run.log") as log:
        publish(directory.plan_text, plan.to_text())
        publish(directory.plan_json, _json(plan))
        publish(directory.lock, lock.text(lock.of(plan)))
        attempt = Attempt.first(plan)
        while True:
            console = Views(Console(live), Console(False, log, details=True))
            try:
                return asyncio.run(_run(attempt, directory, console))
            except (KeyboardInterrupt, asyncio.CancelledError):
                console.stop("interrupted")
                print(f"Interrupted. {_how_to_go_on(plan)}", file=sys.stderr)
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
                raise MilesError(f"{type(error).__name__}: {text}",
                                 who=" ".join(_blame(error)).removeprefix("in ") or "miles",
                                 fix=f"mend it; {_traceback(directory)}") from error


@dataclass
class Attempt:
    """One start of a run, of which --max-restarts allows several.

    Args:
        digest: of the plan as it was given, whatever a restart loads.
        restarts: how many starts there were before.
        published: what the tracker of --save was at the first start.
        begun: whether this start, or one before, came to its first rollout.
    """

    plan: Plan
    digest: str
    published: object
    restarts: int = 0
    begun: bool = False

    @classmethod
    def first(cls, plan: Plan) -> Attempt:
        return cls(plan, plan.digest, _published(plan.config.checkpoint.save))

    def survives(self, error: BaseException) -> bool:
        """Whether the run goes on after it: a process is gone, and a new one may fare better."""
        died = isinstance(error, DiedError | EngineDiedError)
        return died and self.begun and self.restarts < self.plan.config.perf.max_restarts

    def resumes(self) -> str | None:
        """Where the next start goes on; None for where the first began."""
        given, tracker = self.plan.config.checkpoint, _published(self.plan.config.checkpoint.save)
        own = tracker is not None and (given.load == given.save or tracker != self.published)
        return given.save if own else None

    def next(self) -> Attempt:
        """The start after this one."""
        plan = self.plan
        if (folder := self.resumes()) is not None:
            own = _published(folder) != self.published  # made by this run, which has left out what it should
            drop = [] if own else plan.config.checkpoint.drop_plugin_state
            plan = replace(plan, config=with_values(plan.config, "restart", checkpoint__load=folder,
                                                    checkpoint__drop_plugin_state=drop,
                                                    rollout__start_rollout_id=None))
        return replace(self, plan=plan, restarts=self.restarts + 1)


def _published(save: str | None) -> object:
    """Tells one checkpoint published into a folder from the next; None where none was."""
    try:
        found = os.stat(os.path.join(save or "", TRACKER))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _how_to_go_on(plan: Plan) -> str:
    given = plan.config.checkpoint
    if given.save is None:
        return "Nothing was saved; with --save FOLDER and --save-interval N a run can be resumed."
    again = "The same command" if given.load == given.save else f"The same command with --load {given.save}"
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

    # Not by way of SIGINT: a shell's background job ignores that one.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    plan = attempt.plan
    found = parts(plan)
    journal = Journal(directory, console, trackers=found.driver.metrics, decode_piece=found.decode_piece,
                      print_every=plan.config.debug.debug_rollout_print_every)
    run, status, error = None, "failed", None
    try:
        _prove_writable(plan)
        run = await build(plan, found, journal)
        _tell(attempt, run, journal)
        attempt.begun = True
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
            journal.events.message("error", str(error))  # before anything is stopped, which may hang as well
        raise
    finally:
        console.stop(status)
        late = await _stop(run, found)
        try:
            if status == "restarting":
                journal.event("restart", count=attempt.restarts + 1, most=plan.config.perf.max_restarts,
                              culprit=error.what, error=str(error), resumes=attempt.resumes())
            else:
                journal.events.run_end(status, error)
        except MilesError as full:
            late.append(full)
        if late and status == "completed":
            late[0].exit_code = 1
            raise late[0]
        for other in late if error is not None else ():  # the run's own error matters more
            if str(other) != str(error):  # a full disk is one thing to say
                error.add_note(f"while stopping: {other}")
    return 0


def _tell(attempt: Attempt, run: Run, journal: Journal) -> None:
    """Record and show how the run begins."""
    plan, directory = attempt.plan, journal.directory
    journal.events.run_start(attempt.digest, _versions(plan), resumed_from=run.first or None, rollouts=run.last)
    journal.event("environment", role="trainer", variables={**relevant(), **run.placement.environment})
    journal.console.start({"run": plan.config.name, "model": plan.config.checkpoint.hf_checkpoint,
                           "plan": attempt.digest, "directory": str(directory)}, run.last, run.first)
    for note in plan.notes:
        journal.message("info", note)
    if run.first >= run.last:
        journal.message("info", f"nothing left to do: {run.first} of {run.last} rollouts are done; "
                                "raise --num-rollout to go on")


def _prove_writable(plan: Plan) -> None:
    """
    Raises:
        CheckpointError: --save or --save-hf cannot be written to; otherwise that would be found out after the rollouts.
    """
    given = plan.config.checkpoint
    exports = given.save_hf and (os.path.dirname(given.save_hf.partition("{")[0]) or ".")
    folders = {f"--save {given.save}": given.save, f"--save-hf {given.save_hf}": exports}
    for who, folder in folders.items():
        if folder is None:
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CheckpointError("checkpoints cannot be written here", got=error.strerror, who=who,
                                  fix="give a folder that you may write to, with space left") from error


async def _stop(run, found) -> list[Exception]:
    """End the engine, the trainer, their hosts and the plugins, each within seconds; returns what went wrong."""
    late = []
    if run is not None:
        for end in (run.engine.stop if run.engine else None, run.trainer.close, run.placement.close):
            try:
                if end is not None:
                    await asyncio.wait_for(end(), 10)
            except Exception as error:  # noqa: BLE001 - told of by the caller
                late.append(error)
    for hooks in (found.driver, found.rollout):
        try:
            if hooks.finish is not None:
                hooks.finish()
        except Exception as error:  # noqa: BLE001 - told of by the caller
            late.append(error)
    return late


def _versions(plan: Plan) -> dict[str, str]:
    packages = ("miles-core", "torch", "megatron-core", "transformers")
    return {name: importlib.metadata.version(name) for name in packages} | {
        one.manifest.name: one.version for one in plan.selected if one.source != "built-in"}


def _json(plan: Plan) -> str:
    import json

    return json.dumps({"digest": plan.digest, **plan.to_json()}, indent=1)
