"""`miles check-nodes`: which GPUs, nodes and racks of a Ray cluster to leave out."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence

import click


@click.command("check-nodes")
@click.option("--ray-address", metavar="HOST:PORT", help="The cluster; default RAY_ADDRESS, else this machine alone.")
@click.option("--placement-labels", "labels", multiple=True, metavar="KEY=VALUE", help="Only nodes with these labels.")
@click.option("--placement-rack-label", "rack_label", metavar="KEY", help="Label of Ray nodes that names their rack.")
@click.option("--slow", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.8, show_default=True,
              metavar="SHARE", help="Bad is what has less than this share of the median.")
@click.option("--timeout", type=click.FloatRange(1), default=60.0, show_default=True, metavar="SECONDS",
              help="Seconds that one measure may take.")
def command(ray_address: str | None, labels: Sequence[str], rack_label: str | None, slow: float,
            timeout: float) -> None:
    """Measure every GPU of a Ray cluster and the ways between them; say which nodes to leave out of a run.

    Each GPU multiplies matrices, which has to be right and as fast as elsewhere, and fills its memory. Then the GPUs of
    a node exchange sums in pairs, and the nodes in pairs, each with all of its GPUs, until every two have met. Who is
    slow with every partner is bad; where that holds for all nodes of a rack, the rack is. Memory and ways are in GB/s,
    ways as medians over all partners. Nothing else may run there. Exit code 1 when a node is bad.
    """
    from miles_ray.placement import Hold, label_selector
    from miles_ray.survey import measured

    hold = Hold()
    try:
        group, bundles = hold.take(None, ray_address or os.environ.get("RAY_ADDRESS"), label_selector(labels), 0, 60.0,
                                   f"check-nodes-{uuid.uuid4().hex[:8]}", rack_label)
        findings = asyncio.run(measured(group, bundles, share=slow, timeout=timeout))
    finally:
        hold.leave([])
    for line in findings.table():
        click.echo(line)
    raise SystemExit(1 if findings.bad() else 0)
