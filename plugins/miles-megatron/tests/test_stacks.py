"""Experts of a rank as one tensor of the stream, under layouts that cut and share them."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch
from grouped_layers import grouped, side_by_side

from miles_core.hosts import process_group
from miles_core.types import Rank

LAYERS = 4
LAYOUTS = [{"pipeline": 2, "expert": 2}, {"tensor": 2, "expert": 2, "expert_tensor": 2}]


def test_experts_that_lie_side_by_side_are_streamed_as_one_tensor(hf_model, port, caplog):
    """Views of all of them, where a stream without stacks has as many tensors as experts."""
    from miles_megatron import weights

    ours, weight_map = port(hf_model(moe=True))
    grouped(ours)
    expected = {name: tensor.clone() for name, tensor in weights.hf_stream(ours, weight_map)}
    weights.one_by_one.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert dict(weights.hf_stream(ours, weight_map, stacked=True)).keys() == expected.keys(), "each by itself"
    side_by_side(ours)
    (said,) = (record.message for record in caplog.records if record.name == weights.__name__)
    assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight" in said
    assert dict(weights.hf_stream(ours, weight_map)).keys() == expected.keys()
    storages = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    streamed, count = dict(weights.hf_stream(ours, weight_map, stacked=True)), 0
    for name, tensor in streamed.items():
        if ".experts." not in name:
            assert torch.equal(tensor, expected[name])
            continue
        assert ".experts.0-7." in name and tensor.untyped_storage().data_ptr() in storages
        for number, one in enumerate(tensor):
            assert torch.equal(one, expected[name.replace("0-7", str(number))])
            count += 1
    assert len(streamed) == len(expected) - count * 7 // 8 and count == 8 * 3 * len(ours.decoder.layers)


def test_a_hook_that_changes_the_stream_sees_single_experts(hf_model, port):
    """One that gives back what it was given, as a plugin's does that has nothing to do in a run, changes nothing."""
    from miles_megatron.models import Models

    ours, weight_map = port(hf_model(moe=True))
    grouped(ours)
    side_by_side(ours)
    models = Models.__new__(Models)
    models.actor = SimpleNamespace(settle=lambda: None, chunks=[ours], weight_map=weight_map)
    names = []
    for hook in (None, lambda stream: stream, lambda stream: (pair for pair in stream)):
        models._outgoing = hook
        names.append({name for name, _ in models.for_engine(stacked=True)})
    assert names[0] == names[1] and "model.layers.0.mlp.experts.0-7.up_proj.weight" in names[0]
    assert names[2] == {name for name, _ in models.stream()} and len(names[2]) > len(names[0])


class Streams:
    """One of four ranks: a checkpoint's model whose experts lie side by side, layout after layout."""

    def __init__(self, folder, rank: Rank):
        from miles_megatron import cpu

        torch.set_num_threads(1)
        cpu.process_group(rank, 60)
        self.folder = folder

    def same(self) -> dict[str, bool]:
        """Whether a stream with stacks says on this rank what one without says."""
        return {f"{number} on {torch.distributed.get_rank()}": self._same(layout)
                for number, layout in enumerate(LAYOUTS)}

    def _same(self, layout) -> bool:
        from miles_megatron import cpu, families, hf_config, model, weights

        cpu.initialize(**layout)
        hf = hf_config.read(self.folder)
        family = families.FAMILIES[hf.model_type]
        spec, weight_map = family.model_spec(hf), family.weight_map(hf)
        overrides = {"sequence_parallel": True} if "tensor" in layout else {}
        ours = model.build(model.transformer_config(spec, overrides), spec)
        weights.load_hf(self.folder, ours, weight_map)
        grouped(ours)
        side_by_side(ours)
        plain = {name: tensor.clone() for name, tensor in weights.hf_stream(ours, weight_map)}
        count = 0
        for name, tensor in weights.hf_stream(ours, weight_map, stacked=True):
            if ".experts." not in name:
                assert torch.equal(tensor, plain.pop(name)), name
                continue
            assert any(part in name for part in (".experts.0-3.", ".experts.4-7.")), name
            first, count = int(name.split(".experts.")[1][0]), count + 1
            for number, one in enumerate(tensor, first):
                assert torch.equal(one, plain.pop(name.replace(f"{first}-{first + 3}", str(number)))), (name, number)
        return not plain and count == 2 * 3 * LAYERS

    def close(self) -> None:
        torch.distributed.destroy_process_group()


@pytest.mark.full
def test_every_rank_sees_the_stacks_of_all(hf_model, tmp_path):
    """Stages, expert-parallel ranks, and experts that are cut among tensor-parallel ranks of their own."""
    hf_model(moe=True, num_hidden_layers=LAYERS, vocab_size=98).save_pretrained(tmp_path)

    async def main():
        ranks = process_group("streams", 4, Streams, tmp_path)
        ranks.timeout = 120
        try:
            return await ranks.same()
        finally:
            await ranks.close()

    answers = asyncio.run(main())
    assert len(answers) == 8 and all(answers.values()), answers
