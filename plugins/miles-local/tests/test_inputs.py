"""What is fed beside tokens, laid out for a batch."""

import torch
from miles_local.inputs import joined


def test_images_of_unequal_size_are_filled_up_and_what_has_one_size_stays():
    wide, high = torch.ones(1, 3, 2, 6), torch.ones(2, 3, 4, 2)
    both = joined([wide, high])
    assert both.shape == (3, 3, 4, 6)
    assert torch.equal(both[:1, :, :2], wide) and torch.equal(both[1:, :, :, :2], high)
    assert both.sum() == wide.sum() + high.sum()
    sizes = [torch.tensor([[2, 6]]), torch.tensor([[4, 2], [4, 2]])]
    assert torch.equal(joined(sizes), torch.cat(sizes))
