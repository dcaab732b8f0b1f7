"""When evaluations begin, who waits for them, and what becomes of one that comes to nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from miles_core.errors import EngineError
from miles_core.evaluation import Evaluation
from miles_core.stages.rollout import ServerEngine

if TYPE_CHECKING:
    from miles_core.run import Run
    from miles_core.stages.placement import Placement
    from miles_core.stages.rollout import Engine


class DedicatedEvaluation(Evaluation):
    """Evaluations one after the other on an engine of their own.

    One that is due takes the weights that training has just sent to its own engine, and goes on while these change.
    It is waited for where the next is due, at the end of the run, and before a later checkpoint: a run that is resumed
    from there would not evaluate these weights again.

    Args:
        shared: datasets, and when they are due.
        engine: evaluates; it is started and stopped here.
        placement: hosts its servers; None where it has none to be hosted.
        skips: an evaluation that is due while another is under way is left out, unless it is the last.
    """

    def __init__(self, shared: Evaluation, engine: Engine, placement: Placement | None = None, *,
                 skips: bool = False):
        super().__init__([replace(one, generate=partial(one.generate, engine=engine)) for one in shared.datasets],
                         shared.interval, shared.skip_first)
        self._engine, self._placement, self._skips = engine, placement, skips
        self._adopted = False
        self._rollout = 0  # whose weights are evaluated, or were

    def serve(self) -> None:
        """Start the engine, beside what else starts. Called in the event loop, with which it ends at the latest."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(self._ready))

    async def begin(self, run: Run, rollout_id: int) -> None:
        """See Evaluation. Called after every rollout, so that what went wrong is told by the next."""
        due, last = self.due(rollout_id, run.last), rollout_id == run.last
        if not self._adopted:
            self._adopted = True
            run.start(self._live(run))
        if self.under_way is not None and (self.under_way.done() or run.resumable or due and (last or not self._skips)):
            await self._over(run)
        if not due:
            return
        if self.under_way is not None:
            run.journal.event("eval_skipped", rollout_id, under_way=self._rollout, level="info",
                              text=f"no evaluation at rollout {rollout_id}: that of {self._rollout} is under way")
            return
        await self._ready
        await self._update(run, rollout_id)
        if self._engine.version != run.version:  # a restarted server is not sent what training no longer has
            self._missing(run, rollout_id, "no server of the engine that evaluates could take the weights")
            return
        self.under_way, self._rollout = run.start(self.record(run, rollout_id)), rollout_id
        if last:
            await self._over(run)

    async def ended(self) -> None:
        """A sync of the run's own engine waits for none: this one keeps its weights."""

    async def _over(self, run: Run) -> None:
        run.journal.stage("eval")
        await super().ended()

    async def record(self, run: Run, rollout_id: int) -> None:
        """See Evaluation. Where the engine fails, the evaluation is missing, which is told, and the run goes on."""
        try:
            await super().record(run, rollout_id)
        except EngineError as error:
            self._missing(run, rollout_id, str(error))

    def _missing(self, run: Run, rollout_id: int, why: str) -> None:
        run.journal.event("eval_missing", rollout_id, why=why, text=f"no evaluation at rollout {rollout_id}: {why}")

    async def _update(self, run: Run, rollout_id: int) -> None:
        """Bring the engine to the version of training, as a restarted one is: the trainer has nothing else to do."""
        begin = time.perf_counter()
        async with run.placement.lease("recover"):
            figures = await run.transfer(self._engine, run.version)
        run.journal.event("eval_weights", rollout_id, version=run.version, seconds=time.perf_counter() - begin,
                          **figures)

    async def _live(self, run: Run) -> None:
        """The engine's life as a task of the run, with which it ends."""
        engine = self._engine
        if isinstance(engine, ServerEngine):
            engine.event = partial(run.journal.event, engine_of="evaluations")
        await self._serving

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            if self._placement is not None:
                await self._placement.open()
            await self._engine.start()
            ready.set_result(None)
            await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            ready.set_exception(error)
            ready.exception()  # seen: where the run ends for another reason nobody waits
        finally:
            await self._engine.stop()
            if self._placement is not None:
                await self._placement.close()
