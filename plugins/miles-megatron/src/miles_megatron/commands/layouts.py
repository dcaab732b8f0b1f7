"""`miles layouts`: which layouts of ranks fit the memory of so many GPUs, by the words of `miles run`."""

from __future__ import annotations

import click


@click.command("layouts", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Layouts to show.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN_FILE] [FLAGS]...")
def command(count: int, words: tuple[str, ...]) -> None:
    """Which layouts fit the GPUs of a run, best first: of the trainer, and an engine beside it.

    \b
      miles layouts --hf-checkpoint models/GLM-5 --actor-num-nodes 16 \\
        --actor-num-gpus-per-node 8 --gpu-memory-gib 80 \\
        --rollout-max-context-len 16384

    Takes the words of `miles run`, of which it needs the model, and reads config.json alone. A layout in them is left
    out. Where nothing fits, it says how many GPUs would be enough. The order is by an estimate of operations and
    traffic.
    """
    from miles_core.cli.run import split
    from miles_core.config.hardware import trainer_gpus
    from miles_core.config.load import load
    from miles_megatron.proposals import lines

    config = load(*split(words)).config
    for line in lines(config, trainer_gpus(config), count):
        click.echo(line)
