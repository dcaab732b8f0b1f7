"""The bundle: what others need to see of a run, as one file without secrets.

    doctor.txt, doctor.json   the answer of miles doctor
    plan.txt, plan.json       what the run was resolved to
    versions.json             versions of the run, its environment events, and what is installed where it was packed
    events.jsonl              metrics and everything else that happened, without texts of samples
    logs/...                  the first LINES lines of every log
    samples/...               only if asked for: the first and the last rollout
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from miles_core.record.directory import publishing
from miles_core.record.events import Kind
from miles_report.doctor.record import Record
from miles_report.doctor.redact import Redactor
from miles_report.doctor.rules import Diagnosis

LINES = 200
WIDTH, SIZE = 4000, 1 << 20
"""Characters of a line of a log, and of all its lines."""

SAMPLE = re.compile(r"^rollout \d+: .* -> |GenerateReqInput\(|EmbeddingReqInput\(|'output_ids':|\"output_ids\":")
"""Lines with the text of a sample: --debug-rollout-print-every, and SGLang's log of requests."""

LEFT_OUT = "(a line with a sample's text is left out)"


def write_bundle(run: Record, diagnosis: Diagnosis, path: str | os.PathLike[str], *, samples: bool = False,
                 redactor: Redactor | None = None) -> str:
    """Pack a run; whatever stood at `path` is replaced, whole or not at all. Returns a sentence about what is in it.

    Raises:
        RunDirectoryError: the file cannot be written, or the disk is full.
    """
    redactor = redactor or Redactor()
    redactor.learn(run.plan.get("options", {}))
    root = f"{run.directory.path.resolve().name}-doctor"
    names = []
    with publishing(path) as temporary, tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
        for name, text in _files(run, diagnosis, redactor, samples):
            data = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"{root}/{name}")  # no owner and no time: they tell of the machine
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
            names.append(name)
    shown = sum(name.startswith("samples/") for name in names)
    texts = (f"prompts and answers of {shown} rollouts are in it" if shown else
             "no samples are in it, though errors and logs may quote some")
    return f"{len(names)} files; secrets were taken out, and {texts}. Look into it before you send it"


def _files(run: Record, diagnosis: Diagnosis, redactor: Redactor, samples: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of everything in the bundle."""
    yield "doctor.txt", redactor.text("\n".join(diagnosis.text())) + "\n"
    yield "doctor.json", _json(redactor.value(diagnosis.to_json()))
    if run.plan:
        yield "plan.json", _json(redactor.value(run.plan))
    if run.directory.plan_text.is_file():
        yield "plan.txt", redactor.text(run.directory.plan_text.read_text("utf-8", "replace"))
    yield "versions.json", _json(redactor.value(_versions(run)))
    lines = (json.dumps(redactor.value(_without_texts(event)), ensure_ascii=False) for event in run.events)
    yield "events.jsonl", "".join(f"{line}\n" for line in lines)
    for path in run.logs():
        yield f"logs/{path.name}", redactor.text(_head(path))
    if samples and run.metrics:
        for rollout_id in sorted({min(run.metrics), max(run.metrics)}):
            lines = [json.dumps(redactor.value(sample), ensure_ascii=False) for sample in run.samples(rollout_id)]
            if lines:  # else its file is gone, or damaged
                yield f"samples/rollout_{rollout_id:06d}.jsonl", "".join(f"{line}\n" for line in lines)


def _versions(run: Record) -> dict[str, object]:
    return {
        "starts": [event.get("versions") for event in run.of(Kind.RUN_START)],
        "environment": [{"role": event.get("role"), "variables": event.get("variables")}
                        for event in run.of(Kind.ENVIRONMENT)],
        "packed with": {"python": platform.python_version(), "system": platform.platform(), **_installed()},
    }


def _installed() -> dict[str, str]:
    versions = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    return dict(sorted(versions.items()))


def _without_texts(event: dict) -> dict:
    plain = {key: value for key, value in event.items() if key != "line"}
    return {**plain, "text": LEFT_OUT} if SAMPLE.search(str(event.get("text", ""))) else plain


def _head(path: Path) -> str:
    """The first lines of a log."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:  # a progress bar's \r ends no line
        text = file.read(SIZE)
        lines = text.split("\n")
        more = len(lines) > LINES + 1 or bool(file.read(1))
    lines_shown = (LEFT_OUT if SAMPLE.search(line) else line if len(line) <= WIDTH else f"{line[:WIDTH]} ..."
            for line in lines[:LINES])
    return "\n".join(lines_shown) + (f"\n(the first {LINES} lines)\n" if more else "\n" * (len(lines) > LINES))


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
