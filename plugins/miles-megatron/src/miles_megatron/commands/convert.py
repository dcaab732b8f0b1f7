"""`miles convert`: checkpoints from Hugging Face's format to torch_dist and back, in the memory of a few tensors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.cli.completion import plugins
from miles_core.errors import CheckpointError, ConfigError
from miles_core.types import Rank
from miles_megatron.commands.convert_by import Conversions, check_free, taken

if TYPE_CHECKING:
    from miles_megatron.convert import Conversion, Job

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", re.IGNORECASE)


class Bytes(click.ParamType):
    """A number of bytes: 5GB, 500MB; powers of 1000."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value))
        size = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
        return size or self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)


def _shared(function: Callable) -> Callable:
    """The options of both directions."""
    for option in (
        click.option("--host", type=click.Choice(["process", "ray"]), default="process", show_default=True,
                     help="How several processes run."),
        click.option("--processes", type=click.IntRange(1), default=1, show_default=True, metavar="N",
                     help="Number of processes that share the work. Under torchrun: its processes."),
        click.option("--plugin", "plugins", multiple=True, metavar="NAME", shell_complete=plugins,
                     help="Plugin that builds the architecture, if it is not an official one; may be repeated."),
        click.option("--option", "options", multiple=True, metavar="PLUGIN.KEY=VALUE",
                     help="An option that the run gave one of these plugins; may be repeated."),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                     help="Of the weights that are written; default: as they are read. Biases and tables of routers "
                          "keep theirs."),
    ):
        function = option(function)
    return function


@click.group("convert", cls=Conversions)
def command() -> None:
    """Convert checkpoints, a parameter at a time: memory does not grow with the model.

    \b
      miles convert hf-to-dist models/qwen3 models/qwen3-dist
      miles convert dist-to-hf runs/demo/checkpoints models/trained \\
        --hf-checkpoint models/qwen3
      torchrun --nproc-per-node 4 --no-python \\
        miles convert hf-to-dist models/qwen3 models/qwen3-dist

    Nothing needs converting before a run: --hf-checkpoint is read as it is. Plugins add further conversions.
    """


@command.command("hf-to-dist")
@click.argument("source", metavar="SRC", type=_FOLDER)
@click.argument("out", type=click.Path(path_type=Path))
@_shared
def hf_to_dist(source: Path, out: Path, dtype: str | None, plugins: tuple[str, ...], options: tuple[str, ...],
               processes: int, host: str) -> None:
    """A Hugging Face directory SRC becomes a torch_dist checkpoint OUT, for --ref-load.

    It holds weights alone, loads under any layout, and appears when it is complete.
    """
    ranks = _Ranks(processes, host)
    if not (source / "config.json").is_file():
        other = "convert it with miles convert dist-to-hf" if _is_dist(source) else "give the folder of config.json"
        raise CheckpointError("not a Hugging Face directory", code="not-hugging-face", got="no config.json",
                              who=str(source), fix=other)
    from miles_core.record import publish
    from miles_megatron import checkpoint
    from miles_megatron.convert import Job, architecture
    from miles_megatron.convert_to_dist import ToDist

    if not checkpoint.never_saved(out):
        raise taken(out)
    described = architecture(source, plugins, options)
    target = checkpoint.iteration_folder(out, 0)
    with _made(out), publish.publish(target, writer=ranks.first) as folder:
        done = ranks.run(ToDist, Job(source.resolve(), folder.resolve(), *described, dtype=_dtype(dtype)))
    if ranks.first:
        publish.write_text(out / checkpoint.TRACKER, "0\n")
        click.echo(f"Wrote {out}: {done}")


@command.command("dist-to-hf")
@click.argument("source", metavar="CKPT", type=_FOLDER)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--hf-checkpoint", required=True, type=_FOLDER, metavar="DIR",
              help="The Hugging Face directory of config.json and tokenizer.")
