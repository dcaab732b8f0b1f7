"""What it takes to open prompts and to get the first thousand: JSONL in memory, Parquet as a table and as a stream.

    python bench/prompts.py [--rows 1000000]

Every line is a process of its own, which imports before it counts. "Again" finds the Arrow files that the first
opening made. Memory is what the process's own pages grew by, at their peak and once the prompts are open; pages of a
file that is mapped into memory count for neither, as the system takes them back when it likes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from miles_datasets.source import Source
from miles_datasets.stream import StreamedPrompts
from miles_datasets.table import Table

from miles_core.stages.prompts import JsonlRecords, RowPrompts, Rows

QUESTION = "A shop sells {0} apples a day for {1} cents each. How many cents does it take in {2} days?"
ANSWER = "It sells {0} apples a day, so {0} x {1} cents a day. In {2} days that is {3} cents.\n#### {3}"
KINDS = {"jsonl": "JSONL", "first": "Parquet, first opening", "again": "Parquet, again", "stream": "Parquet, streamed",
         "shuffled": "Parquet, streamed and shuffled"}


class Bytes:
    """A tokenizer of one token per byte, so that reading is what is measured."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def write(folder: Path, rows: int) -> None:
    """GSM8K's two columns in both formats."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema({"question": pyarrow.string(), "answer": pyarrow.string()})
    with (folder / "train.jsonl").open("w") as lines, \
            pyarrow.parquet.ParquetWriter(folder / "train.parquet", schema) as table:
        for first in range(0, rows, 10_000):
            numbers = [(i % 97, i % 89, i, i % 97 * (i % 89) * i) for i in range(first, min(first + 10_000, rows))]
            part = [{"question": QUESTION.format(*one), "answer": ANSWER.format(*one)} for one in numbers]
            lines.writelines(json.dumps(row) + "\n" for row in part)
            table.write_table(pyarrow.Table.from_pylist(part, schema))


def own_mib() -> float:
    """MiB of this process that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measure(kind: str, folder: Path) -> dict[str, float]:
    """Seconds and MiB of one way to open the prompts."""
    import datasets  # noqa: F401 - not counted
    import pyarrow.parquet  # noqa: F401

    path = folder / ("train.jsonl" if kind == "jsonl" else "train.parquet")
    rows = Rows(str(path), "question", "answer", "metadata", 4096)
    before, peak, ended = own_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], own_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    if kind in ("stream", "shuffled"):
        prompts = StreamedPrompts(rows, Source(rows.path), Bytes(), shuffle=kind == "shuffled", buffer=10_000)
    else:
        records = JsonlRecords(rows.path) if kind == "jsonl" else Table(Source(rows.path, str(folder / "cache")))
        prompts = RowPrompts(rows, records, Bytes(), shuffle=True)
    opened, spent = time.perf_counter() - begin, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
    holds = own_mib() - before
    for _ in range(1000):
        prompts.next()
    thousand = time.perf_counter() - begin - opened
    ended.set()
    watcher.join()
    return {"opened": opened, "cpu": spent, "peak": max(peak[0] - before, holds), "holds": holds, "thousand": thousand}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(measure(given.kind, given.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.rows)
        sizes = {path.suffix: path.stat().st_size / 2**20 for path in folder.iterdir()}
        print(f"{given.rows} rows, JSONL {sizes['.jsonl']:.0f} MiB, Parquet {sizes['.parquet']:.0f} MiB\n")
        print("| prompts | seconds to open | CPU s | MiB at the peak | MiB once open | seconds for 1,000 prompts |")
        print("|---|---|---|---|---|---|")
        for kind, title in KINDS.items():
            words = [sys.executable, __file__, "--kind", kind, "--folder", name]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            one = json.loads(done.stdout.splitlines()[-1])
            print(f"| {title} | {one['opened']:.1f} | {one['cpu']:.1f} | {one['peak']:.0f} | {one['holds']:.0f} | "
                  f"{one['thousand']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
