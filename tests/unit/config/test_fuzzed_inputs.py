"""Input files with bytes flipped and values swapped: each is accepted, or one error of ours; never a bare traceback."""

import contextlib
import copy
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from miles_fp8.directory import convert as to_fp8
from miles_fp8.recipe import Held
from miles_int4_qat.conversion import convert as to_int4
from miles_int4_qat.names import stated
from miles_local.weights import eos_ids
from miles_lora import peft
from miles_megatron.convert import architecture
from miles_megatron.shards import stored_tensors, tensor_files
from miles_megatron.weights import refuse_quantised
from miles_mtp.names import _of_config
from miles_opd.vocabulary import check_vocabulary
from miles_report.commands.diff import diff
from miles_report.commands.doctor import doctor
from miles_report.report import write_report

from miles_core.build import load_tokenizer, with_context
from miles_core.config.check import check
from miles_core.errors import ConfigError, DataError, ManifestError, MilesError
from miles_core.plugins import lock
from miles_core.plugins.manifest import of_source
from miles_core.plugins.plan import prepare
from miles_core.reading import reading
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog
from miles_core.record.replay import load_batch, load_flow, save_batch, save_flow
from miles_core.record.samples import write_samples
from miles_core.stages.buffer import Slot
from miles_core.stages.prompts import JsonlRecords
from miles_core.types import Batch, Group, Prompt, Sample, Status

ROOT = Path(__file__).parents[3]
ODD = [None, True, -1, 0, 10**400, 1.5, float("nan"), "", "\ud800", "x" * 2000, [], {}, [[]], [None], {"": None}, "{{",
       "__DEEP__", "__DIGITS__"]
