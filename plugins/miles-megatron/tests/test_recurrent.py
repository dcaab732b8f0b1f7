"""What mixers with a state share."""

import torch
from miles_megatron.recurrent import Again, causal_convolution


def test_what_is_computed_again_has_the_same_gradients_and_keeps_its_inputs_alone():
    x, y, saved = torch.randn(5, requires_grad=True), torch.randn(5), []

    def function(x, y):
        return (x.sin() * y).cumsum(0).exp()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = Again.apply(function, x, y)
    assert saved == [5, 5]
    weight = torch.randn(5)
    [got], [wanted] = (torch.autograd.grad(one, [x], weight) for one in (out, function(x, y)))
    assert torch.equal(got, wanted)


def test_the_convolution_sees_what_came_before_alone():
    x, weight, bias = torch.randn(2, 9, 3), torch.randn(3, 1, 4), torch.randn(3)
    out = causal_convolution(x, weight, bias)
    changed = x.clone()
    changed[:, 5] += 1
    other = causal_convolution(changed, weight, bias)
    assert torch.equal(out[:, :5], other[:, :5]) and not torch.equal(out[:, 5:], other[:, 5:])
    here = sum(weight[:, 0, 3 - back] * x[0, 7 - back] for back in range(4))
    torch.testing.assert_close(out[0, 7], torch.nn.functional.silu(here + bias))
