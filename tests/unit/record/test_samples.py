"""Sample files: what is in them, how they are bounded, and that odd samples fit too."""

import json

import numpy as np
import pytest

from miles_core.errors import RunDirectoryError
from miles_core.record.samples import read_samples, write_samples
from miles_core.types import Prompt, Sample, Status

KEYS = ["rollout_id", "groups", "prompt_uid", "row", "index", "prompt", "images", "response", "pieces", "token_ids",
        "log_probs", "loss_mask", "versions", "reward", "rewards", "label", "status", "advantage"]


@pytest.fixture
def groups(make_sample):
    rng = np.random.default_rng(1)
    return [make_sample(rng, uid, index, 0.5, 3) for uid in range(6) for index in range(2)]


def test_a_line_holds_the_sample(tmp_path, groups, decode):
    groups[5].prompt.metadata["image_files"] = ["ab" * 32, "cd" * 32]
    groups[5].metadata["image_files"] = ["ef" * 32]  # of its later turns
    path = write_samples(tmp_path_with_samples(tmp_path), "rollout", 3, groups, decode)
    assert path == tmp_path / "samples" / "rollout_000003.jsonl"
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert len(lines) == 12 and list(lines[0]) == KEYS
    record, sample = lines[5], groups[5]
    assert record["token_ids"] == sample.tokens[-sample.response_length:].tolist()
    assert record["images"] == ["ab" * 32, "cd" * 32, "ef" * 32] and lines[0]["images"] == []
    assert "".join(record["pieces"]) == record["response"] == sample.text
    assert np.allclose(record["log_probs"], sample.columns["rollout_log_probs"], atol=1e-6)
    assert (record["prompt_uid"], record["index"], record["status"]) == (2, 1, str(sample.status))
    assert record["advantage"] == pytest.approx(float(sample.columns["advantages"][0]), abs=1e-6)


def test_what_a_generator_shows_stands_in_place_of_the_rows_texts(tmp_path, groups, decode):
    groups[0].metadata["shown"] = {"prompt": "what the model saw", "response": "its own answer"}
    first, second, *_ = read_samples(write_samples(tmp_path_with_samples(tmp_path), "rollout", 0, groups, decode))
    assert (first["prompt"], first["response"]) == ("what the model saw", "its own answer")
    assert (second["prompt"], second["response"]) == (groups[1].prompt.text, groups[1].text)


def tmp_path_with_samples(path):
    (path / "samples").mkdir()
    return path


def test_whole_groups_are_kept_up_to_the_bound(tmp_path, groups, decode):
    tmp_path_with_samples(tmp_path)
    two = sum(sample.response_length for sample in groups[:4])
    for tokens, count in ((two, 4), (two - 1, 2), (1, 2), (2**18, 12)):
        kept = list(read_samples(write_samples(tmp_path, "rollout", 0, groups, decode, max_tokens=tokens)))
        assert [(s["prompt_uid"], s["index"]) for s in kept] == [(s.prompt.uid, s.index) for s in groups[:count]]
        assert kept[0]["groups"] == 6
    assert write_samples(tmp_path, "rollout", 1, groups, decode, max_tokens=0) is None
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_the_default_bound_is_64_groups(tmp_path, make_sample, decode):
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, uid, 0, 0.5, 1) for uid in range(70)]
    path = write_samples(tmp_path_with_samples(tmp_path), "rollout", 0, samples, decode)
    assert len(list(read_samples(path))) == 64


def test_a_sample_without_a_response_and_one_that_is_not_finite(tmp_path, decode):
    prompt = Prompt(0, 0, "p \ud800 </script>", (1,))
    failed = Sample(prompt, 0, status=Status.FAILED)
    odd = Sample(prompt, 1, {"tokens": np.array([1, 0, 2])[::2], "rollout_log_probs": np.array([-np.inf], np.float32),
                             "loss_mask": np.zeros(1, np.uint8), "advantages": np.ones(1, np.float32)}, 1,
                 reward=float("nan"), rewards={"a": float("inf")})
    path = write_samples(tmp_path_with_samples(tmp_path), "rollout", 0, [failed, odd], decode)
    first, second = read_samples(path)
    assert first["pieces"] == [] and first["log_probs"] is None and first["reward"] is None
    assert second["log_probs"] == [None] and second["reward"] is None and second["rewards"] == {"a": None}
    assert second["advantage"] is None, "no token of it is trained"
    assert first["prompt"] == prompt.text, "a lone surrogate survives"


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError, match="x.jsonl"):
        list(read_samples(tmp_path / "x.jsonl"))
