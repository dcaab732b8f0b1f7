"""Partial rollouts in whole runs: a real engine, a real trainer, weights that change between the spans of an answer.

transformers computes the log-prob of every token with the very weights of its version, which the run exports after each
rollout. Version n serves rollout n - 1.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_testing.kill_resume import KillResume

from miles_core.record.events import read
from miles_core.record.replay import FLOW, load_batch, load_flow
from miles_core.types import Drop, Group, Sample

pytestmark = pytest.mark.integration

MOST, ROLLOUTS = 90, 6
WATCH = '''
"""Writes down what the engine draws, and lets columns of all alignments ride along: 1000 x call + place in each row.

A step of the engine takes 5 ms at least, so that a group can be called back before it has finished on any machine.
"""
import json
import time
from collections import Counter

import numpy as np

from miles_core import hookimpl
from miles_core.columns import Align, Column
from miles_core.types import Drop


class Watch:
    def __init__(self):
        from miles_local.batch import Batch

        self.calls = Counter()
        if not hasattr(Batch, "quick_step"):
            Batch.quick_step = Batch.step
            Batch.step = lambda batch, *args: (time.sleep(0.005), batch.quick_step(*args))[1]

    @hookimpl
    def columns(self):
        for align in (Align.TOKEN, Align.PREDICTION, Align.RESPONSE):
            yield Column(f"{align}_rows", align, "int32", axes=("layer", "topk"), missing="pad", owner="watch")

    @hookimpl
    def generate_request(self, request, prompt):
        return request

    @hookimpl
    def generate_response(self, sample, response):
        key = (sample.prompt.uid, sample.index)
        if sample.length - sample.response_length == len(sample.prompt.token_ids):
            self.calls[key] = 0  # from the start, perhaps anew
        for align, rows in (("token", sample.length), ("prediction", sample.length - 1),
                            ("response", sample.response_length)):
            place = np.arange(rows, dtype=np.int32)[:, None, None]
            sample.columns[f"{align}_rows"] = 1000 * self.calls[key] + place + np.zeros((1, 2, 3), np.int32)
        self.calls[key] += 1
        with open("drawn.jsonl", "a") as file:
            file.write(json.dumps([*key, len(response.output_ids)]) + chr(10))
        return sample

    @hookimpl
    def filter_group(self, group):
        return Drop("unlucky") if group.prompt.uid % 7 == 3 else group
'''


LAST = '''
import json


def last(args, rollout_id, buffer, num_samples):
    """Miles's signature: what was called back last goes on first."""
    assert args.over_sampling_batch_size == 8
    with open("asked.jsonl", "a") as file:
        file.write(json.dumps([rollout_id, [len(group) for group in buffer], num_samples]) + chr(10))
    return [buffer.pop() for _ in range(num_samples)]
