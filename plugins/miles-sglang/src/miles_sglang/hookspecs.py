"""The hooks of the SGLang engine, beside those of the core."""

from __future__ import annotations

from typing import Any

from miles_core.hookspecs import hookspec


@hookspec("chain", role="rollout", per="run")
def engine_args(fields: dict[str, Any]) -> dict[str, Any]:
    """2: fields of SGLang's ServerArgs that the run sets, before servers start: what follows from options."""
