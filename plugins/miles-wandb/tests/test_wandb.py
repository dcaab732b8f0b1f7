"""Runs that the library writes offline, read back from its own files."""

import json
import struct
import time

import pytest
from miles_testing.sample_inputs import canned_samples
from miles_wandb.plugin import Wandb, WandbOptions, has_key

from miles_core.config import RunConfig
from miles_core.errors import ConfigError

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5, "remote-rm.api_key": "sesame-open-42"}}


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No key of the machine's."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def records(path):
    """The records of a .wandb file: a head of 7 bytes, then blocks of 32 KiB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, piece = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield Record.FromString(piece)
            piece = b""


def history(found):
    """[{key: value}] of what was logged."""
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            for one in found if one.WhichOneof("record_type") == "history"]


def run(tmp_path, resumed_from=None, steps=(0, 1), **options):
    plugin = Wandb(WandbOptions(project="sums", group="g", tags=["one"], system=False, sample_interval=1, **options))
    plugin.begin(PLAN, "a1b2c3d4", resumed_from, tmp_path)
    for step in steps:
        plugin.metrics(step, {"train/loss": 0.5, "rollout/raw_reward": step / 10, "tools/calls": 2.0})
        plugin.metrics(step, {"eval/held": 0.75})
    plugin.samples(steps[0], None, canned_samples())
    plugin.finish("completed")
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + 20
    while (found := list(records(path)))[-1:] == [] or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, "the library's process writes on after the run has ended"
        time.sleep(0.05)
    return found


def test_a_run_without_a_key_is_read_back_from_its_folder(tmp_path):
    found = run(tmp_path)
    [start] = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    assert (start.run_id, start.project, start.run_group, start.display_name) == ("a1b2c3d4", "sums", "g", "demo")
    assert list(start.tags) == ["one"]
    config = {item.key: item.value_json for item in start.config.update}
    assert config["rollout.num_rollout"] == "5" and config["plan_digest"] == '"d1"'
    logged = history(found)
    assert [(one["rollout/step"], one["train/step"], one["train/loss"]) for one in logged if "train/loss" in one] == [
        (0, 0, 0.5), (1, 1, 0.5)]
    assert [(one["eval/step"], one["eval/held"]) for one in logged if "eval/held" in one] == [(0, 0.75), (1, 0.75)]
    axes = {one.metric.glob_name: one.metric.step_metric for one in found if one.metric.glob_name}
    assert axes == {f"{family}/*": f"{family}/step" for family in ("train", "rollout", "tools", "eval")}
    assert [one["tools/step"] for one in logged if "tools/calls" in one] == [0, 1], "a plugin's own metrics as well"
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/rollout/*.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][:4] == ["step", "prompt", "answer", "reward"] and len(rows["data"]) == len(canned_samples())


def test_a_table_survives_that_the_library_s_own_folder_is_removed(tmp_path, monkeypatch):
    from wandb.sdk.data_types import _private

    (tmp_path / "media").mkdir()
    monkeypatch.setattr(_private.MEDIA_TMP, "name", str(tmp_path / "media"))
    (tmp_path / "media").rmdir()
    run(tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/rollout/*.json"))) == 1


def test_a_resumed_run_has_the_same_id_and_repeats_steps(tmp_path):
    starts = [run(tmp_path / name, resumed_from, steps) for name, resumed_from, steps in
              (("one", None, (0, 1, 2)), ("two", 1, (1, 2, 3)))]
    runs = [one.run.run_id for found in starts for one in found if one.WhichOneof("record_type") == "run"]
    assert runs == ["a1b2c3d4"] * 2
    assert [one["train/step"] for one in history(starts[1]) if "train/loss" in one] == [1, 2, 3]


def test_no_secret_is_in_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    run(tmp_path, mode="offline")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"sesame" not in path.read_bytes() and b"0123456789abcdef" not in path.read_bytes(), path


def test_a_key_is_found_where_the_library_finds_it(tmp_path, monkeypatch):
    assert not has_key(None)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_key(None) and not has_key("https://wandb.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_key("https://wandb.example.org")


def test_a_plan_says_where_a_run_without_a_key_goes():
    notes = []
    Wandb(WandbOptions()).check(RunConfig(), notes.append)
    assert len(notes) == 1 and "WANDB_API_KEY" in notes[0] and "wandb sync" in notes[0]
    for options in ({"mode": "offline"}, {"use_wandb": False}):
        Wandb(WandbOptions(**options)).check(RunConfig(), notes.append)
    assert len(notes) == 1
    with pytest.raises(ConfigError):
        Wandb(WandbOptions(host="https://me:secret@wandb.example.org")).check(RunConfig(), notes.append)


def test_switched_off(tmp_path):
    plugin = Wandb(WandbOptions(use_wandb=False))
    plugin.begin(PLAN, "a1b2", None, tmp_path)
    plugin.metrics(0, {"train/loss": 0.5})
    plugin.finish("completed")
    assert list(tmp_path.iterdir()) == []
