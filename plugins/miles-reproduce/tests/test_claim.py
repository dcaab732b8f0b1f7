"""Claims: reading, the band, writing, and the picture of them."""

from __future__ import annotations

import math
import statistics
import xml.etree.ElementTree as ElementTree

import pytest
from miles_reproduce.claim import Measured, read, verdict
from miles_reproduce.plot import svg

from miles_core.errors import ConfigError

AUTHOR = 'metric = "eval/sums" # greedy\nstep = 4\n\n[[prepare]]\nmakes = "a/b"\ncommand = "miles run x.toml"\n'
VALUES = [0.8, 0.9, 0.7, 0.85, 0.75]
CURVES = [[(0, 0.3), (2, 0.5), (4, value)] for value in VALUES]


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "claim.toml").write_text(AUTHOR)
    return folder / "claim.toml"


def test_what_is_written_is_read_again_and_the_authors_lines_stay(path):
    for date in ("2026-01-01", "2026-01-02"):
        read(path).write(Measured(VALUES, CURVES, {"date": date, "cpu_seconds": 30}))
    claim = read(path)
    assert path.read_text().startswith(AUTHOR) and path.read_text().count("[measured]") == 1
    assert claim.measured == Measured(VALUES, CURVES, {"date": "2026-01-02", "cpu_seconds": 30})
    assert (claim.prepare[0].command, str(claim.prepare[0].makes)) == ("miles run x.toml", "a/b")


def test_the_band_is_a_prediction_interval():
    low, high = Measured(VALUES, CURVES, {}).band()
    half = 2.776 * statistics.stdev(VALUES) * math.sqrt(1.2)
    assert (low, high) == pytest.approx((0.8 - half, 0.8 + half))
    assert Measured(VALUES, CURVES, {}).band(5)[1] == pytest.approx(0.8 + half / math.sqrt(3))
    assert [verdict(value, (low, high)) for value in (0.8, low - 0.01, high + 0.01)] == [
        "inside", "outside, below", "outside, above"]


def test_seeds_of_one_value_come_again_inside():
    """The band has no width, and a mean of floats would lie beside it."""
    same = Measured([0.003] * 3, CURVES[:3], {})
    assert same.band() == (0.003, 0.003) and verdict(0.003, same.band()) == "inside"


def test_a_curve_has_the_steps_that_all_seeds_have(path):
    """By their place in a list, values of one seed would be drawn at the steps of another."""
    curves = [[(0, 0.3), (2, 0.5), (4, 0.8)], [(1, 0.4), (2, 0.6), (4, 0.9)]]
    read(path).write(Measured([0.8, 0.9], curves, {}))
    assert read(path).measured.curves == [[(2, 0.5), (4, 0.8)], [(2, 0.6), (4, 0.9)]]


@pytest.mark.parametrize("before, after", [
    ("low = ", "low = 0.1 #"), ("step = 4", "step = 4\nsteps = 5"), ("step = 4", ""), ("values = [0.8, ", "values = ["),
    ("  [0.3, 0.5, 0.8],", "  [0.3, 0.5],"), ("metric", "[metric"),
])
def test_a_claim_that_contradicts_itself_is_refused(path, before, after):
    read(path).write(Measured(VALUES, CURVES, {}))
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert error.value.code == "claim-unreadable" and error.value.who == str(path)


def test_a_run_without_the_metric_at_the_step_is_no_outcome(path):
    with pytest.raises(ConfigError) as error:
        read(path).at_step([(0, 0.3), (3, 0.5)])
    assert error.value.code == "claim-metric-missing" and "0, 3" in error.value.got


def test_the_picture_has_every_curve_and_the_band(path):
    read(path).write(Measured(VALUES, CURVES, {}))
    picture = ElementTree.fromstring(svg(read(path), [[(0, 0.3), (4, 0.6)]]))
    lines = [each.attrib["stroke-width"] for each in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert lines == ["1.2"] * 5 + ["2"]
    low, high = Measured(VALUES, CURVES, {}).band()
    assert f"band at 4: {low:.3f} to {high:.3f}" in "".join(picture.itertext())
