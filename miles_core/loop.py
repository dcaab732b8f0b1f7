"""prompts -> rollout -> reward -> filter -> buffer -> advantage -> loss -> step -> sync.

The nine stages, once, in order. A producer fills the buffer and a consumer drains it; the buffer's room is the whole
off-policy contract, so synchronous, one step off and fully asynchronous are values of `max_lag`, not other loops.

      produce()                                              consume()
    +------------------------------------------+           +--------------------------------------------+
    | reserve a slot        waits for room     |           | 5 take a batch      waits for it to fill   |
    | 1 prompt                                 |  groups   | 6 advantage         after the log-prob pass|
    | 2 rollout    engine   lease "rollout"    |  ------>  | 7 loss, 8 step      lease "train"          |
    | 3 reward     scorers                     |  buffer   | 9 sync              lease "sync"           |
    | 4 filter     keep, or drop with a reason |           | release: the slots are free again          |
    +------------------------------------------+           +--------------------------------------------+
          ^                                                             |
          +------- room, and weights of version n + 1 in the engine ----+

At max_lag 0 the buffer holds one batch: its slots are free only after the sync, so all of a batch is sampled from the
weights that it trains. At max_lag n it holds n + 1 batches, and sampling runs ahead by as many.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.run import Run
    from miles_core.stages.buffer import Slot


async def train(run: Run) -> None:
    """Run both sides; the consumer is the clock, and whichever fails first ends the run with its own error."""
    await run.begin()
    async with run.placement.lease("sync"):
        await run.sync(run.first)                          # the engine's own weights never matter
    await run.evaluation.begin(run, run.first)
    sides = [run.start(consume(run)), run.start(produce(run))]
    try:
        done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        errors = run.errors[:1]                            # before others fail for being ended
    finally:
        await run.rest()
    for error in errors:
        raise error
    for side in done:
        side.result()


async def produce(run: Run) -> None:
    """Fill the buffer. Waits for: room. Unblocked by: consume() after a sync, or a drop."""
    run.start(run.heartbeat())
    while True:
        slot = await run.buffer.reserve()
        run.prompt(slot)                                   # 1 prompts
        slot.task = run.start(sample(run, slot))


async def sample(run: Run, slot: Slot) -> None:
    """One slot's way from prompt to buffer; an error here is the run's error."""
    with run.buffer.filling(slot):
        async with run.placement.lease("rollout"):
            slot.group = await run.rollout(slot)           # 2 rollout
            slot.group = await run.reward(slot.group)      # 3 reward
        slot.outcome = run.filter(slot.group)              # 4 filter: a drop is counted with its reason


async def consume(run: Run) -> None:
    """Drain the buffer. Waits for: the oldest full batch. Unblocked by: produce()."""
    for rollout_id in run.rollouts():
        batch = run.batch(rollout_id, await run.buffer.take())     # 5 buffer
        async with run.placement.lease("train"):
            await run.trainer.take_batch(batch)
            await run.score()
            await run.advantage()                          # 6 advantage
            for step in range(run.steps):
                await run.step(step)                       # 7 loss, 8 step
            batch = await run.trainer.end_batch()
        async with run.placement.lease("sync"):
            await run.sync(rollout_id + 1)                 # 9 sync; only now does the room come back
        run.buffer.release()
        await run.finish(batch)                            #   report, evaluate, checkpoint
