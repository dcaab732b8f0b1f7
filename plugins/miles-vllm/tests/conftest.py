"""An engine whose servers are wire_server.py: real processes and HTTP, no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "arithmetic" / "tiny-qwen3"


@pytest.fixture
def python(tmp_path) -> Path:
    """What stands for the Python that has vLLM."""
    path = tmp_path / "python-with-vllm"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("wire_server.py")}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def make(tmp_path, python):
    """(**[vllm] options) -> an engine that is not started."""
    from miles_vllm.engine import VllmEngine
    from miles_vllm.plugin import VllmOptions

    from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig
    from miles_core.stages.placement import Local

    class Numbers:
        """A tokenizer whose text is the numbers."""

        def decode(self, ids, skip_special_tokens=False):
            return " ".join(map(str, ids))

    def engine(**options) -> VllmEngine:
        config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(MODEL), run_dir=str(tmp_path / "run")),
                           rollout=Rollout(engine="vllm", rollout_max_context_len=512), perf=Perf(bf16=False))
        one = VllmEngine(config, VllmOptions(**{"python": str(python), **options}), Numbers(), Local(config))
        one.events = []
        one.event = lambda kind, **fields: one.events.append((kind, fields))
        return one

    return engine
