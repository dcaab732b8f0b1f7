"""What trackers are shown of a rollout is what others are shown after them."""

import io
from types import SimpleNamespace

import pytest
from miles_testing.toy import toy_group

from miles_core.errors import ColumnError
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory
from miles_core.record.events import read
from miles_core.record.journal import Journal, Views
from miles_core.types import Batch, Prompt


def reported(folder, track):
    """The batch of a run whose tracker `track` is, and the run's messages."""
    batch = Batch(0, [toy_group(Prompt(1, 1, "", (1,)), 1)], 1)
    hooks = SimpleNamespace(metrics=None, samples=lambda rollout_id, dataset, samples, run_dir: track(samples))
    with RunDirectory(folder) as directory:
        Journal(directory, Console(False, io.StringIO()), hooks=hooks).rollout(batch, {})
    return batch, [event["text"] for event in read(directory.events) if event["event"] == "message"]


def test_the_text_of_a_token_is_asked_for_once_in_a_run(tmp_path):
    asked = []
    with RunDirectory(tmp_path) as directory:
        journal = Journal(directory, Console(False, io.StringIO()), decode_piece=lambda token: f"{asked.append(token)}")
        for rollout_id in range(2):
            journal.rollout(Batch(rollout_id, [toy_group(Prompt(1, 1, "", (1,)), 1)], 1), {})
    assert asked and len(asked) == len(set(asked))


def test_a_write_of_a_tracker_that_is_refused_is_a_warning(tmp_path):
    def track(samples):
        samples[0].columns["versions"][:] = 9

    batch, messages = reported(tmp_path, track)
    assert 9 not in batch.samples[0].columns["versions"] and "read-only" in messages[0]


def test_a_write_of_a_tracker_that_took_place_ends_the_run(tmp_path):
    def track(samples):
        samples[0].columns["versions"].flags.writeable = True
        samples[0].columns["versions"][:] = 9

    with pytest.raises(ColumnError):
        reported(tmp_path, track)


def test_trackers_get_names_that_any_encoding_has_and_events_the_names_as_they_are(tmp_path):
    seen, metrics = [], {"a/\ud800": 1.0, "ü": 2}
    hooks = SimpleNamespace(metrics=lambda rollout_id, named, run_dir: seen.append(named), samples=None)
    with RunDirectory(tmp_path) as directory:
        Journal(directory, Console(False, io.StringIO()), hooks=hooks).rollout(Batch(0, [], 1), metrics)
    assert seen == [{"a/\\ud800": 1.0, "ü": 2}]
    assert [event["metrics"] for event in read(directory.events)] == [metrics]


def test_the_terminal_hears_of_checkpoints_and_a_log_of_syncs_as_well(tmp_path):
    terminal, log = io.StringIO(), io.StringIO()
    views = Views(Console(False, terminal), Console(False, log, details=True))
    with RunDirectory(tmp_path) as directory:
        journal = Journal(directory, views)
        journal.event("checkpoint", path="runs/b", seconds=0.42, staged=False)
        journal.event("weight_sync", version=2, seconds=0.5, tensors=1, bytes=3_000_000)
    assert terminal.getvalue() == "Saved checkpoint to runs/b (0.42s)\n"
    assert log.getvalue() == terminal.getvalue() + "weight_sync to version 2: 3.0 MB (0.50s)\n"


def test_what_an_event_of_any_kind_says_in_words_is_told(tmp_path):
    """As a warning, or as its level says; the record has it beside the event's other fields."""
    terminal = io.StringIO()
    with RunDirectory(tmp_path) as directory:
        journal = Journal(directory, Console(False, terminal))
        journal.event("of_a_plugin", number=1, text="one is lost")
        journal.event("of_a_plugin", number=2, text="two compiles", level="info")
        journal.event("of_a_plugin", number=3)
        journal.event("request_failed", text="one of hundreds", level="detail")
    assert terminal.getvalue().splitlines() == ["warning: one is lost", "two compiles"]
    assert [event.get("number") for event in read(directory.events)] == [1, 2, 3, None]
