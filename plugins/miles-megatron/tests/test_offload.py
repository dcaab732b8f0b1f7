"""What leaves the device and comes back, on a CPU: copies that may come later wait there until they are asked for."""

from types import SimpleNamespace

import pytest
import torch
from miles_megatron import host_memory
from miles_megatron.offload import GRADIENTS, OPTIMIZER, TAGS, WEIGHTS, Offload


class Model:
    """Two weights in one buffer, gradients in another; an optimizer of tensors of their own, two in one storage, and
    one that is a weight's."""

    def __init__(self):
        torch.manual_seed(0)
        self.buffer, gradients = torch.randn(24), torch.ones(24)
        self.weights = [torch.nn.Parameter(part) for part in self.buffer.split([8, 16])]
        chunk = SimpleNamespace(buffers=[SimpleNamespace(grad_data=gradients)], expert_parallel_buffers=[])
        self.wrapped, self.declared = [chunk], SimpleNamespace(trainable=True)
        self.masters = [torch.nn.Parameter(torch.randn(size)) for size in (8, 300, 5)]
        joined = torch.randn(20)
        state = {self.masters[0]: {"exp_avg": joined[:8], "exp_avg_sq": joined[8:16], "step": torch.tensor(3.0)},
                 self.masters[1]: {"exp_avg": torch.randn(300).bfloat16(), "exp_avg_sq": torch.randn(20, 15)}}
        groups = [{"params": [*self.masters, self.weights[0]]}]
        inner = SimpleNamespace(param_groups=groups, state=state)
        self.optimizer = SimpleNamespace(optimizer=inner, zero_grad=lambda: None)
        self.state = [*self.masters, *(one for each in state.values() for one in each.values())]

    def parameters(self):
        return iter(self.weights)

    def settle(self):
        """Nothing is being gathered."""


@pytest.fixture
def model():
    return Model()


def bits(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(tensors, wanted):
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(tensors, wanted, strict=True))


def test_every_bit_comes_back_time_after_time(model):
    memory = Offload(model)
    weights, state = bits(model.weights), bits(model.state)
    for turn in range(3):
        memory.offload(TAGS)
        assert not any(memory.held(tag) for tag in TAGS)
        assert not any(one.untyped_storage().nbytes() for one in (*model.weights, *model.state))
        memory.onload(TAGS)
        memory.arrived()
        assert same(model.weights, weights) and same(model.state, state), turn
        for one, wanted in zip(model.state, state, strict=True):
            one.data.mul_(1.5)
            wanted.mul_(1.5)
    assert not model.wrapped[0].buffers[0].grad_data.any()


def test_state_of_many_tensors_is_one_storage_from_its_first_return_on(model):
    """But for what shares its storage with others, which stays as it was."""
    memory = Offload(model)
    count = len({one.untyped_storage().data_ptr() for one in model.state})
    places = {id(one): one for one in model.state}
    memory.offload([OPTIMIZER])
    memory.onload([OPTIMIZER])
    memory.arrived()
    assert count == 7 and len({one.untyped_storage().data_ptr() for one in model.state}) == 2
    moments = model.optimizer.optimizer.state[model.masters[0]]
    assert moments["exp_avg"].untyped_storage().data_ptr() == moments["exp_avg_sq"].untyped_storage().data_ptr()
    assert all(one.data_ptr() % host_memory.ALIGNMENT == model.masters[0].data_ptr() % host_memory.ALIGNMENT
               for one in model.masters)
    assert {id(one): one for one in model.state}.keys() == places.keys(), "the tensors are the same objects"


def test_optimizer_state_is_there_when_it_is_asked_for(model):
    memory, state = Offload(model), bits(model.state)
    memory.offload(TAGS)
    memory.onload(TAGS)
    for one in model.state:
        one.data.fill_(7)  # what an allocator may leave there
    memory.arrived()
    assert same(model.state, state)


def test_state_may_leave_while_the_caller_goes_on(model):
    memory, state = Offload(model), bits(model.state)
    memory.offload([GRADIENTS, OPTIMIZER], wait=False)
    assert memory.held(GRADIENTS) == 0 and memory.held(OPTIMIZER) > 0
    memory.offload([WEIGHTS])
    assert not any(memory.held(tag) for tag in TAGS), "whatever comes next lets it go"
    memory.onload(TAGS)
    memory.arrived()
    assert same(model.state, state)


def test_host_memory_is_taken_once(model):
    memory = Offload(model)
    memory.offload(TAGS)
    first = {tag: [block.data_ptr() for block in host.blocks] for tag, host in memory.host.items()}
    for _ in range(2):
        memory.onload(TAGS)
        memory.offload(TAGS)
    assert {tag: [block.data_ptr() for block in host.blocks] for tag, host in memory.host.items()} == first


def test_pieces_fill_blocks_to_their_ends(monkeypatch):
    """No piece crosses from one block to the next, and each begins where a tensor may."""
    monkeypatch.setattr(host_memory, "BLOCK", 8192)
    sizes = [100, 8000, 9000, 512, 1]
    host = host_memory.Blocks()
    host.reserve(5000).join(10)
    for _ in range(2):
        host.rewind(sum(map(host_memory.rounded_up, sizes)))
        parts = [list(host.pieces(size)) for size in sizes]
        assert [sum(piece.nbytes for piece in pieces) for pieces in parts] == sizes
        spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for pieces in parts for piece in pieces)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert all(start % host_memory.ALIGNMENT == 0 for start, _ in spans)
    assert [block.nbytes for block in host.blocks] == [8192, 8192, 4096]
