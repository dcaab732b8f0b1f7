"""Conversion: bit for bit what a load and a save would write, in the memory of a few tensors, on any processes."""

import asyncio
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_core.errors import CheckpointError, ConfigError, OwnerError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoint(megatron):
    from miles_megatron import checkpoint

    return checkpoint


@pytest.fixture
def convert(megatron, monkeypatch, capsys):
    """(*words) -> what `miles convert` prints."""
    from miles_core.cli import cli

    def run(*words):
        cli(["convert", *map(str, words)], standalone_mode=False)
        return capsys.readouterr().out

    return run


@pytest.fixture
def source(hf_model, tmp_path):
    """A small checkpoint in several files."""
    hf_model().save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def on_disk(folder):
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def chunks(iteration):
    """{(tensor, offset): (size, content)} of a torch_dist checkpoint, and what its index says of each tensor."""
    from torch.distributed.checkpoint.utils import _create_file_view

    index = pickle.loads((iteration / ".metadata").read_bytes())
    found = {}
    for where, at in index.storage_data.items():
        with open(iteration / at.relative_path, "rb") as file:
            view = _create_file_view(file, at.offset, at.length)
            found[where.fqn, where.offset] = torch.load(view, weights_only=True)
    return found, {name: (entry.size, entry.properties, sorted(map(str, entry.chunks)))
                   for name, entry in index.state_dict_metadata.items()}


def test_both_directions_against_a_load_and_a_save(hf_model, port, checkpoint, convert, tmp_path, kind):
    hf = hf_model(**kind)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist")
    ours, _ = port(hf)
    checkpoint.save(tmp_path / "saved", 0, {"actor": ([ours], None, None)})
    converted, described = chunks(tmp_path / "dist" / "iter_0000000")
    saved, described_too = chunks(tmp_path / "saved" / "iter_0000000")
    assert_same(converted, saved)
    assert described == described_too

    expected = [parameter.clone() for parameter in ours.parameters()]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert checkpoint.load(tmp_path / "dist", {"actor": ([ours], None, None)}) == (0, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, ours.parameters(), strict=True))

    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "hf")
    assert_same(on_disk(tmp_path / "back"), on_disk(tmp_path / "hf"))


ADDS = '''
"""Adds a layer to every model."""
import dataclasses

import torch

from miles_core import hookimpl
from miles_megatron.specs import Rule


class Adds:
    """A projection beside the model, drawn with a field of the config that it sets."""

    @hookimpl
    def weight_map(self, weight_map, model):
        assert model == "actor"
        return dataclasses.replace(weight_map, rules=(*weight_map.rules, Rule("probe.weight", ("probe.weight",))))

    @hookimpl
    def transformer_config(self, fields):
        return {**fields, "init_method_std": 0.5}

    @hookimpl
    def build_model(self, chunk, spec, folder):
        assert chunk.config.init_method_std == 0.5 and (folder / "config.json").is_file()
        chunk.probe = torch.nn.Linear(spec.constants["hidden_size"], 3, bias=False)
        return chunk
'''


@pytest.mark.full
def test_what_a_plugin_adds_is_kept_and_nothing_is_lost_without_it(convert, source, tmp_path):
    """The hooks weight_map, transformer_config and build_model, in processes of their own too."""
    from safetensors.torch import save_file

    save_file({"probe.weight": torch.randn(3, 64)}, source / "probe.safetensors")
    index = source / "model.safetensors.index.json"
    more = '"weight_map": {"probe.weight": "probe.safetensors",'
    index.write_text(index.read_text().replace('"weight_map": {', more))
    (tmp_path / "adds.py").write_text(ADDS)
    plugin = ("--plugin", tmp_path / "adds.py")
    with pytest.raises(CheckpointError, match=r"1 unexpected: probe\.weight.*enable the plugin"):
        convert("hf-to-dist", source, tmp_path / "dist")
    convert("hf-to-dist", source, tmp_path / "dist", "--processes", 2, *plugin)
    with pytest.raises(CheckpointError, match=r"weights that the model does not have \(got probe\.weight\)"):
        convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", source)
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", source, *plugin)
    assert_same(on_disk(tmp_path / "back"), on_disk(source))


