"""A real SGLang server on the CPU, started once; tests here are skipped where there is no environment for it.

MILES_SGLANG_PYTHON names the interpreter, or `make sglang-cpu` made .venv-sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.config.tables import Checkpoint, Debug, Perf, Rollout, RunConfig

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("MILES_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")
LAUNCHER = [str(PYTHON), str(Path(__file__).with_name("sglang_cpu.py"))]
sys.path.insert(0, str(Path(__file__).parent))  # proxy.py and scenes.py


@pytest.fixture(scope="module")
def found(request):
    """What the script beside a test of its name, test_stacks.py's stacks.py, prints in SGLang's own interpreter."""
    script = request.path.with_name(request.path.name.removeprefix("test_"))
    done = subprocess.run([PYTHON, script], capture_output=True, text=True, timeout=180,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def pytest_collection_modifyitems(items) -> None:
    """All on one worker, as one server is enough for two cores; none in the gate, which has no server."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.full)
            item.add_marker(pytest.mark.xdist_group("sglang"))
            if not PYTHON.is_file():
                item.add_marker(pytest.mark.skip(reason="no SGLang for the CPU: run `make sglang-cpu`"))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two random mixtures of experts, "old" and "new". Untied: SGLang's Qwen3-MoE knows no tied embeddings."""
    import subprocess

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    found = {}
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        folder = found[name] = tmp_path_factory.mktemp("models") / name
        Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, eos_token_id=258, pad_token_id=256,
            tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            norm_topk_prob=True, decoder_sparse_step=1, initializer_range=0.2)).save_pretrained(folder)  # fmt: skip
        subprocess.run([sys.executable, ROOT / "examples" / "arithmetic" / "make_tokenizer.py", folder], check=True)
    return found


@pytest.fixture(scope="session")
def tokenizer(models):
    """The tokenizer of both."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models["old"])


@pytest.fixture(scope="session")
def config(models, tmp_path_factory) -> RunConfig:
    """A run without a trainer that starts servers of its own."""
    return RunConfig(
        checkpoint=Checkpoint(hf_checkpoint=str(models["old"]), run_dir=str(tmp_path_factory.mktemp("run"))),
        rollout=Rollout(engine="sglang", rollout_max_context_len=2048), perf=Perf(bf16=False),
        options={"sglang": {"server_command": LAUNCHER, "router": "none", "health_check_timeout": 5.0}},
        surfaces={"server": {"max_total_tokens": 8192, "enable_return_routed_experts": True,
                "custom_weight_loader": ["miles_weights.load"]}},
        debug=Debug(debug_rollout_only=True),
    )  # fmt: skip


@pytest.fixture(scope="session")
def server(config):
    """The server's URL."""
    with serving(config, "session.log") as url:
        yield url


@contextlib.contextmanager
def serving(config: RunConfig, name: str):
    """The URL of a server of its own, with its log in the run's folder."""
    from miles_sglang.arguments import command, environment
    from miles_sglang.client import Client
    from miles_sglang.server import ServerProcess

    from miles_core.errors import MilesError
    from miles_core.types import NodeSlot

    process = ServerProcess(NodeSlot())
    port = process.free_ports(1)[0]
    log = Path(config.checkpoint.run_dir) / "logs" / name
    process.start(command(config, NodeSlot(), port, None), environment(config, NodeSlot()), log)

    async def healthy() -> bool:
        client = Client(f"http://127.0.0.1:{port}", "the server")
        try:
            await client.healthy(timeout=30)
            return True
        except MilesError:
            return False
        finally:
            await client.reset()

    until = time.monotonic() + 600
    try:
        while not asyncio.run(healthy()):
            assert process.exit_code() is None and time.monotonic() < until, "\n".join(process.tail(50))
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


@pytest.fixture
def beside(config, tokenizer, server):
    """(address, mode=, **[sglang] options) -> an engine that uses a server that runs, by default the real one."""
    from miles_sglang.engine import SglangEngine

    def make(address: str | None = None, *, mode: str = "retract", **options):
        sglang = {**config.options["sglang"], "rollout_external": True, "server_command": [],
                  "rollout_external_engine_addrs": [address or server.removeprefix("http://")], **options}
        engine = SglangEngine(replace(config, options={"sglang": sglang}, rollout=replace(
            config.rollout, pause_generation_mode=mode)), tokenizer, None)
        engine.events = []
        engine.event = lambda kind, **fields: engine.events.append((kind, fields))
        return engine

    return make

