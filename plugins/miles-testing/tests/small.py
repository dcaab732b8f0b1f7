"""A plugin: a trainer without a model, of three tensors and a momentum, that can break one promise of a trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """What it is to do wrong."""

    fault: str = option("", "The promise that is broken.")


class Small:
    """Moves its tensors by the mean advantage; a log-prob depends on the token and on the first weight."""

    def __init__(self, options: Options):
        self.options = options

    @hookimpl(name="small")
    def trainer(self, config, hooks, columns, rank):
        return Trainer(self.options.fault, config.checkpoint.load)


class Trainer:
    """See miles_core/stages/step.py; `breaks` asks whether this is the fault that it has."""

    def __init__(self, fault: str, source: str | None):
        self.fault, self.source = fault, source
        self.held = {name: np.linspace(-1, 1, size) for name, size in (("embed", 3), ("layer", 4), ("norm", 1))}
        self.momentum = 0.0

    def breaks(self, fault: str) -> bool:
        return self.fault == fault

    def load(self):
        from miles_core.stages.step import Resume

        if not self.source:
            return Resume(int(self.breaks("begins late")), {} if self.breaks("begins with a state") else None, "")
        kept = json.loads((Path(self.source) / "iter_0000001" / "kept.json").read_text())
        self.held = {name: np.array(values) for name, values in kept["held"].items()}
        self.momentum = 0.0 if self.breaks("forgets its momentum") else kept["momentum"]
        if self.breaks("loses a tensor"):
            del self.held["norm"]
        if self.breaks("loads other weights"):
            self.held["norm"] += 1e-9
        state = {} if self.breaks("loses the state") else kept["state"]
        return Resume(kept["rollout"] + self.breaks("goes on late"), state, self.source)

    def take_batch(self, batch):
        self.batch = batch

    def score(self):
        for sample in self.batch.samples:
            drawn = sample.tokens[len(sample.prompt.token_ids):]
            column = -np.abs(np.sin(drawn * self.held["embed"][0])).astype(np.float32)
            sample.columns["log_probs"] = self.column("log_probs", column)
        if self.breaks("trains while it scores"):
            self.held["layer"] += 0.1
        return {}

    def column(self, name, column):
        if self.breaks(f"{name} of the whole sample"):
            return np.append(column, column[:1])
        if self.breaks(f"{name} that are none"):
            return column * np.float32("nan")
        return column + 1 if self.breaks(f"{name} above 0") else column

    def advantage(self):
        for sample in self.batch.samples:
            column = np.full(sample.response_length, sample.reward - 0.4, np.float32)
            sample.columns["advantages"] = self.column("advantages", column)
        if self.breaks("trains while it compares"):
            self.held["layer"] += 0.1
        return {"advantage": None} if self.breaks("an empty metric") else {}

    def step(self, index):
        from miles_core.errors import NonFiniteError

        gradient = np.concatenate([sample.columns["advantages"] * sample.columns["log_probs"]
                                   for sample in self.batch.samples]).mean()
        known = bool(np.isfinite(gradient))
        if not known and self.breaks("steps and then refuses"):
            self.held["layer"] += 0.1
        if not known and not self.breaks("steps on what is not finite"):
            raise NonFiniteError("the gradient is not finite", got=gradient, fix="look at the advantages")
        if known and not self.breaks("does not step"):
            self.momentum = 0.9 * self.momentum + float(gradient)
            self.held = {name: tensor - 0.1 * self.momentum for name, tensor in self.held.items()}
        return {"loss": float("inf") if self.breaks("an infinite metric") else 0.5}

    def end_batch(self):
        if self.breaks("returns other tokens"):
            self.batch.samples[0].columns["tokens"][-1] += 1
        return self.batch

    def weights(self):
        import torch

        items = [(name, torch.from_numpy(tensor)) for name, tensor in self.held.items()]
        if self.breaks("streams nothing"):
            return iter(())
        return iter(items + items[:1] if self.breaks("streams a tensor twice") else items)

    def save(self, folder, rollout_id, state):
        from miles_core.types import TRACKER

        target = folder / f"iter_{rollout_id:07d}"
        target.mkdir(parents=True)
        held = {name: tensor.tolist() for name, tensor in self.held.items()}
        (target / "kept.json").write_text(json.dumps(
            {"held": held, "momentum": self.momentum, "rollout": rollout_id, "state": state}))
        (folder / TRACKER).write_text(str(rollout_id))

    def saved(self):
        """It saves at once."""

    def export(self, folder):
        folder.mkdir()
        if not self.breaks("exports no config"):
            (folder / "config.json").write_text("{}")

    def close(self):
        """Holds nothing."""
