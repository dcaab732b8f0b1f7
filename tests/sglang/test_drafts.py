"""Layers for multi-token prediction reach the draft of a real server, however weights are synced.

Servers on a CPU draft nothing, for want of kernels. So the draft itself is asked what it holds.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from miles_sglang.server_extension.miles_sums import sums
from miles_sglang.sync.broadcast import BroadcastSender
from miles_sglang.sync.disk import DeltaSender, DiskSender
from miles_sglang.sync.ipc import IpcSender
from miles_sglang.sync.sender import Settings
from miles_sglang.sync.servers import Reports, Target, load, plain
from safetensors.torch import load_file, save_file

from conftest import serving
from miles_core.types import Rank

KINDS = {"ipc": IpcSender, "broadcast": BroadcastSender, "disk": DiskSender, "disk-delta": DeltaSender}
DRAFTED = {"mtp.fc.weight": "fc.weight", "mtp.pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
           "mtp.layers.0.self_attn.o_proj.weight": "model.layers.0.self_attn.o_proj.weight"}
"""What the trainer sends -> what SGLang's draft calls it."""


@pytest.fixture(scope="module")
def drafting(config, models, tmp_path_factory):
    """(a server that drafts with a layer of its own checkpoint, that checkpoint's folder, its run)."""
    folder = tmp_path_factory.mktemp("drafting") / "model"
    shutil.copytree(models["old"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("model.layers.1.", "mtp.layers.0."): tensor.clone() for name, tensor in tensors.items()
                if name.startswith("model.layers.1.")}
    tensors |= {f"mtp.{name}.weight": torch.rand(32) for name in (
        "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")} | {"mtp.fc.weight": torch.rand(32, 64)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    speculation = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_eagle_topk": 1,
                   "speculative_num_draft_tokens": 2}
    served = {"max_total_tokens": 8192, "custom_weight_loader": ["miles_weights.load"], **speculation}
    run = replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(folder)),
                  surfaces={"server": served})
    with serving(run, "drafting.log") as url:
        yield Target("engine 0", url), folder, run


def held(target: Target) -> dict[str, list[int]]:
    """The sums of the draft's tensors: it is loaded before the model, so it reports first."""
    reports = Reports([target], 60)
    wanted = reports.request()
    load(target, plain({"report": {**wanted, "dtype": "float32"}}), timeout=60, draft=True)
    [answer] = reports.read(target, wanted)
    values = torch.frombuffer(bytearray.fromhex(answer["sums"]), dtype=torch.int64).view(-1, 2).tolist()
    return dict(zip(answer["names"], values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_of_it_reaches_the_draft(drafting, kind, tmp_path):
    target, folder, run = drafting
    settings = Settings.of(run, 8_000)
    sender = KINDS[kind](settings, (target,), *([tmp_path / "disk"] if kind.startswith("disk") else []))
    sender.open(Rank())
    try:
        for version in (1, 2):
            factor = 1 + version / 8 + list(KINDS).index(kind)
            sent = {name: tensor * factor for name, tensor in load_file(folder / "model.safetensors").items()}
            before = held(target)
            sender.send(iter(sent.items()), version)
            after = held(target)
            for name, theirs in DRAFTED.items():
                assert after[theirs] == sums([sent[name]])[0].tolist() != before[theirs], (name, version)
    finally:
        sender.close()