DEEP, DIGITS = "[" * 900 + "]" * 900, "9" * 5000
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
           "train.jsonl")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run whose input files lie in this folder, and its configuration."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", folder / "model")
    rows = (ROOT / "examples/arithmetic/train.jsonl").read_text().splitlines()[:8]
    (folder / "model/train.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "model", planned(folder / "model").config


def planned(folder):
    return prepare(None, [
        "--plugin", "grpo", "--plugin", "math", "--hf-checkpoint", str(folder), "--prompt-data",
        str(folder / "train.jsonl"), "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
        "--rm-type", "math", "--run-dir", str(folder.parent / "run"), "--num-rollout", "1", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4", "--global-batch-size", "16", "--rollout-max-response-len", "8", "--lr", "1e-4"])


def read_all(config):
    """Every reader of the driver, as a start calls them."""
    checked, _ = check(config)
    load_tokenizer(with_context(checked))
    folder = Path(config.checkpoint.hf_checkpoint)
    eos_ids(SimpleNamespace(eos_token_id=1), folder)
    tensor_files(folder)
    for file in folder.glob("*.safetensors"):
        stored_tensors(file)
    JsonlRecords(config.rollout.prompt_data)


def with_odd_value(data, draw):
    """JSON with one value, at any depth, exchanged for another kind."""
    value, spots = copy.deepcopy(data), []
    stack = [value]
    while stack:
        one = stack.pop()
        inside = list(one.items()) if isinstance(one, dict) else list(enumerate(one))[:20]
        spots += [(one, key) for key, _ in inside]
        stack += [inner for _, inner in inside if isinstance(inner, dict | list)]
    holder, key = draw.choice(spots)
    holder[key] = draw.choice(ODD)
    text = json.dumps(value)
    return text.replace('"__DEEP__"', DEEP).replace('"__DIGITS__"', DIGITS)


def mutated(name, data, draw):
    """The bytes of an input file with one change."""
    if name == "model.safetensors":
        size = int.from_bytes(data[:8], "little")
        if draw.random() < 0.5:
            header = with_odd_value(json.loads(data[8:8 + size]), draw).encode()
            return len(header).to_bytes(8, "little") + header + data[8 + size:]
        changed = bytearray(data)
        changed[draw.randrange(8 + size)] = draw.randrange(256)
        return bytes(changed)
    if name != "tokenizer.json" and draw.random() < 0.5:
        if name.endswith("jsonl"):
            lines = data.decode().splitlines()
            at = draw.randrange(len(lines))
            lines[at] = with_odd_value(json.loads(lines[at]), draw)
            return "\n".join(lines).encode()
        return with_odd_value(json.loads(data), draw).encode()
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[:draw.choice([len(changed), draw.randrange(len(changed))])])


@pytest.mark.parametrize("name", FILES)
def test_a_mutated_input_is_accepted_or_an_error_of_ours(place, name, rounds=12):
    folder, config = place
    whole = (folder / name).read_bytes()
    read_all(config)
    refused = 0
    try:
        for seed in range(rounds):
            (folder / name).write_bytes(mutated(name, whole, random.Random(f"{name} {seed}")))
            try:
                read_all(config)
            except MilesError as error:
                refused += 1
                assert str(error).encode()
    finally:
        (folder / name).write_bytes(whole)
    assert refused, "the changes are of no kind that matters"


INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
    "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}}}
READERS = {
    "config.json": [lambda folder: architecture(folder, ()), refuse_quantised, stated, _of_config,
                    lambda folder: to_fp8(folder, folder / "out", Held("blockwise")),
                    lambda folder: to_int4(folder, folder / "out", 32, "auto"),
                    lambda folder: check_vocabulary(str(folder), str(folder))],
    "tokenizer.json": [lambda folder: check_vocabulary(str(folder), str(folder))],
    "adapter_config.json": [peft.read],
}


def refused(read, path, texts):
    """How many of these contents of a file are an error of ours that can be printed; the others are accepted."""
    whole, count = path.read_bytes(), 0
    try:
        for text in texts:
            path.write_bytes(text)
            try:
                with contextlib.suppress(SystemExit):
                    read()
            except MilesError as error:
                count += 1
                assert str(error).encode()
    finally:
        path.write_bytes(whole)
    return count


@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_an_error_of_ours_to_the_readers_of_plugins_and_of_convert(tmp_path, name, rounds=12):
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft.config(peft.Shape(4, 8.0), ["a.q_proj.lora_A"], "")))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": INT4}))
    (tmp_path / "model.safetensors").unlink()  # where the change leaves nothing to refuse, this does
    whole = (tmp_path / name).read_bytes()
    texts = [b"[" * 100_000, b'{"a": ' + DIGITS.encode() + b"}", b"\xff", b"[]", b"null", *(
        with_odd_value(json.loads(whole), random.Random(f"{name} {seed}")).encode() for seed in range(rounds))]
    for read in READERS[name]:
        assert refused(lambda read=read: read(tmp_path), tmp_path / name, texts) >= 4


@pytest.fixture(scope="module")
def recorded(place, tmp_path_factory):
    """Two rollouts of a run, as its files tell of them; and a second start."""
    run = RunDirectory(tmp_path_factory.mktemp("recorded"))
    sample = Sample(Prompt(0, 0, "1+1=", (1, 2), label="2"), 0, {"tokens": np.array([1, 2, 3], np.int32)}, 1, "2",
                    Status.COMPLETED)
    with run:
        plan = planned(place[0])
        run.plan_json.write_text(json.dumps(plan.to_json(), default=str))
        run.lock.write_text(lock.text(lock.of(plan)))
        log = EventLog(run.events)
        for first in (0, 1):
            log.run_start("0", {"torch": "2"}, resumed_from=first or None, rollouts=2)
            log.append("metrics", first,
                       metrics={"train/grad_norm": 1.0, "perf/step_time": 0.5, "rollout/raw_reward": 0.5})
            log.append("hashes", first, weights="a", batch="b", grad_norm=1.0)
            log.append("engine_lost", first, engine="engine 0", why="x", restarts=1)
            log.append("heartbeat", first, sampling=1, finished=0, dropped=0, capacity=2, version=1, oldest_s=1.0,
                       idle_s=0.0)
            log.append("drop", first, reason="zero reward variance", count=1)
            log.append("eval", first, metrics={"eval/a": 1.0})
            write_samples(run, "rollout", first, [sample], str)
        log.run_end("failed", "EngineError: it died")
        log.close()
    save_batch(str(run.path / "saved.{rollout_id}"), Batch(0, [Group(sample.prompt, [sample])], 1))
    state = save_flow([(0, Slot(0, sample.prompt))], [Group(sample.prompt, [sample])])
    (run.path / "flow.json").write_text(json.dumps(state["flow"]))
    return run, state["files"]


