"""Claims: what a recipe reaches after how many rollouts, measured over seeds, and the band that follows from them.

claim.toml has the author's lines, `metric`, `step` and `[[prepare]]`, and below them `[measured]`, which
`miles reproduce NAME --write-claim` writes.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError

QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Of Student's t at 97.5 %, by the number of seeds that were measured, one more than the degrees of freedom."""
HEADING = "[measured] # by `miles reproduce {name} --seeds {count} --write-claim`"

Curve = list[tuple[int, float]]
"""(rollouts trained on, value of the metric), in order."""


@dataclass(frozen=True)
class Preparation:
    """A command that makes what the run file needs, and the file by which one sees that it ran."""

    makes: Path
    command: str


@dataclass(frozen=True)
class Measured:
    """What seeds 0, 1, ... gave.

    Args:
        values: of the metric at the step, one a seed.
        curves: of the same runs, to draw.
        about: where and when: date, machine, versions, CPU seconds of one run.
    """

    values: list[float]
    curves: list[Curve]
    about: dict[str, Any]

    def band(self, seeds: int = 1) -> tuple[float, float]:
        """Where the mean of so many further seeds lies in 95 cases of 100, seeds being normally distributed: the
        prediction interval mean ± t sd sqrt(1/n + 1/seeds), sd with n - 1."""
        count = len(self.values)
        # mean, not fmean, which of equal values is another one in the last bit: outside of a band of no width
        mean, deviation = statistics.mean(self.values), statistics.stdev(self.values)
        width = QUANTILES[count] * deviation * math.sqrt(1 / count + 1 / seeds)
        return mean - width, mean + width


@dataclass(frozen=True)
class Claim:
    """A recipe's claim.

    Args:
        metric: name in the run's events, such as eval/sums.
        step: rollouts after which it is read.
        measured: None until somebody has.
    """

    path: Path
    metric: str
    step: int
    prepare: list[Preparation]
    measured: Measured | None

    def at_step(self, curve: Curve) -> float:
        """The claimed value of a run.

        Raises:
            ConfigError: the run has no such metric at that step.
        """
        for step, value in curve:
            if step == self.step:
                return value
        steps = ", ".join(str(step) for step, _ in curve)
        raise ConfigError(f"the run has no {self.metric} at step {self.step}", code="claim-metric-missing",
                          got=f"it has one at {steps}" if steps else "it has none", who=str(self.path),
                          fix="correct metric and step, or --eval-interval in recipe.toml")

    def write(self, measured: Measured) -> None:
        """Put what was measured in the place of what stood there."""
        author = self.path.read_text(encoding="utf-8").partition("\n[measured]")[0].rstrip("\n")
        low, high = measured.band()
        curves = [dict(curve) for curve in measured.curves]
        steps = sorted(set.intersection(*map(set, curves)))  # a seed may lack one, whose value was not finite
        facts = {**measured.about, "values": measured.values, "low": round(low, 4), "high": round(high, 4),
                 "steps": steps, "curves": [[curve[step] for step in steps] for curve in curves]}
        lines = [f"{key} = {json.dumps(value)}" for key, value in facts.items() if key != "curves"]
        lines += ["curves = [", *(f"  {json.dumps(curve)}," for curve in facts["curves"]), "]"]
        heading = HEADING.format(name=self.path.parent.name, count=len(measured.values))
        self.path.write_text("\n".join([author, "", heading, *lines]) + "\n", encoding="utf-8")


def read(path: Path) -> Claim:
    """
    Raises:
        ConfigError: no claim, or one that lacks or misspells a key.
    """
    try:
        stated = tomllib.loads(path.read_text(encoding="utf-8"))
        prepare = [Preparation(Path(each["makes"]), str(each["command"])) for each in stated.get("prepare", [])]
        claim = Claim(path, str(stated["metric"]), int(stated["step"]), prepare, _measured(stated.get("measured")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("the claim cannot be read", code="claim-unreadable", got=f"{type(error).__name__}: {error}",
                          who=str(path), fix="it needs metric and step; see docs/recipes.md") from None
    if unknown := stated.keys() - {"metric", "step", "prepare", "measured"}:
        raise ConfigError("the claim cannot be read", code="claim-unreadable",
                          got=f"unknown keys {', '.join(sorted(unknown))}", who=str(path),
                          fix="it knows metric, step, prepare and measured")
    return claim


def _measured(table: dict[str, Any] | None) -> Measured | None:
    if table is None:
        return None
    facts = dict(table)
    values, steps, curves = ([*facts.pop(key)] for key in ("values", "steps", "curves"))
    measured = Measured([float(value) for value in values], [list(zip(steps, curve, strict=True)) for curve in curves],
                        {key: value for key, value in facts.items() if key not in ("low", "high")})
    if len(values) not in QUANTILES or len(curves) != len(values):
        raise ValueError(f"a band is of 2 to 10 seeds and a curve each, not of {len(values)} and {len(curves)}")
    if [round(end, 4) for end in measured.band()] != [facts["low"], facts["high"]]:
        raise ValueError("low and high are not the band of values")
    return measured


def verdict(value: float, band: Sequence[float]) -> str:
    """Inside, or on which side of the band."""
    low, high = band
    return "inside" if low <= value <= high else "outside, below" if value < low else "outside, above"
