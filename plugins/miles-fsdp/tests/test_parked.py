"""Bytes of tensors leave and come back, and what points at them stays what it is."""

import torch
from miles_fsdp.parked import Parked


def test_bytes_are_gone_and_come_back_to_every_view():
    tensor, parked = torch.arange(6.0).reshape(2, 3), Parked()
    row, expected = tensor[1], tensor.clone()
    for _ in range(2):
        parked.park({"weight": tensor})
        parked.park({"weight": tensor})  # what is away stays away
        assert tensor.untyped_storage().nbytes() == 0 and tensor.shape == (2, 3)
        parked.fetch({"weight": tensor})
        parked.fetch({"weight": tensor})
        assert torch.equal(tensor, expected) and torch.equal(row, expected[1])
        tensor += 1
        expected += 1


def test_host_memory_is_found_once_for_a_name_and_a_size():
    parked, tensor = Parked(), torch.ones(4)
    parked.park({"state": tensor})
    copy = parked._copies["state"]
    parked.fetch({"state": tensor})
    parked.park({"state": tensor})
    assert parked._copies["state"] is copy
    parked.fetch({"state": tensor})
    larger = torch.full((9,), 2.0)
    parked.park({"state": larger})
    parked.fetch({"state": larger})
    assert parked._copies["state"].nbytes == 36 and torch.equal(larger, torch.full((9,), 2.0))
