"""Whole runs through the real command line."""

from miles_testing.forked import miles

from miles_core.record.events import read


def test_a_run_trains_and_records_itself(run_file, tmp_path):
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "runs/a"], tmp_path)
    assert outcome.code == 0, outcome.err
    events = list(read(tmp_path / "runs/a/events.jsonl"))
    metrics = [event for event in events if event["event"] == "metrics"]
    assert [event["rollout_id"] for event in metrics] == [0, 1, 2]
    assert metrics[-1]["metrics"]["rollout/raw_reward"] > metrics[0]["metrics"]["rollout/raw_reward"]
    assert max(event["metrics"]["train/train_rollout_logprob_abs_diff_max"] for event in metrics) <= 1e-5
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert [event["version"] for event in syncs] == [1, 2, 3, 4], "one before the first rollout and one after each"
