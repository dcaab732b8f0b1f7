"""Runs in SGLang's Python: new weights into layers of its own int4 schemes, whose kernels here are torch's.

Prints what it found as JSON; test_repack.py says what has to be found.
"""

import json
import sys
import types
from pathlib import Path

import sglang_cpu  # noqa: F401 - stands in for the kernels before SGLang is imported
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as dense
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as moe

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension"))
import miles_weights
from miles_sums import sums

WIDTH, HEIGHT, GROUP, EXPERTS = 128, 256, 32, 2


def unpacked(packed):
    """[..., 8 n] values of int32."""
    return (packed[..., None] >> torch.arange(0, 32, 4)) & 15


def repack(packed, perm, size_k, size_n, num_bits):
    """Another order of the values, as Marlin's is another, in its shape."""
    values = unpacked(packed).reshape(-1).flip(0).view(size_k // 16, size_n * 2, 8)
    return (values << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


dense.WNA16_SUPPORTED_TYPES_MAP[4] = types.SimpleNamespace(size_bits=4)  # a type of the kernels' package
dense.gptq_marlin_repack = repack
moe.gptq_marlin_moe_repack = lambda packed, perm, *sizes: torch.stack([repack(one, perm, *sizes) for one in packed])
dense.marlin_make_workspace = moe.marlin_make_workspace = lambda device, *more: torch.zeros(4, dtype=torch.int32)


class Linear(torch.nn.Module):
    """Two weights in one parameter, as gate and up."""

    def __init__(self):
        super().__init__()
        self.scheme = dense.CompressedTensorsWNA16("group", 4, GROUP)
        self.scheme.create_weights(self, HEIGHT, WIDTH, [HEIGHT], WIDTH, torch.bfloat16, self.weight_loader)

    def weight_loader(self, parameter, loaded, shard):
        rows = parameter.data.shape[0] // 2
        parameter.data[shard * rows : (shard + 1) * rows] = loaded


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        scheme = self.scheme = moe.CompressedTensorsWNA16MoE.__new__(moe.CompressedTensorsWNA16MoE)
        scheme.num_bits, scheme.packed_factor, scheme.group_size, scheme.sym = 4, 8, GROUP, True
        scheme.strategy, scheme.actorder, self.moe_tp_size = "group", None, 1
        scheme.create_weights(self, EXPERTS, WIDTH, HEIGHT // 2, torch.bfloat16, weight_loader=self.weight_loader)

    def weight_loader(self, parameter, loaded, expert, shard):
        """Transposed, as SGLang keeps experts before it repacks them; shard None is the whole."""
        columns = parameter.data.shape[2] // (1 if shard is None else 2)
        parameter.data[expert, :, (shard or 0) * columns : ((shard or 0) + 1) * columns] = loaded.t()


class Model(torch.nn.Module):
    """Two layers. What is loaded goes to a parameter's own loader, as in SGLang's models."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"mlp": Linear(), "experts": Experts()})
                                          for _ in range(2))
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            *where, weight, kind = name.split(".")
            if "experts" in where:
                to = parameters[f"layers.{where[1]}.experts.{'w2' if weight == 'down' else 'w13'}_{kind}"]
                to.weight_loader(to, tensor, int(where[3]), {"gate": 0, "up": 1}.get(weight))
            else:
                to = parameters[".".join([*where, kind])]
                to.weight_loader(to, tensor, {"gate": 0, "up": 1}[weight])

    def start(self, weights):
        """As SGLang: load, then repack."""
        self.load_weights(weights)
        for layer in self.layers:
            for module in layer.values():
                module.scheme.process_weights_after_loading(module)
        return self


def checkpoint(seed, layers=(0, 1)):
    draw = torch.Generator().manual_seed(seed)
    for layer in layers:
        shapes = {f"layers.{layer}.mlp.{name}": (HEIGHT // 2, WIDTH) for name in ("gate", "up")}
        for expert in range(EXPERTS):
            shapes |= {f"layers.{layer}.experts.{expert}.{name}": (HEIGHT // 2, WIDTH) for name in ("gate", "up")}
            shapes[f"layers.{layer}.experts.{expert}.down"] = (WIDTH, HEIGHT // 2)
        for name, (rows, width) in shapes.items():
            yield f"{name}.weight_packed", torch.randint(-2**31, 2**31 - 1, (rows, width // 8), generator=draw,
                                                         dtype=torch.int64).to(torch.int32)
            yield f"{name}.weight_scale", torch.rand(rows, width // GROUP, generator=draw).to(torch.bfloat16)
    if layers == (0, 1):
        yield "norm", torch.rand(WIDTH, generator=draw)


def send(model, weights):
    """One bucket."""
    tensors, parts, at = [], [], 0
    for name, tensor in weights:
        tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        at += parts[-1].numel()
    miles_weights.load(model, [(json.dumps({"tensors": tensors}), torch.cat(parts))])
    errors, miles_weights._errors[:] = list(miles_weights._errors), []
    return errors


def kernel(model):
    return {name: one.detach().clone() for name, one in model.named_parameters() if name.endswith(("packed", "scale"))}


def main():
    found = {}
    model, fresh = Model().start(checkpoint(1)), Model().start(checkpoint(2))
    places = {name: one.data_ptr() for name, one in model.named_parameters() if one.numel()}
    workspaces = [module.scheme.workspace.data_ptr() for module in model.modules() if isinstance(module, Linear)]
    weights = list(checkpoint(2))
    half = next(i for i, (name, _) in enumerate(weights) if name.startswith("layers.1"))
    found["errors"] = send(model, weights[: half - 3]) + send(model, weights[half - 3 :])
    repacked = miles_weights._repacked[id(model)]
    repacked.end()
    held = miles_weights.held(model, (None, {}, {}))[0]
    names, values = repacked.reported(held.names, held.sums().arrived())
    found["differs"] = [name for name, one in kernel(fresh).items() if not one.equal(kernel(model)[name])]
    found["moved"] = [name for name, one in model.named_parameters() if one.numel() and one.data_ptr() != places[name]]
    found["same workspaces"] = workspaces == [module.scheme.workspace.data_ptr() for module in model.modules()
                                              if isinstance(module, Linear)]
    sent = sums([tensor for _, tensor in weights])
    found["sums"] = bool(sent.sum(0).equal(values.sum(0)))
    found["names"] = sorted({name.rpartition(".")[2] for name in names})

    found["apart"] = [error for layers in ((0,), (1,), (0,)) for error in send(model, checkpoint(3, layers))]
    repacked.end()
    repacked.reported([], torch.zeros(0, 2, dtype=torch.int64))
    dense.gptq_marlin_repack = lambda *given, **more: torch.zeros_like(repack(*given, **more))
    found["broken"] = send(model, checkpoint(4, (0,))) + send(model, checkpoint(4, (1,)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
