"""Experts as Transformer Engine keeps them, where it is not installed."""

import torch


def grouped(model) -> None:
    """The experts of each layer as weight0, weight1 ... of one module."""
    for layer in model.decoder.layers:
        experts, together = layer.mlp.experts.local_experts, torch.nn.Module()
        for name in ("linear_fc1", "linear_fc2"):
            linear = torch.nn.Module()
            for number, expert in enumerate(experts):
                linear.register_parameter(f"weight{number}", getattr(expert, name).weight)
            together.add_module(name, linear)
        layer.mlp.experts = together


def side_by_side(model) -> None:
    """Those of a layer in one storage."""
    from miles_megatron.grouped_experts import lay_side_by_side

    for layer in model.decoder.layers:
        lay_side_by_side(layer.mlp.experts.linear_fc1)
        lay_side_by_side(layer.mlp.experts.linear_fc2)