'''


@dataclass
class Found:
    """What a finished run left.

    Args:
        trained: samples by rollout.
        waiting: samples in the last checkpoint, of groups that are finished or go on later.
        drawn: response tokens that the engine drew, by prompt.
    """

    folder: Path
    trained: list[list[Sample]]
    waiting: list[Sample]
    drawn: Counter

    @property
    def samples(self) -> list[Sample]:
        return [*(sample for batch in self.trained for sample in batch), *self.waiting]

    def weights(self, version: int, tiny: Path) -> Path:
        return tiny / "qwen3" if version == 1 else self.folder / f"run/hf/{version - 1}"

    def metric(self, name: str) -> list[float]:
        return [event["metrics"][name] for event in read(self.folder / "run/events.jsonl")
                if event["event"] == "metrics"]


def flow(folder: Path, done: int) -> list[Sample]:
    """Samples of the checkpoint after so many rollouts."""
    place = folder / f"run/checkpoints/iter_{done:07d}"
    state = json.loads((place / "miles.json").read_text())["state"]
    slots, begun = load_flow({**state, "files": {FLOW: (place / FLOW).read_bytes()}} if "flow" in state else {})
    slots = [slot for slot in slots if slot.group is not None or not isinstance(slot.outcome, Drop)]
    groups = [slot.group or Group(slot.prompt, list(slot.begun)) for slot in slots]
    return [sample for group in (*groups, *begun) for sample in group.samples]


def found(folder: Path) -> Found:
    drawn = Counter()
    for line in (folder / "drawn.jsonl").read_text().splitlines():
        uid, _, count = json.loads(line)
        drawn[uid] += count
    trained = [load_batch(str(folder / "saved/{rollout_id}"), done).samples for done in range(ROLLOUTS)]
    return Found(folder, trained, flow(folder, ROLLOUTS), drawn)


@pytest.fixture
def course(run_file, tmp_path):
    """(*flags) -> runs whose answers are of uneven length: about one token in fifty ends an answer."""
    (tmp_path / "watch.py").write_text(WATCH)

    def make(*flags: str) -> KillResume:
        stops = [str(token) for token in range(0, 264, 48)]
        return KillResume(tmp_path, [
            run_file(), "--plugin", tmp_path / "watch.py", "--partial-rollout", "--over-sampling-batch-size", "8",
            "--batch-order", "window", "--rollout-max-response-len", str(MOST), "--rollout-stop-token-ids", *stops,
            "--save-interval", "1", "--save-hf", "run/hf/{rollout_id}", "--threads", "1", "--use-rollout-logprobs",
            "--save-debug-rollout-data", "saved/{rollout_id}", *flags], rollouts=ROLLOUTS)  # fmt: skip

    return make


def resumed(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.metadata.get("cuts") and sample.status != "aborted"]


def recomputed(model_folder: Path, samples: list[Sample]) -> list[np.ndarray]:
    """[R] log-probs of each sample's response with these weights, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    result = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.tokens).long()
            scores = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
            rows = torch.arange(sample.length - sample.response_length, sample.length)
            result.append(scores[rows - 1, ids[rows]].numpy())
    return result


def check_tokens(run: Found, tiny: Path) -> None:
    """Each log-prob is that of its version's weights, and of no other's."""
    drawn = [sample for sample in run.samples if sample.response_length]
    versions = sorted({int(version) for sample in drawn for version in sample.columns["versions"]})
    assert versions[0] == 1 and len(versions) >= ROLLOUTS - 2
    spread = []
    for version in versions:
        mine = [sample for sample in drawn if (sample.columns["versions"] == version).any()]
        for sample, log_probs in zip(mine, recomputed(run.weights(version, tiny), mine), strict=True):
            gap = np.abs(log_probs - sample.columns["rollout_log_probs"])
            own = sample.columns["versions"] == version
            assert gap[own].max() <= 2e-5, (sample.name, version)
            spread.extend(gap[~own])
    assert np.median(spread) > 1e-2, "the weights have to differ, or this shows nothing"


def check_samples(run: Found) -> None:
    """Append-only, within the limit, stamped, and columns as they were first computed."""
    for sample in run.samples:
        versions, prompt = sample.columns["versions"], sample.length - sample.response_length
        assert sample.tokens[:prompt].tolist() == list(sample.prompt.token_ids)
        assert sample.response_length <= MOST and (np.diff(versions) >= 0).all()
        assert sample.length == prompt + len(versions)
        cuts = np.array(sample.metadata.get("cuts", []), int)
        if sample.response_length and (len(cuts) or "start_rollout_id" in sample.metadata):
            assert sample.metadata["start_rollout_id"] == versions[0] - 1
        borders = np.flatnonzero(np.diff(versions)) + 1
        assert set(borders) <= set(cuts), "weights change between spans and nowhere else"
        ends = prompt + cuts
        for name, rows, ahead in (("token_rows", sample.length, 0), ("prediction_rows", sample.length - 1, 1)):
            if name in sample.columns:
                place = np.arange(rows)
                call = (place[:, None] >= ends[None] - ahead).sum(1)
                np.testing.assert_array_equal(sample.columns[name], np.broadcast_to(
                    (1000 * call + place)[:, None, None], (rows, 2, 3)))


def check_nothing_lost(run: Found) -> None:
    """Tokens drawn = tokens trained + tokens that wait + tokens of groups that were dropped, prompt by prompt."""
    held = Counter()
    for sample in run.samples:
        held[sample.prompt.uid] += sample.response_length
    dropped = {uid for uid in run.drawn if uid % 7 == 3}
    assert {uid: count for uid, count in run.drawn.items() if uid not in dropped} == {
        uid: count for uid, count in held.items() if count and uid not in dropped}
    uids = Counter(sample.prompt.uid for batch in run.trained for sample in batch)
    assert set(uids.values()) == {4}, "a group was trained on twice, or cut in pieces"


@pytest.mark.full
def test_every_token_is_of_the_weights_that_its_version_says(course, tiny):
    run = found(course().finish("run").parent)
    went_on = resumed([sample for batch in run.trained for sample in batch])
    assert len(went_on) >= 3 and any(len(set(s.columns["versions"].tolist())) > 1 for s in went_on)
    check_tokens(run, tiny)
    check_samples(run)
    check_nothing_lost(run)
    assert max(run.metric("rollout/resumed")) > 0 and max(run.metric("rollout/called_back")) > 0
    assert max(run.metric("rollout/off_policy_tokens")) > 0
    for sample in went_on:
        assert sample.columns["loss_mask"].all()


@pytest.mark.full
def test_with_masks_only_tokens_of_the_last_span_are_trained_on(course, tmp_path):
    """And a function of a launch script chooses what goes on."""
    (tmp_path / "functions.py").write_text(LAST)
    run = found(course("--mask-offpolicy-in-partial-rollout", "--buffer-filter-path",
                       f"{tmp_path / 'functions.py'}:last").finish("run").parent)
    asked = [json.loads(line) for line in (run.folder / "asked.jsonl").read_text().splitlines()]
    assert asked and all(count == 1 and sizes and set(sizes) == {4} for _, sizes, count in asked)
    assert {rollout_id for rollout_id, _, _ in asked} <= set(range(1, ROLLOUTS))
    assert resumed([sample for batch in run.trained for sample in batch])
    for done, batch in enumerate(run.trained):
        for sample in batch:
            now = sample.columns["versions"] == done + 1
            np.testing.assert_array_equal(sample.columns["loss_mask"], now.astype(np.uint8))
    assert run.metric("rollout/off_policy_tokens") == [0.0] * ROLLOUTS
    check_samples(run)


@pytest.mark.full
def test_a_sync_that_aborts_loses_no_token(course, tiny):
    """--pause-generation-mode abort, sampling one rollout ahead: what a sync ends goes on with the new weights."""
    run = found(course("--max-lag", "1", "--over-sampling-batch-size", "4", "--pause-generation-mode", "abort",
                       "--engine-max-batch", "8").finish("run").parent)
    assert resumed([sample for batch in run.trained for sample in batch])
    check_tokens(run, tiny)
    check_samples(run)
    uids = Counter(sample.prompt.uid for batch in run.trained for sample in batch)
    assert set(uids.values()) == {4}
    for uid, count in run.drawn.items():  # the run's end cuts off what is under way
        assert count >= sum(s.response_length for s in run.samples if s.prompt.uid == uid), uid


@pytest.mark.full
def test_spans_survive_a_kill_bit_for_bit(course):
    """Killed once a checkpoint holds spans: the resumed run goes on from those very rows, and repeats no group."""
    whole, kept = course(), {}

    def kill(process) -> None:
        tracker = whole.path / "killed/run/checkpoints/latest_checkpointed_iteration.txt"
        for _ in range(6000):
            done = int(tracker.read_text() or 0) if tracker.exists() else 0
            samples = [s for s in flow(whole.path / "killed", done) if s.response_length] if done else []
            if any(sample.metadata.get("cuts") for sample in samples):
                process.kill()
                kept.update(done=done, samples=samples)
                return
            process.join(0.01)

    assert whole.start("killed", while_running=kill).code == -9
    run = found(whole.finish("killed").parent)
    last = int((run.folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert last == ROLLOUTS > kept["done"]
    later = {(s.prompt.uid, s.index): s for batch in run.trained[kept["done"]:] for s in batch}
    later |= {(s.prompt.uid, s.index): s for s in run.waiting}
    for before in kept["samples"]:
        if before.prompt.uid % 7 == 3:
            continue  # finished, and dropped by the filter
        after = later[before.prompt.uid, before.index]
        for name in ("rollout_log_probs", "versions", "loss_mask", "response_rows"):
            np.testing.assert_array_equal(after.columns[name][: before.response_length], before.columns[name])
        assert after.tokens[: before.length].tolist() == before.tokens.tolist()
        assert after.metadata["start_rollout_id"] == before.metadata["start_rollout_id"]
    uids = Counter(sample.prompt.uid for batch in run.trained for sample in batch)
    assert set(uids.values()) == {4}
