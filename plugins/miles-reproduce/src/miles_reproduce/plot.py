"""Curves as an SVG file: the claim's seeds and their band, and over them the runs that were made."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from miles_reproduce.claim import Claim, Curve

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 40
SEEDS, RUNS, TEXT = "#8899aa", "#d95f02", "#667788"
"""Readable on white and on black."""


def svg(claim: Claim, runs: Sequence[Curve] = ()) -> str:
    """The picture: the claim's seeds in grey with the band at its step, the runs in colour."""
    seeds = claim.measured.curves if claim.measured else []
    low, high = claim.measured.band() if claim.measured else (0.0, 0.0)
    every = [point for curve in (*seeds, *runs) for point in curve]
    steps, values = [step for step, _ in every] or [0], [value for _, value in every] + ([low, high] if seeds else [])
    bottom, top = min([0.0, *values]), max([*values, *([1.0] if max(values, default=1.0) > 0.5 else [])])
    last = max([*steps, claim.step])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bottom) / ((top - bottom) or 1.0)

    def line(curve: Curve, style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        return f'<polyline points="{points}" fill="none" {style}/>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12" fill="{TEXT}" role="img">',
             f'<title>{escape(claim.path.parent.name)}: {escape(claim.metric)}</title>',
             f'<text x="{LEFT}" y="20" font-size="14">{escape(claim.path.parent.name)}: {escape(claim.metric)}</text>']
    for tick in range(5):
        value = bottom + (top - bottom) * tick / 4
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{SEEDS}" stroke-opacity=".3"/>'
                     f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    parts += [f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
              for step in sorted({*steps})[:: max(1, len({*steps}) // 10)]]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">rollouts</text>')
    parts += [line(curve, f'stroke="{SEEDS}" stroke-width="1.2"') for curve in seeds]
    if seeds:
        parts.append(f'<rect x="{x(claim.step) - 4:.1f}" y="{y(high):.1f}" width="8" '
                     f'height="{max(y(low) - y(high), 1):.1f}" fill="{SEEDS}" fill-opacity=".45">'
                     f'<title>band at {claim.step}: {low:.3f} to {high:.3f}</title></rect>')
    parts += [line(curve, f'stroke="{RUNS}" stroke-width="2"') for curve in runs]
    return "\n".join([*parts, "</svg>", ""])
