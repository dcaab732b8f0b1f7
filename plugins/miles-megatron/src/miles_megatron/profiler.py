"""--use-pytorch-profiler: a Chrome trace of each phase of the trainer, per rank, in the run directory.

    profile/rank-0-rollout-3-log_probs.json.gz      for https://ui.perfetto.dev or chrome://tracing

A phase is what the trainer does in one go: "log_probs", "ref_log_probs", "advantage", "step 0". Each has a trace of its
own, so no trace stays open between two calls of the trainer.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from miles_core.config.tables import RunConfig
from miles_core.record.directory import RunDirectory, publishing

_OFF = contextlib.nullcontext()


class Profiler:
    """Traces the phases that [debug] asks for; where it asks for none, a phase is a null context.

    Args:
        config: its debug.profile_* options say which rollouts and phases, its run_dir where to.
        rank: of this trainer, for the names of the files.
    """

    def __init__(self, config: RunConfig, rank: int = 0):
        debug = config.debug
        self._rollouts = range(debug.profile_step_start, debug.profile_step_end) if debug.use_pytorch_profiler else ()
        self._targets = frozenset(debug.profile_target)
        self._folder = RunDirectory(config.checkpoint.run_dir).profile
        self._rank, self._tracing = rank, False
        if self._rollouts:
            # Kineto logs each start and stop to stderr, in the middle of the live panel, at any level below this one.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    def phase(self, name: str, rollout_id: int) -> AbstractContextManager[None]:
        """Trace the block if this phase of this rollout is wanted; within another phase it is a range of that one.

        The trace is published when the block ends; a block that raises leaves none.

        Raises:
            RunDirectoryError: the trace cannot be written, or the disk is full.
        """
        if self._tracing:
            return record_function(name)
        return self._trace(name, rollout_id) if rollout_id in self._rollouts and self._wanted(name) else _OFF

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name a part of a phase in its trace; nothing outside a trace."""
        return record_function(name) if self._tracing else _OFF

    def _wanted(self, name: str) -> bool:
        target = "train_actor" if name.startswith("step") else "train_log_probs" if name.endswith("log_probs") else None
        return bool(self._targets & {"train_overall", target})

    @contextlib.contextmanager
    def _trace(self, name: str, rollout_id: int) -> Iterator[None]:
        file = f"rank-{self._rank}-rollout-{rollout_id}-{name.replace(' ', '-')}.json.gz"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._tracing = True
        try:
            with profile(activities=activities, record_shapes=True) as traced, record_function(name):
                yield
        finally:
            self._tracing = False
        self._folder.mkdir(parents=True, exist_ok=True)
        with publishing(self._folder / file) as packed, tempfile.NamedTemporaryFile(suffix=".json") as plain:
            traced.export_chrome_trace(plain.name)
            with open(plain.name, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
