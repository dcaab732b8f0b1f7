"""Execute: carry out a plan in its run directory, and end cleanly however it ends."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
import traceback

from miles_core.errors import MilesError
from miles_core.plugins.plan import Plan
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory, publish


def execute(plan: Plan, *, live: bool | None = None) -> int:
    """Run a plan to its end; returns the exit code.

    Raises:
        MilesError: what ended the run; it is in events.jsonl as well.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads must not spin beside the engine's
    console = Console(live)
    with RunDirectory(plan.config.checkpoint.run_dir).acquire() as directory:
        publish(directory.plan_text, plan.to_text())
        publish(directory.plan_json, _json(plan))
        try:
            return asyncio.run(_run(plan, directory, console))
        except KeyboardInterrupt:
            console.stop("interrupted")
            console.message("warning", "interrupted; the same command with --load goes on from the last checkpoint")
            return 130
        except MilesError:
            console.stop("failed")
            raise
        except Exception as error:
            console.stop("failed")
            path = directory.logs / "traceback.txt"
            publish(path, traceback.format_exc())
            notes = " ".join(getattr(error, "__notes__", ()))
            raise MilesError(f"{type(error).__name__}: {error} {notes}".strip(), who=notes or "miles",
                             fix=f"the traceback is in {path}") from error


async def _run(plan: Plan, directory: RunDirectory, console: Console) -> int:
    from miles_core.build import build, parts
    from miles_core.loop import train
    from miles_core.record.journal import Journal

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _interrupt)
    found = parts(plan)
    journal = Journal(directory, console, trackers=found.driver.metrics, decode_piece=found.decode_piece,
                      print_every=plan.config.debug.debug_rollout_print_every)
    run, status, error = None, "failed", None
    try:
        run = await build(plan, found, journal)
        journal.events.run_start(plan.digest, _versions(plan), resumed_from=run.first or None, rollouts=run.last)
        console.start({"run": plan.config.name, "model": plan.config.checkpoint.hf_checkpoint, "plan": plan.digest,
                       "directory": str(directory)}, run.last, run.first)
        for note in plan.notes:
            journal.message("info", note)
        if run.first >= run.last:
            journal.message("info", f"nothing left to do: {run.first} of {run.last} rollouts are done; raise --num-rollout to go on")
        await train(run)
        status = "completed"
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    except BaseException as caught:
        error = caught
        raise
    finally:
        journal.events.run_end(status, error)
        console.stop(status)
        await _stop(run, found)
    return 0


async def _stop(run, found) -> None:
    """Bounded, and never in the way of the error that ended the run."""
    if run is not None:
        for part in (run.engine.stop() if run.engine else None, run.trainer.close()):
            if part is not None:
                try:
                    await asyncio.wait_for(part, 10)
                except Exception as error:  # noqa: BLE001 - the run's own error matters more than this one
                    print(f"while stopping: {error}", file=sys.stderr)
    for hooks in (found.driver, found.rollout):
        if hooks.finish is not None:
            hooks.finish()


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _versions(plan: Plan) -> dict[str, str]:
    packages = ("miles-core", "torch", "megatron-core", "transformers")
    return {name: importlib.metadata.version(name) for name in packages} | {
        one.manifest.name: one.version for one in plan.selected if one.source != "built-in"}


def _json(plan: Plan) -> str:
    import json

    return json.dumps({"digest": plan.digest, **plan.to_json()}, indent=1)
