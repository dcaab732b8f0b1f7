"""Tensors of a checkpoint under the names of the rules and back: inside a larger model, packed, transposed."""

import pytest
import torch
from miles_megatron import disk_names
from miles_megatron.specs import Packed, WeightMap
from safetensors.torch import save_file

EXPERTS = "mlp.experts.{expert}."
MAP = WeightMap(
    rules=(), heads=1, groups=1, head_dim=1, renamed=(("model.", "model.text."),), carried=("model.eyes.",),
    packed=(Packed("mlp.experts.both", (EXPERTS + "gate.weight", EXPERTS + "up.weight"), 3, transposed=True,
                   alternating=True, within=("model.",)),
            Packed("mlp.experts.bias", (EXPERTS + "gate.bias", EXPERTS + "up.bias"), 3, alternating=True),
            Packed("mlp.experts.down", (EXPERTS + "down.weight",), 3, mxfp4=True)),
)  # fmt: skip
STEM = "model.layers.0.mlp.experts."


@pytest.fixture
def stored():
    """By the names of the files."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.text.norm": (4,), "lm_head.weight": (7, 4), "model.eyes.patch": (2, 2),
              "model.text.layers.0.mlp.experts.both": (3, 4, 10), "model.text.layers.0.mlp.experts.bias": (3, 10),
              "model.text.layers.0.mlp.experts.down": (3, 4, 5)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def read(stored, tmp_path):
    save_file(stored, tmp_path / "model.safetensors")
    return disk_names.PlainReaders(dict.fromkeys(stored, tmp_path / "model.safetensors"), MAP)


def test_each_expert_has_its_share(stored, read):
    """Of [experts, inputs, rows of gate and up in turn] a matrix [rows, inputs]; shapes are known unread."""
    both, bias = (stored[f"model.text.layers.0.mlp.experts.{name}"] for name in ("both", "bias"))
    with read:
        assert torch.equal(read.tensor(STEM + "2.up.weight"), both[2, :, 1::2].T)
        assert torch.equal(read.tensor(STEM + "1.gate.bias"), bias[1, ::2])
        assert all(read.shape(name) == list(read.tensor(name).shape) for name in read.places)
    assert {"model.norm", "lm_head.weight", "model.eyes.patch"} < read.places.keys()


def test_a_stream_goes_back_to_the_names_of_the_files(stored, read):
    """Bit by bit, in the order and with the shapes that are announced."""
    with read:
        plain = {name: read.tensor(name) for name in read.places if not name.startswith(MAP.carried)}
    back = dict(disk_names.to_disk(plain.items(), MAP))
    assert back.keys() == stored.keys() - {"model.eyes.patch"}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in back.items())
    announced = disk_names.disk_layout({name: (one.dtype, [*one.shape]) for name, one in plain.items()}, MAP)
    assert [*announced.items()] == [(name, (one.dtype, [*one.shape])) for name, one in back.items()]


def test_a_part_of_what_is_packed_is_changed_or_comes_apart(stored, read):
    """Under the names of the rules a change is asked for, under those of the files a part is sent."""
    names = {STEM + "1.up.weight", "model.norm"}
    sent = dict(disk_names.changed(stored.items(), MAP, lambda name, one: one * 2 if name in names else one))
    wanted = stored["model.text.layers.0.mlp.experts.both"].clone()
    wanted[1, :, 1::2] *= 2
    assert torch.equal(sent["model.text.layers.0.mlp.experts.both"], wanted)
    assert torch.equal(sent["model.text.norm"], 2 * stored["model.text.norm"])
    assert not torch.equal(wanted, stored["model.text.layers.0.mlp.experts.both"]), "the stream's own stays"
    alone = dict(disk_names.changed(stored.items(), MAP, lambda _, one: one * 2, packed_alone=True))
    assert torch.equal(alone["model.text.norm"], stored["model.text.norm"])
    parts = dict(disk_names.split(stored.items(), MAP, lambda name: name.endswith(".up.weight")))
    assert parts.keys() == stored.keys() - {"model.text.layers.0.mlp.experts.both"} | {
        f"model.text.layers.0.mlp.experts.{expert}.{part}.weight" for expert in range(3) for part in ("gate", "up")}
    with read:
        for expert in range(3):
            name = f"{expert}.up.weight"
            assert torch.equal(parts[f"model.text.layers.0.mlp.experts.{name}"], read.tensor(STEM + name))


def test_experts_of_other_names_stay_apart(stored):
    """`within` says which layers are packed: a drafting layer's experts need not be."""
    names = [f"mtp.layers.0.{EXPERTS.format(expert=0)}{part}.weight" for part in ("gate", "up")]
    assert disk_names.places(names, MAP).keys() == set(names)
    assert [name for name, _ in disk_names.to_disk([(name, torch.ones(1)) for name in names], MAP)] == names


def test_rounded_numbers_are_read_expert_by_expert(tmp_path):
    """MXFP4: a power of two for 32 numbers of four bits; the exponents' tensor is no tensor of the model."""
    name = "model.text.layers.0.mlp.experts.down"
    blocks = torch.full((3, 2, 1, 16), 0x52, dtype=torch.uint8)  # 1.0 in the lower half, 3.0 in the upper one
    stored = {name + "_blocks": blocks, name + "_scales": torch.tensor([127, 128, 126], dtype=torch.uint8).repeat(
        2, 1).T[..., None].contiguous()}
    save_file(stored, tmp_path / "model.safetensors")
    read = disk_names.PlainReaders(dict.fromkeys(stored, tmp_path / "model.safetensors"), MAP)
    with read:
        for expert, scale in enumerate((1, 2, 0.5)):
            got = read.tensor(f"{STEM}{expert}.down.weight")
            assert got.dtype == torch.bfloat16 and list(got.shape) == read.shape(f"{STEM}{expert}.down.weight")
            assert torch.equal(got, torch.tensor([1.0, 3.0]).bfloat16().repeat(2, 16) * scale)
    assert len(read.places) == 3


def test_what_is_carried_is_what_the_files_have(stored, tmp_path):
    save_file(stored, tmp_path / "model.safetensors")
    [(name, tensor)] = disk_names.carried(tmp_path, MAP)
    assert name == "model.eyes.patch" and torch.equal(tensor, stored[name])
    assert not disk_names.carried_files(tmp_path / "nowhere", MAP)
