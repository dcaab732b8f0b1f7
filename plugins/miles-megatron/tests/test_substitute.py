"""A layer computes with functions of its weights; its parameters, their gradients and their names stay."""

from __future__ import annotations

import pytest
import torch
from miles_megatron.substitute import substitute, substitute_all
from torch.utils.checkpoint import checkpoint


class Grouped(torch.nn.Module):
    """Reads a weight per expert by name, as Transformer Engine's grouped linear layer does."""

    def __init__(self, experts: int):
        super().__init__()
        self.experts = experts
        for i in range(experts):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.full((2, 2), float(i + 1))))

    def forward(self, x):
        weights = [getattr(self, f"weight{i}") for i in range(self.experts)]
        return torch.stack([x @ weight.t() for weight in weights])


def test_the_forward_sees_the_value_and_the_parameter_stays():
    layer = torch.nn.Linear(3, 2)
    held, names, x = layer.weight.detach().clone(), list(layer.state_dict()), torch.randn(4, 3)
    substitute(layer, lambda weight: 2 * weight)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, 2 * held, layer.bias))
    assert torch.equal(layer.weight, held) and isinstance(layer.weight, torch.nn.Parameter)
    assert list(layer.state_dict()) == names and dict(layer.named_parameters()).keys() == {"weight", "bias"}
    layer.weight.data.zero_()  # what is loaded or stepped later counts
    assert torch.equal(layer(x), layer.bias.expand(4, 2))


def test_gradients_flow_through_the_function():
    layer, x = torch.nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    substitute(layer, lambda weight: 3 * weight)
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, 3 * x.sum(0).expand(2, 3))


def test_a_straight_through_estimator_has_the_gradient_of_the_rounded_weight():
    layer, other, x = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.randn(4, 3)
    other.load_state_dict({"weight": layer.weight.round(), "bias": layer.bias})
    substitute(layer, lambda weight: weight + (weight.round() - weight).detach())
    for module in (layer, other):
        module(x).square().sum().backward()
    assert torch.allclose(layer.weight.grad, other.weight.grad)


def test_functions_apply_in_the_order_in_which_they_were_given():
    layer, x = torch.nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    substitute(layer, lambda weight: weight + 1)
    substitute(layer, lambda weight: 10 * weight)
    expected = x @ (10 * (layer.weight + 1)).t()
    assert torch.allclose(layer(x), expected)


def test_a_recomputation_sees_it_too():
    layer, calls, x = torch.nn.Linear(3, 2, bias=False), [], torch.randn(4, 3, requires_grad=True)
    substitute(layer, lambda weight: (calls.append(1), 3 * weight)[1])
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert len(calls) == 2
    assert torch.allclose(layer.weight.grad, 3 * (2 * x @ (3 * layer.weight).t()).t() @ x)


def test_several_weights_by_one_call():
    layer, calls = Grouped(3), []

    def double(*weights):
        calls.append(len(weights))
        return [2 * weight for weight in weights]

    substitute_all(layer, double, [f"weight{i}" for i in range(3)])
    substitute(layer, lambda weight: weight + 1, "weight1")
    out = layer(torch.ones(1, 2))
    assert calls == [3] and out[:, 0, 0].tolist() == [4.0, 10.0, 12.0]
    out.sum().backward()
    assert [float(layer.get_parameter(f"weight{i}").grad[0, 0]) for i in range(3)] == [2.0, 2.0, 2.0]


def test_an_error_in_the_forward_leaves_the_parameter():
    layer = torch.nn.Linear(3, 2)
    substitute(layer, lambda weight: 2 * weight)
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 5))
    assert isinstance(layer.weight, torch.nn.Parameter) and "weight" not in vars(layer)


def test_what_is_no_parameter_is_refused():
    layer = Grouped(2)
    with pytest.raises(AttributeError, match="Grouped has no parameter 'weight'"):
        substitute(layer, lambda weight: weight)
    with pytest.raises(AttributeError, match="no parameter 'weight2'"):
        substitute_all(layer, lambda *weights: weights, ["weight0", "weight2"])
    assert layer(torch.ones(1, 2)).shape == (2, 1, 2)
    substitute_all(layer, lambda *weights: weights[:1], ["weight0", "weight1"])
    with pytest.raises(ValueError, match="shorter"):
        layer(torch.ones(1, 2))