def loaded(path):
    with reading(str(path)):  # as the rest of a checkpoint's miles.json is
        return json.loads(path.read_bytes())


RECORDS = ("events.jsonl", "plan.json", "plugins.lock", "samples", "saved.0", "flow.json", ".lock")


@pytest.mark.parametrize("name", RECORDS)
def test_a_mutated_record_of_a_run_is_an_error_of_ours(recorded, tmp_path, name, rounds=40):
    run, files = recorded
    path = next((run.path / "samples").glob("*1*")) if name == "samples" else run.path / name

    readers = {
        "flow.json": [lambda: load_flow({"flow": loaded(path), "files": files})],
        "saved.0": [lambda: load_batch(str(run.path / "saved.{rollout_id}"), 0)],
        "plugins.lock": [lambda: lock.read(run.path)],
        ".lock": [RunDirectory(run.path).holder],
    }.get(name, [lambda: write_report(run.path, tmp_path / "page"),
                 lambda: doctor.callback(run.path, True, None, False),
                 lambda: diff.callback(run.path, run.path, True, None, "", None, False)])
    whole, draw = path.read_bytes(), random.Random(name)
    texts = [b"[" * 100_000 + b"\n", b"\xff\n", b"[]\n"]
    for _ in range(rounds):
        if name == "saved.0":
            changed = bytearray(whole)
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            texts.append(bytes(changed))
        else:
            lines = [whole] if name == "plugins.lock" else whole.splitlines()
            at = draw.randrange(len(lines))
            lines[at] = with_odd_value(json.loads(lines[at]), draw).encode()
            texts.append(b"\n".join(lines) + b"\n")
    with RunDirectory(run.path) if name == ".lock" else contextlib.nullcontext():
        assert sum(refused(read, path, texts) for read in readers) > 1 or name == ".lock"


@pytest.mark.parametrize(("line", "words"), [
    ('{"label": "2", "prompt": ' + DIGITS + "}", "digits"), ('{"label": "2", "prompt": "\\ud800"}', "surrogate"),
    ('{"label": "2", "prompt": ' + DEEP + "}", "nested deeper than 64"),
], ids=["digits", "surrogate", "deep"])  # fmt: skip
def test_a_row_that_nothing_can_hold_is_named_with_its_line(place, line, words):
    folder, config = place
    rows = folder / "train.jsonl"
    whole = rows.read_text()
    rows.write_text(whole + line + "\n")
    try:
        for read in (check, lambda config: JsonlRecords(config.rollout.prompt_data)):
            with pytest.raises(DataError, match=f"train.jsonl, line 9.*{words}"):
                read(config)
    finally:
        rows.write_text(whole)


@pytest.mark.parametrize("source", [
    b"x = " + b"-" * 200_000 + b"1", b"x = " + b"(" * 5000 + b")" * 5000, b"x = " + b"[" * 150 + b"]" * 150,
    b"x" + b".a" * 50_000, b"x = 1" + b" + 1" * 50_000, b"\xff\xfe", b"x = 1\0", b"x = '\\ud800'", b"",
    b"from miles_core import hookimpl\nclass A:\n    name = " + b"-" * 900 + b"1\n    @hookimpl\n"
    b"    def finish(self):\n        pass\n",
], ids=range(10))  # fmt: skip
def test_the_source_of_a_plugin_that_python_gives_up_on(tmp_path, source):
    path = tmp_path / "plugin.py"
    path.write_bytes(source)
    with pytest.raises(ManifestError, match="plugin.py"):
        of_source(path)


@pytest.mark.parametrize("text", [
    b"a = " + b"[" * 5000, b"a = " + b"9" * 5000, b"a = " + b"{x=" * 2000, b"\xff", b"=" * 9,
], ids=range(5))  # fmt: skip
def test_a_run_file_that_toml_gives_up_on(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="run.toml"):
        prepare(path)
