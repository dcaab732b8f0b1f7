"""Paths that a run has to have: what is refused where it is missing, and what may be planned before it is there."""

import json

import pytest

from miles_core.errors import CheckpointError, ConfigError


@pytest.fixture
def folder(tmp_path):
    """(name, *files, **constants) -> a folder with a config.json of these constants and empty files."""
    def make(name, *files, **constants):
        there = tmp_path / name
        there.mkdir(parents=True)
        if constants:
            (there / "config.json").write_text(json.dumps(constants))
        for file in files:
            (there / file).parent.mkdir(parents=True, exist_ok=True)
            (there / file).write_text("7\n" if file.startswith("latest") else "{}")
            if file.endswith(".safetensors"):  # of no tensor
                (there / file).write_bytes(b"\2" + bytes(7) + b"{}")
        return there

    return make


def refused(plan, message, *flags, **changes):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        plan(*flags, **changes)
    assert message in str(caught.value) and "Fix:" in str(caught.value), str(caught.value)


def test_a_checkpoint_of_this_machine_is_there(plan, tmp_path, folder):
    model = folder("elsewhere/tiny", model_type="qwen3")
    refused(plan, "--hf-checkpoint /data/none/Qwen: there is no such folder", "--hf-checkpoint", "/data/none/Qwen")
    refused(plan, "there is no such folder", "--hf-checkpoint", model.parent / "tyni")
    refused(plan, "[option-not-expanded]", "--hf-checkpoint", "~/elsewhere/tiny")
    refused(plan, "the folder has no config.json", "--hf-checkpoint", model / "config.json")
    refused(plan, f"is {model} meant?", "--hf-checkpoint", model.parent)
    assert not any("is not here" in note for note in plan("--hf-checkpoint", model).notes)


def test_a_relative_name_may_be_planned_before_it_is_there(plan):
    notes = plan("--eval-prompt-data", "held-out", "data/test.parquet", "--eval-interval", "1").notes
    for named in ("--hf-checkpoint elsewhere/tiny", "data/train.jsonl", "data/test.parquet"):
        assert len([note for note in notes if named in note and "a run has to have it" in note]) == 1, named


def test_a_run_that_begins_anew_over_a_checkpoint_says_so(plan, tmp_path):
    def told(*flags):
        return [note for note in plan("--save", tmp_path, *flags).notes if f"--load {tmp_path}" in note]

    assert not told()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert len(told()) == 1 and not told("--debug-rollout-only")
    iteration = tmp_path / "iter_0000002"
    iteration.mkdir()
    for name in ("metadata.json", ".metadata", "common.pt", "0.distcp", "miles.json"):
        (iteration / name).touch()
    assert not told("--load", tmp_path)


def test_a_run_that_takes_the_place_of_another_says_so(plan, tmp_path):
    """A debugging run of the same file too: it would replace the curves and samples of what was trained."""
    def remarks(*flags):
        return [note for note in plan("--run-dir", tmp_path / "run", *flags).notes if f"--run-dir {tmp_path}" in note]

    assert not remarks()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    assert len(remarks()) == len(remarks("--debug-rollout-only")) == 1
    assert not remarks("--save", tmp_path / "saved", "--load", tmp_path / "saved"), "it is the same run, started again"


@pytest.mark.parametrize(("files", "message"), [
    (("pytorch_model.bin",), "*.bin files only"), (("pytorch_model.bin", "model.safetensors"), None),
    (("model.safetensors.index.json", "a.safetensors"), "not there (got b.safetensors)"),
    (("model.safetensors.index.json", "a.safetensors", "b.safetensors"), None),
])
def test_weights_are_whole_and_of_the_right_kind(plan, folder, files, message):
    model = folder("model", *files, model_type="qwen3")
    if "model.safetensors.index.json" in files:
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if message:
        refused(plan, message, "--hf-checkpoint", model)
    else:
        plan("--hf-checkpoint", model)


