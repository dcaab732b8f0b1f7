"""What the parity kit measured, as the table of docs/model-families.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def matrix(results: Iterable[tuple[Any, Sequence[Any]]]) -> str:
    """The results, each case's Parity and its Cuts, as a table in Markdown."""
    from miles_megatron.testing.resharding import CUTS

    titles = ["family", "model type", "plugin", "logits", "gradients", *CUTS, "round trip", "notes"]
    rows, official = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"], _plugins()
    for one, cuts in results:
        exact, by_layout = one.exact and all(cut.exact for cut in cuts), {cut.layout: cut for cut in cuts}
        differences = (f"{by_layout[name].gradient:.1e}" if name in by_layout else "–" for name in CUTS)
        cells = [one.case.name, f"`{one.case.family}`", official.get(one.case.family, "own"), f"{one.logits:.1e}",
                 f"{one.gradients:.1e}", *differences, "exact" if exact else "differs",
                 one.case.notes]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def _plugins() -> dict[str, str]:
    """model_type -> the official package that offers it."""
    from miles_core.plugins.scan import KNOWN

    return {offer.partition(":")[2]: f"miles-{name}" for name, offers in KNOWN.items() for offer in offers
            if offer.startswith("model_spec:")}