def test_transformers_loads_the_export(convert, source, tmp_path):
    from transformers import AutoModelForCausalLM

    convert("hf-to-dist", source, tmp_path / "dist")
    text = convert("dist-to-hf", tmp_path / "dist" / "iter_0000000", tmp_path / "back", "--hf-checkpoint", source,
                   "--shard-size", "0.1MB", "--dtype", "bfloat16")
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert f"in {len(files)} files" in text and len(files) > 2 and (tmp_path / "back" / "tokenizer.json").exists()
    assert all(file.stat().st_size < 105_000 for file in files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.dtype == torch.bfloat16
    assert_same({n: t.bfloat16() for n, t in on_disk(source).items()}, dict(again.state_dict()))


def test_a_dtype_of_choice(hf_model, port, checkpoint, convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist", "--dtype", "bfloat16")
    low, _ = port(hf_model(), bf16=True)
    checkpoint.save(tmp_path / "saved", 0, {"actor": ([low], None, None)})
    assert_same(*(chunks(tmp_path / name / "iter_0000000")[0] for name in ("dist", "saved")))
    full, _ = port(hf_model())
    checkpoint.load(tmp_path / "dist", {"actor": ([full], None, None)})
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(full.parameters(), low.parameters(), strict=True))
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", source)
    assert_same(on_disk(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in on_disk(source).items()})


def test_optimizer_state_stays_behind(train, checkpoint, convert, tmp_path, port, hf_model):
    session = train()
    session(1)
    checkpoint.save(tmp_path / "run", 3, {"actor": (session.chunks, session.optimizer, session.scheduler)})
    hf = hf_model()
    hf.save_pretrained(tmp_path / "hf")
    convert("dist-to-hf", tmp_path / "run", tmp_path / "out", "--hf-checkpoint", tmp_path / "hf")
    from miles_megatron import weights

    _, weight_map = port(hf)
    assert_same(on_disk(tmp_path / "out"), dict(weights.hf_stream(session.model, weight_map)))


@pytest.fixture
def cut(convert, source, tmp_path):
    """A torch_dist checkpoint of `source` whose tensors lie in halves along an axis, as two tensor ranks save them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    convert("hf-to-dist", source, tmp_path / "dist")
    iteration = tmp_path / "dist" / "iter_0000000"
    held, _ = chunks(iteration)
    index = pickle.loads((iteration / ".metadata").read_bytes())
    info = type(next(iter(index.storage_data.values())))
    index.storage_data = {}
    for entry in index.state_dict_metadata.values():
        entry.chunks = []
    with open(iteration / "__0_0.distcp", "wb") as file:
        for number, ((name, offset), tensor) in enumerate(held.items()):
            axis = tensor.dim() - 1 - number % 2 * (tensor.dim() > 2)
            start = list(offset)
            for half in tensor.split((tensor.shape[axis] + 1) // 2, axis):
                at, begin = torch.Size(start), file.tell()
                torch.save(half.clone(), file)
                index.storage_data[MetadataIndex(name, at)] = info("__0_0.distcp", begin, file.tell() - begin)
                index.state_dict_metadata[name].chunks.append(ChunkStorageMetadata(at, half.shape))
                start[axis] += half.shape[axis]
    (iteration / ".metadata").write_bytes(pickle.dumps(index))
    return tmp_path / "dist"


def test_a_checkpoint_in_other_pieces(convert, cut, source, tmp_path):
    convert("dist-to-hf", cut, tmp_path / "back", "--hf-checkpoint", source)
    assert_same(on_disk(tmp_path / "back"), on_disk(source))


def test_a_checkpoint_that_lacks_a_piece(convert, cut, source, tmp_path):
    file = cut / "iter_0000000" / ".metadata"
    index = pickle.loads(file.read_bytes())
    index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks a part of a tensor \(got decoder.layers.mlp.linear_fc2"):
        convert("dist-to-hf", cut, tmp_path / "back", "--hf-checkpoint", source)
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".tmp*"))


@pytest.mark.full
def test_several_processes_write_the_same(convert, source, tmp_path):
    """Started by the command itself and by torchrun; the second direction's files are the same to the byte."""
    convert("hf-to-dist", source, tmp_path / "one")
    convert("dist-to-hf", tmp_path / "one", tmp_path / "back", "--hf-checkpoint", source, "--shard-size", "100KB")
    convert("hf-to-dist", source, tmp_path / "two", "--processes", 2)
    torchrun = Path(sys.executable).with_name("torchrun")
    started = [torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", torchrun.with_name("miles")]
    subprocess.run([*started, "convert", "dist-to-hf", tmp_path / "two", tmp_path / "again", "--hf-checkpoint", source,
                    "--shard-size", "100KB"], check=True, timeout=120)
    (one, described), (two, described_too) = (chunks(tmp_path / name / "iter_0000000") for name in ("one", "two"))
    assert_same(one, two)
    assert described == described_too
    assert len(list((tmp_path / "two" / "iter_0000000").glob("*.distcp"))) == 2
    files = {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}


@pytest.mark.full
def test_memory_is_bounded():
    """The bound is asserted by the script, as is the round trip: 1.5 of the largest file, in either direction."""
    ended = subprocess.run([sys.executable, ROOT / "bench" / "convert_memory.py", "--size", "64", "--shard", "16",
                            "--processes", "1"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(re.findall(r"^\| 1 \| (?:hf-to-dist|dist-to-hf) \|", ended.stdout, re.M)) == 2


def test_what_is_there_is_left_alone(convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist")
    for words in (("hf-to-dist", source, tmp_path / "dist"), ("hf-to-dist", source, source),
                  ("dist-to-hf", tmp_path / "dist", source, "--hf-checkpoint", source)):  # fmt: skip
        with pytest.raises(CheckpointError, match="already exists"):
            convert(*words)


def test_the_wrong_direction(convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist")
    for folder in (tmp_path / "dist", tmp_path / "dist" / "iter_0000000"):
        with pytest.raises(CheckpointError, match="got no config.json.*miles convert dist-to-hf"):
            convert("hf-to-dist", folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already a Hugging Face directory.*miles convert hf-to-dist"):
        convert("dist-to-hf", source, tmp_path / "out", "--hf-checkpoint", source)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CheckpointError, match="this is not a checkpoint"):
        convert("dist-to-hf", tmp_path / "nothing", tmp_path / "out", "--hf-checkpoint", source)


def test_another_architecture(hf_model, convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist")
    for name, changes, said in (("wide", {"intermediate_size": 128}, "another architecture"),
                                ("tied", {"tied": True}, "holds weights that the model does not have")):  # fmt: skip
        hf_model(**changes).save_pretrained(tmp_path / name)
        with pytest.raises(CheckpointError, match=said):
            convert("dist-to-hf", tmp_path / "dist", tmp_path / "out", "--hf-checkpoint", tmp_path / name)
    config = source / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 98'))
    with pytest.raises(CheckpointError, match="9 misshapen"):
        convert("hf-to-dist", source, tmp_path / "out")
    config.write_text(config.read_text().replace('"qwen3"', '"gpt2"'))
    with pytest.raises(OwnerError, match="no plugins build the architecture 'gpt2'"):
        convert("hf-to-dist", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_sources(convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist")
    file = tmp_path / "dist" / "iter_0000000" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="a file of the checkpoint cannot be read"):
        convert("dist-to-hf", tmp_path / "dist", tmp_path / "out", "--hf-checkpoint", source)
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="lies outside of the file"):
        convert("hf-to-dist", source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))


def test_a_bit_that_flipped_on_the_disk_is_not_converted(convert, source, tmp_path):
    """torch reads such a file without a word."""
    convert("hf-to-dist", source, tmp_path / "dist")
    file = tmp_path / "dist" / "iter_0000000" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        convert("dist-to-hf", tmp_path / "dist", tmp_path / "out", "--hf-checkpoint", source)
    assert caught.value.code == "checkpoint-file-unreadable" and str(file) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("direction", ["hf-to-dist", "dist-to-hf"])
def test_a_full_disk(convert, source, tmp_path, direction):
    """The file size limit of the process stands for the disk; it raises EFBIG at a write."""
    import resource

    convert("hf-to-dist", source, tmp_path / "dist")
    words = [source, tmp_path / "out"] if direction == "hf-to-dist" else [
        tmp_path / "dist", tmp_path / "out", "--hf-checkpoint", source]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="disk is full"):
            convert(direction, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))
    convert(direction, *words)


def interrupted(number, *words):
    """The exit code of a conversion whose process gets a signal after the ninth tensor."""
    script = ("import os, sys; from miles_megatron import shards; read, left = shards.read_into, [9]\n"
              "def once(*args):\n    left[0] -= 1\n    read(*args)\n"
              f"    if left[0] == 0: os.kill(os.getpid(), {int(number)})\n"
              "shards.read_into = once\nfrom miles_core.cli import main; main()")
    return subprocess.run([sys.executable, "-c", script, "convert", *words], timeout=120).returncode


@pytest.mark.full
def test_a_kill_publishes_nothing(source, convert, tmp_path):
    """Killed in the middle, it leaves what the next conversion clears, and what is no checkpoint to anybody."""
    assert interrupted(signal.SIGKILL, "hf-to-dist", source, tmp_path / "out") == -9
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".tmp-iter_0000000"]
    with pytest.raises(CheckpointError, match="this is not a checkpoint"):
        convert("dist-to-hf", tmp_path / "out", tmp_path / "back", "--hf-checkpoint", source)
    convert("hf-to-dist", source, tmp_path / "out")
    assert not (tmp_path / "out" / ".tmp-iter_0000000").exists()


@pytest.mark.full
def test_an_interrupt_leaves_nothing(source, tmp_path):
    assert interrupted(signal.SIGINT, "hf-to-dist", source, tmp_path / "out") == 130
    assert not (tmp_path / "out").exists()


def test_conversions_beside_one_another_do_not_clear_each_other(convert, source, tmp_path):
    convert("hf-to-dist", source, tmp_path / "dist")
    (tmp_path / ".tmp-other").mkdir()
    (tmp_path / ".tmp-back").mkdir()
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", source)
    assert [path.name for path in tmp_path.glob(".tmp*")] == [".tmp-other"]


def test_torchrun_and_processes_exclude_each_other(convert, source, tmp_path, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        convert("hf-to-dist", source, tmp_path / "out", "--processes", 2)


def test_progress_counts_to_the_end(source, tmp_path):
    from miles_megatron import convert
    from miles_megatron.convert_to_dist import ToDist

    (tmp_path / "target").mkdir()
    job = convert.Job(source, tmp_path / "target", *convert.architecture(source, ()))
    seen = []
    files, size = asyncio.run(convert.drive(convert.Here(ToDist(job)), lambda done, total: seen.append((done, total))))
    assert files == 1 and seen[-1] == (size, size) and size == sum(t.nbytes for t in on_disk(source).values())
