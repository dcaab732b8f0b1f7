"""What every trainer has to satisfy (stages/step.py, Trainer).

    from miles_testing import trainer_contract

    def test_contract():
        trainer_contract("my-trainer", plugins=["my-plugin"])

It runs in a process of its own, as trainers hold process groups.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.types import Batch, Rank
from miles_testing.forked import apart
from miles_testing.sample_inputs import canned_samples, grouped
from miles_testing.tiny import run_file

STATE = {"prompts": {"next": 6}, "plugins": {}}


def trainer_contract(trainer: str, *, plugins: Sequence[str] = (), options: Mapping[str, object] | None = None,
                     checkpoint: Path | None = None, timeout: float = 180.0) -> None:
    """Every property that a trainer has to have, on one rank and a tiny model.

    Args:
        trainer: the name that --trainer chooses.
        plugins: who offers it.
        options: keys of the run file, with dots.

    Raises:
        AssertionError: names the property.
    """
    with tempfile.TemporaryDirectory() as folder:
        apart(_all, Path(folder), trainer, list(plugins), dict(options or {}), checkpoint, timeout=timeout)


def _all(folder: Path, trainer: str, plugins: list[str], options: dict[str, Any], checkpoint: Path | None) -> None:
    def make(load: Path | None = None) -> Any:
        from miles_core.build import trainer_part, with_context
        from miles_core.plugins.plan import prepare

        tables: dict[str, dict[str, object]] = {
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 3, "num_rollout": 4},
            "perf": {"trainer": trainer}, "optimizer": {"lr": 1e-2},
            "checkpoint": {"load": str(load)} if load else {},
        }
        plan = prepare(run_file(folder / "run.toml", plugins, tables, options, checkpoint=checkpoint))
        return trainer_part(plan.selected, with_context(plan.config), Rank())

    first = make()
    resume = first.load()
    assert (resume.rollout_id, resume.state) == (0, None), f"a fresh start resumes at {resume}"
    fresh = _weights(first)
    _trains(first, fresh)
    first.save(folder / "saved", 1, STATE)
    first.export(folder / "exported")
    assert (folder / "exported" / "config.json").is_file(), "an export is a Hugging Face directory"
    trained, batch = _weights(first), _batch(1)
    _rollout(first, batch)  # --async-save may be writing what was before it
    after = _weights(first)
    first.saved()
    first.close()

    second = make(folder / "saved")
    resume = second.load()
    assert (resume.rollout_id, resume.state) == (1, STATE), f"it goes on at {resume.rollout_id} with {resume.state}"
    _same(_weights(second), trained, "a resumed trainer has other weights than were saved")
    _rollout(second, _batch(1))
    _same(_weights(second), after, "a resumed trainer trains otherwise than the one that went on")
    _refuses(second)
    second.close()


def _batch(rollout_id: int) -> Batch:
    flat = canned_samples()
    for sample in flat:
        for name in ("log_probs", "ref_log_probs", "advantages"):
            del sample.columns[name]
        sample.columns["versions"][:] = rollout_id
        sample.columns["rollout_log_probs"] += np.float32(-0.1 * rollout_id)
    return Batch(rollout_id, grouped(flat), rollout_id)


def _trains(trainer: Any, fresh: dict[str, Any]) -> None:
    """Each call does what it says, and only `step` changes weights."""
    batch = _batch(0)
    tokens = [sample.tokens.tolist() for sample in batch.samples]
    trainer.take_batch(batch)
    numbers = trainer.score()
    numbers |= trainer.advantage()
    _same(_weights(trainer), fresh, "weights change before the optimizer step")
    for sample in batch.samples:
        for name in ("log_probs", "advantages"):
            column = sample.columns[name]
            assert column.shape == (sample.response_length,) and np.isfinite(column).all(), f"{name} of {sample.name}"
        assert (sample.columns["log_probs"] <= 1e-3).all(), f"log-probs of {sample.name} are above 0"
    numbers |= trainer.step(0)
    odd = {name: value for name, value in numbers.items() if not isinstance(value, float) or not math.isfinite(value)}
    assert not odd, f"metrics are finite floats, not {odd}"
    back = trainer.end_batch()
    assert [sample.tokens.tolist() for sample in back.samples] == tokens, "the batch comes back as it was given"
    changed = [name for name, tensor in _weights(trainer).items() if not np.array_equal(tensor, fresh[name])]
    assert changed, "after an optimizer step no weight is another"


def _rollout(trainer: Any, batch: Batch) -> None:
    trainer.take_batch(batch)
    trainer.score()
    trainer.advantage()
    trainer.step(0)
    trainer.end_batch()


def _refuses(trainer: Any) -> None:
    """What is not finite never reaches the optimizer."""
    from miles_core.errors import NonFiniteError

    before, batch = _weights(trainer), _batch(2)
    trainer.take_batch(batch)
    trainer.score()
    trainer.advantage()
    batch.samples[0].columns["advantages"] = np.full(batch.samples[0].response_length, np.nan, np.float32)
    try:
        trainer.step(0)
    except NonFiniteError:
        pass
    else:
        raise AssertionError("a step on an advantage that is not a number goes through")
    trainer.end_batch()
    _same(_weights(trainer), before, "a step that was refused has changed weights")


def _weights(trainer: Any) -> dict[str, np.ndarray]:
    weights = {}
    for name, tensor in trainer.weights():
        assert name not in weights, f"the stream of weights has {name} twice"
        weights[name] = tensor.detach().cpu().double().numpy().copy()
    assert weights, "the stream of weights is empty"
    return weights


def _same(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    assert one.keys() == other.keys(), f"{what}: {sorted(one.keys() ^ other.keys())}"
    differ = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not differ, f"{what}: {differ}"
