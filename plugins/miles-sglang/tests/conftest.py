"""Engines over small servers that speak SGLang's wire format (wire.py)."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from miles_sglang.engine import SglangEngine
from wire import VOCAB

from miles_core.config.tables import Checkpoint, Debug, Rollout, RunConfig
from miles_core.stages.rollout import Request, SamplingParams


class Letters:
    """A tokenizer: a letter for each id."""

    eos_token_id = 98

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(48 + token) for token in ids)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    """A run without a trainer."""
    (tmp_path / "config.json").write_text(json.dumps({
        "vocab_size": VOCAB, "num_hidden_layers": 2, "num_experts_per_tok": 2, "max_position_embeddings": 200}))
    return RunConfig(
        checkpoint=Checkpoint(hf_checkpoint=str(tmp_path), run_dir=str(tmp_path / "run")),
        rollout=Rollout(engine="sglang"), debug=Debug(debug_rollout_only=True),
        options={"sglang": {"rollout_external": True, "router": "none", "health_check_interval": 0.2,
                            "health_check_timeout": 10.0, "readers": 0}},
    )  # fmt: skip


@pytest.fixture
def engine_over(config):
    """(*wires, mode=, trained=, **[sglang] options) -> an engine that uses these servers; `events` is what it told."""
    from dataclasses import replace

    def make(*wires, mode="retract", trained=False, perf=None, **options):
        addresses = [wire.url.removeprefix("http://") for wire in wires]
        engine = SglangEngine(replace(
            config, rollout=replace(config.rollout, pause_generation_mode=mode),
            debug=Debug(debug_rollout_only=not trained), perf=perf or config.perf,
            options={"sglang": {**config.options["sglang"], "rollout_external_engine_addrs": addresses, **options}},
            ), Letters(), None)
        engine.events = []
        engine.event = lambda kind, **fields: engine.events.append(kind)
        return engine

    return make


@pytest.fixture
def ask():
    """(name, new tokens, **of the request or its sampling) -> a request."""
    def make(name, tokens, *, prompt=(5, 6, 7), want=(), **sampling):
        return Request(f"train-{name}", prompt, SamplingParams(max_new_tokens=tokens, **sampling), 1, frozenset(want))

    return make
