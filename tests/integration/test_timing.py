"""At max_lag 0 timing decides nothing: the real engine and trainer, random reward delays, drops and over-sampling."""

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

SLOW = '''
"""A scorer that takes a random time for each answer, and a filter that drops every third group."""
import asyncio
import random

from miles_core import hookimpl
from miles_core.types import Drop


class Slow:
    """Offers the scorer "slow"."""

    @hookimpl("reward", name="slow")
    async def slow(self, sample):
        draw = random.Random(f"SEED-{sample.prompt.uid}-{sample.index}")
        await asyncio.sleep(min(draw.expovariate(1 / 0.03), 0.3))
        ids = sample.tokens[-sample.response_length:]
        return float((ids % 2 == 0).mean())

    @hookimpl
    def filter_group(self, group):
        return Drop("third") if group.prompt.uid % 3 == 0 else group
'''


def trained(run_file, tmp_path, name: str, seed: str, *flags: str):
    """Final weights, sample files and metrics (times aside) of a run under the delays of a seed."""
    folder = tmp_path / name
    folder.mkdir()
    plugin = folder / "slow.py"
    plugin.write_text(SLOW.replace("SEED", seed))
    outcome = miles(["run", run_file(**{'"digits"': '"slow"'}), "--plugin", plugin, "--over-sampling-batch-size", "7",
                     "--save", "ck", "--save-hf", "hf", "--run-dir", "run", "--no-live", *flags], folder)
    assert outcome.code == 0, outcome.err
    metrics = [{key: value for key, value in event["metrics"].items() if not key.startswith("perf/")}
               for event in read(folder / "run/events.jsonl") if event["event"] == "metrics"]
    samples = [path.read_bytes() for path in sorted((folder / "run/samples").iterdir())]
    return (folder / "hf/model.safetensors").read_bytes(), samples, metrics


@pytest.mark.full
def test_no_delay_changes_a_bit(run_file, tmp_path):
    """Three seeds of delays, and an engine that decodes three requests at a time instead of all at once."""
    runs = [trained(run_file, tmp_path, f"seed {seed}", seed) for seed in "abc"]
    runs.append(trained(run_file, tmp_path, "narrow", "d", "--engine-max-batch", "3"))
    weights, samples, metrics = runs[0]
    assert sum(one.get("rollout/dynamic_filter/drop_third", 0) for one in metrics) >= 4, "the filter dropped nothing"
    for other in runs[1:]:
        assert other[2] == metrics
        assert other[1] == samples
        assert other[0] == weights