@click.option("--shard-size", type=Bytes(), default="5GB", show_default=True, help="Most bytes of a file of weights.")
@_shared
def dist_to_hf(source: Path, out: Path, hf_checkpoint: Path, shard_size: int, dtype: str | None,
               plugins: tuple[str, ...], options: tuple[str, ...], processes: int, host: str) -> None:
    """The weights of a torch_dist checkpoint CKPT become a Hugging Face directory OUT.

    CKPT is a folder that a run saved into, whose latest iteration counts, or one of its iterations.
    """
    ranks = _Ranks(processes, host)
    if (source / "config.json").is_file():
        raise CheckpointError("already a Hugging Face directory", code="already-hugging-face", who=str(source),
                              fix="give a torch_dist checkpoint, or convert this one with miles convert hf-to-dist")
    if not (hf_checkpoint / "config.json").is_file():
        raise CheckpointError("config.json is missing", code="config-json-missing",
                              who=f"--hf-checkpoint {hf_checkpoint}",
                              fix="give the Hugging Face directory that the run started from")
    from miles_core.record import publish
    from miles_megatron import checkpoint
    from miles_megatron.convert import Job, architecture
    from miles_megatron.convert_to_hf import ToHuggingFace

    iteration = source if _is_iteration(source) else checkpoint.iteration_folder(source, checkpoint.latest(source))
    check_free(out)
    described = architecture(hf_checkpoint, plugins, options)
    with publish.publish(out, writer=ranks.first, beside=False) as folder:
        done = ranks.run(ToHuggingFace, Job(iteration.resolve(), folder.resolve(), *described, dtype=_dtype(dtype),
                                            shard_bytes=shard_size, companions=hf_checkpoint.resolve()))
    if ranks.first:
        click.echo(f"Wrote {out}: {done}")


class _Ranks:
    """The processes that do the work: this one, torchrun's, or more that this one starts.

    Raises:
        ConfigError: --processes beside torchrun.
    """

    def __init__(self, processes: int, host: str):
        self.processes, self.host = processes, host
        self.torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
        self.rank = Rank()
        if self.torchrun:
            if processes > 1 or host != "process":
                raise ConfigError("torchrun has already started the processes", code="torchrun-and-processes",
                                  who="--processes, --host",
                                  fix="leave them out, or start the command without torchrun")
            index, size, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            self.rank = Rank(index, size, local, "env://")

    @property
    def first(self) -> bool:
        """Whether this process publishes and tells."""
        return self.rank.index == 0

    def run(self, kind: type[Conversion], job: Job) -> str:
        """Do the work; what was written, in words."""
        start = time.monotonic()
        files, size = asyncio.run(self._run(kind, job))
        return f"{size / 1e6:,.1f} MB in {files} file{'s'[: files != 1]}, {time.monotonic() - start:.1f} s"

    async def _run(self, kind: type[Conversion], job: Job) -> tuple[int, int]:
        from miles_core.hosts import process_group
        from miles_megatron.convert import Here, drive

        if self.host == "ray":
            from miles_ray.host import ray_group

            handle = ray_group("converter", self.processes, kind, job)
        elif self.processes > 1:
            handle = process_group("converter", self.processes, kind, job)
        else:
            handle = Here(kind(job, self.rank))
        try:
            with _bar(self.first) as progress:
                return await drive(handle, progress)
        finally:
            await handle.close()


@contextlib.contextmanager
def _bar(shown: bool) -> Iterator[Callable[[int, int], object]]:
    """A bar on a terminal, told of (bytes written, bytes in all); nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn("Converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _made(out: Path) -> Iterator[None]:
    """Remove a folder created inside if the block fails."""
    existed = out.exists()
    try:
        yield
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise


def _dtype(name: str | None):
    import torch

    return getattr(torch, name) if name else None


def _is_iteration(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def _is_dist(folder: Path) -> bool:
    return _is_iteration(folder) or (folder / "latest_checkpointed_iteration.txt").is_file()
