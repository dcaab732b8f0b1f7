"""What plugins do to weights on their way out, seen in a whole run: to the engine, and into an exported directory."""

from __future__ import annotations

import json

import pytest
from miles_sglang.serving import with_engine_args
from miles_testing import toy_run
from safetensors.torch import load_file

from miles_core.config.tables import Rollout, RunConfig
from miles_core.errors import HookError
from miles_core.plugins.bind import Hooks

PLUGIN = '''
import json
from miles_core import hookimpl

class Named:
    """Renames what leaves, and names it back."""

    @hookimpl
    def export_weights(self, stream):
        for name, tensor in stream:
            yield f"sent.{name}", tensor * 2

    @hookimpl
    def import_weights(self, stream):
        for name, tensor in stream:
            yield (name.removeprefix("sent."), tensor / 2) if name.startswith("sent.") else (name, tensor)

    @hookimpl
    def save_weights(self, stream, folder):
        names = []
        for name, tensor in stream:
            names.append(name)
            yield name, tensor
        folder.with_name("named.json").write_text(json.dumps(names))
'''

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_export_import_and_save_weights_each_see_the_whole_stream(tmp_path):
    """With the two that undo each other the run has the metrics of one without; the export has the plain names."""
    path = tmp_path / "named.py"
    path.write_text(PLUGIN)
    export = tmp_path / "hf"
    plain = toy_run(steps=2)
    run = toy_run([path], steps=2, flags=["--save-hf", str(export), "--save", str(tmp_path / "saved")])
    keys = ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")
    assert [[one.get(key) for key in keys] for one in run.metrics] == [[one.get(key) for key in keys]
                                                                      for one in plain.metrics]
    names = json.loads((tmp_path / "named.json").read_text())
    saved = {name for file in export.glob("*.safetensors") for name in load_file(file)}
    assert saved == set(names) and "model.embed_tokens.weight" in saved


def sglang(**fields) -> RunConfig:
    return RunConfig(rollout=Rollout(engine="sglang"), surfaces={"server": {"context_length": 64}},
                     stated={"engine:sglang": ("servers", "server_args")}, **fields)


def hooks(chain) -> Hooks:
    return Hooks(role="rollout", instances={}, engine_args=chain)


def test_engine_args_adds_to_the_servers_fields():
    config = with_engine_args(sglang(), hooks(lambda fields: {**fields, "enable_lora": True}))
    assert config.surface("server") == {"context_length": 64, "enable_lora": True}
    assert with_engine_args(sglang(), hooks(None)) == sglang(), "nobody adds anything"


def test_a_field_that_the_server_does_not_have_is_refused():
    with pytest.raises(HookError, match="engine_args sets a field that the server does not have.*no_such_field"):
        with_engine_args(sglang(), hooks(lambda fields: {"no_such_field": 1}))
