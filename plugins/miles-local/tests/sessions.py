"""Started engines for tests, in bounded time."""

from __future__ import annotations

import asyncio

from miles_local.engine import LocalEngine

PATIENCE = 20


def session(body, folder, **options):
    """Run `body(engine)` against a started engine, in bounded time."""

    async def run():
        engine = LocalEngine(folder, **options)
        async with asyncio.timeout(PATIENCE):
            await engine.start()
            try:
                return await body(engine)
            finally:
                await engine.stop()

    return asyncio.run(run())


def together(requests):
    async def body(engine):
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return body