def test_load_is_a_folder_of_checkpoints(plan, folder, tmp_path):
    parts = ("metadata.json", ".metadata", "common.pt", "miles.json", "__0_0.distcp")
    saved = folder("saved", "latest_checkpointed_iteration.txt", *(f"iter_0000007/{one}" for one in parts), "step_7/x")
    for inside in ("step_7", "iter_0000007", "iter_0000008"):
        refused(plan, f"Fix: give {saved}: the newest iteration is taken", "--load", saved / inside)
    refused(plan, "or with --ref-load", "--load", folder("hf", model_type="qwen3"))
    refused(plan, "no checkpoint of a run (got no latest", "--load", folder("notes", "notes.txt"))
    refused(plan, "no checkpoint of a run (got nothing", "--load", tmp_path / "gone")
    for good in (saved, folder("begun"), folder("killed", ".tmp-iter_0000001/x")):
        plan("--load", good, "--num-rollout", 7)
    plan("--load", tmp_path / "gone", "--save", tmp_path / "gone")


def test_load_may_be_the_models_folder(plan, folder):
    """Where a trainer starts anyhow, unless there is another reference."""
    hf, other = folder("hf", model_type="qwen3"), folder("other", model_type="qwen3")
    for more, load in (((), None), (("--ref-load", hf), None), (("--ref-load", other), str(hf))):
        assert plan("--hf-checkpoint", hf, "--load", hf, *more).config.checkpoint.load == load


def test_the_reference_has_weights(plan, folder, tmp_path):
    refused(plan, "there is no such folder", "--ref-load", tmp_path / "gone")
    refused(plan, "no checkpoint of a run (got neither config.json nor", "--ref-load", folder("empty"))
    for good in (folder("hf", model_type="qwen3"), folder("dist", "latest_checkpointed_iteration.txt"), "later/model"):
        plan("--ref-load", good)


def test_a_reference_in_mxfp4_is_read(plan, folder):
    """gpt-oss is published in it, and the trainer reads it."""
    plan("--ref-load", folder("model", "model.safetensors", model_type="qwen3",
                              quantization_config={"quant_method": "mxfp4"}))


def test_training_does_not_start_from_quantised_weights(plan, folder):
    model = folder("model", model_type="qwen3", quantization_config={"quant_method": "gptq"})
    refused(plan, "training cannot start from quantised weights (got gptq)", "--hf-checkpoint", model)
    plan("--hf-checkpoint", model, "--ref-load", "elsewhere/plain")
    plan("--hf-checkpoint", model, "--debug-rollout-only")


def test_a_file_in_the_place_of_a_folder(plan, tmp_path):
    (tmp_path / "file").write_text("")
    refused(plan, f"{tmp_path / 'file'} is a file", "--save", tmp_path / "file" / "checkpoints")
    refused(plan, f"{tmp_path / 'file'} is a file", "--run-dir", tmp_path / "file")
    plan("--save", tmp_path / "new" / "checkpoints")


def test_another_programs_checkpoint_and_the_folder_above_ones_own(plan, folder):
    verl = folder("verl", "latest_checkpointed_iteration.txt", "global_step_7/actor/x.pt")
    refused(plan, "names iteration 7, which is not there", "--load", verl)
    kept = folder("run", "checkpoints/latest_checkpointed_iteration.txt", "plan.json")
    (kept / "checkpoints/latest_checkpointed_iteration.txt").write_text("7")
    refused(plan, f"give {kept / 'checkpoints'}: the newest", "--load", kept)


def test_a_folder_that_cannot_be_written(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    refused(plan, "nothing can be written in", "--save", tmp_path / "a" / "b")


def test_load_of_the_hugging_face_folder_starts_from_it(plan, tmp_path):
    """Scripts of Miles that load through a bridge name it twice."""
    folder = plan().config.checkpoint.hf_checkpoint
    assert plan("--load", folder).config.checkpoint.load is None
