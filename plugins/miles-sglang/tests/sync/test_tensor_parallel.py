"""Two trainer ranks on the GPUs of one tensor-parallel engine: each engine rank loads the bucket of the rank beside it.

The engine is two models in this process, loaded by the code that runs in a server's ranks. No GPU is needed: without
one, the bytes travel in place of a handle of them.
"""

import asyncio
import base64
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from miles_sglang.server_extension import miles_weights
from miles_sglang.sync.ipc import IpcSender
from miles_sglang.sync.sender import Settings
from miles_sglang.sync.servers import LOADER, Target
from stand_in import asked, reply, served

from miles_core.hosts import process_group
from miles_core.types import Rank


class Half(torch.nn.Module):
    """Rank r's half of one layer: columns of o_proj, rows of the fused gate and up; the norm is whole."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.seen = rank, []
        layer = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(3, 4, bias=False), "norm": torch.nn.RMSNorm(4),
                                     "gate_up_proj": torch.nn.Linear(4, 6, bias=False)})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
        self.held = {name: module.weight.data for name, module in layer.items()}

    def load_weights(self, weights):
        for name, tensor in weights:
            kind = name.split(".")[-2]
            self.seen.append(name)
            if kind == "o_proj":
                self.held[kind].copy_(tensor.chunk(2, 1)[self.rank])
            elif kind == "norm":
                self.held[kind].copy_(tensor)
            else:
                self.held["gate_up_proj"].chunk(2)[kind == "up_proj"].copy_(tensor.chunk(2)[self.rank])


def policy():
    torch.manual_seed(0)
    return {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in
            {"norm": (4,), "o_proj": (4, 6), "gate_proj": (6, 4), "up_proj": (6, 4)}.items()}


class Trainer:
    """A rank that has the whole stream."""

    def __init__(self, target, rank: Rank):
        dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.index, world_size=rank.size)
        settings = Settings(limit=120, timeout=20, source="float32", target="float32", tied=False, heads=2, layers=1,
                            checkpoint="")
        self.sender = IpcSender(settings, (target,))
        self.sender.open(rank)

    def send(self, version):
        return self.sender.send(iter(policy().items()), version)

    def close(self):
        self.sender.close()
        dist.destroy_process_group()


@pytest.fixture
def engine(monkeypatch):
    """(target, its two models, requests for buckets)."""
    models, rank, buckets = [Half(0), Half(1)], [0], []
    monkeypatch.setattr(miles_weights, "dist", SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: rank[0], TCPStore=dist.TCPStore))

    def answer(handler, path):
        if handler.command == "GET":
            return reply(handler, 200, {"custom_weight_loader": [LOADER], "load_format": "dummy"})
        each = asked(handler)["serialized_named_tensors"]
        loads = [pickle.loads(base64.b64decode(one)) for one in each]
        if json.loads(loads[0][0][0]).get("tensors"):
            buckets.append(each)
        for rank[0], (model, named) in enumerate(zip(models, loads, strict=True)):
            miles_weights.load(model, named)
        return reply(handler, 200, {"success": True})

    with served(answer) as url:
        yield Target("engine 0", url, size=2, gpus=(0, 1)), models, buckets


def test_every_engine_rank_loads_the_bucket_of_the_trainer_rank_beside_it(engine):
    target, models, buckets = engine

    async def main():
        trainer = process_group("trainer", 2, Trainer, target)
        trainer.timeout = 60
        try:
            return [await trainer.send(version) for version in (1, 2)]
        finally:
            await trainer.close()

    figures = asyncio.run(main())
    sent = policy()
    assert figures[1]["tensors"] == 4 and len(buckets) == 2 * 2, "norm with o_proj, then gate with up"
    gate, up = sent["model.layers.0.gate_proj.weight"], sent["model.layers.0.up_proj.weight"]
    for rank, model in enumerate(models):
        assert model.seen == 2 * list(sent)
        assert torch.equal(model.held["o_proj"], sent["model.layers.0.o_proj.weight"][:, 3 * rank : 3 * rank + 3])
        assert torch.equal(model.held["gate_up_proj"], torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
