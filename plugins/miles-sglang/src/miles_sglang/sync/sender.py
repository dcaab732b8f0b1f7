"""What all senders to SGLang servers share: settings, looking at the servers, the last call that verifies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from miles_local.buckets import Cutter, Stream

from miles_sglang.server_extension.miles_stacks import cut
from miles_sglang.sync import verify
from miles_sglang.sync.servers import Reports, Target, describe, for_all, load

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sender has to know of the run.

    Args:
        limit: bytes of a bucket.
        timeout: seconds that one request to a server may take.
        source, target: dtype that the trainer's parameters have, and that they are sent in.
        tied: the checkpoint's output layer is its embedding.
        heads: heads of keys and values.
        layers: of the model, without those for multi-token prediction.
        checkpoint: the Hugging Face folder that the run started from.
    """

    limit: int
    timeout: float
    source: str
    target: str
    tied: bool
    heads: int
    layers: int
    checkpoint: str

    @classmethod
    def of(cls, config: RunConfig, limit: int | None = None) -> Settings:
        """From a run's configuration and its checkpoint's config.json; `limit` in place of the configured one."""
        constants = json.loads(Path(config.checkpoint.hf_checkpoint, "config.json").read_text(encoding="utf-8"))
        text = constants.get("text_config", constants)
        source = "bfloat16" if config.perf.bf16 else "float32"
        return cls(
            limit=limit or config.perf.update_weight_buffer_size, source=source,
            timeout=0.9 * config.perf.weight_sync_timeout,  # so that what is late is named before the sync itself is
            target=config.rollout.engine_dtype or source, checkpoint=config.checkpoint.hf_checkpoint,
            tied=bool(constants.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            heads=text.get("num_key_value_heads") or text["num_attention_heads"], layers=text["num_hidden_layers"],
        )  # fmt: skip

    def stream(self, weights: Stream, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The trainer's stream as an engine with these parameters needs it: a tied output layer that the engine keeps
        as a parameter of its own is sent, too; a bucket has room for two stacks, such as gate and up."""
        for name, tensor in weights:
            yield from cut(name, tensor, self.limit // 2)
            if self.tied and name == "model.embed_tokens.weight" and "lm_head.weight" in names:
                yield "lm_head.weight", tensor

    def cutter(self, **options) -> Cutter:
        """Into buckets of the engine's dtype."""
        return Cutter(self.limit, getattr(torch, self.source), getattr(torch, self.target), **options)


@dataclass(slots=True)
class Servers:
    """Targets of one sending process, looked at once; then verified after every transfer.

    Args:
        targets: in the order of the engines.
    """

    targets: Sequence[Target]
    settings: Settings
    reports: Reports = field(init=False)
    names: frozenset[str] = field(init=False)
    _info: dict[str, dict] = field(init=False)

    def __post_init__(self) -> None:
        self.reports = Reports(self.targets, self.settings.timeout)
        described = for_all(self.targets, lambda target: describe(self.reports, target, self.settings.timeout))
        self._info = {target.name: info for target, (info, _) in zip(self.targets, described, strict=True)}
        self.names = frozenset.union(*(names for _, names in described))

    def load(self, target: Target, packed: str | Sequence[str], sent: Callable[[], object] = lambda: None) -> None:
        """A bucket for one of them; see `servers.load`."""
        load(target, packed, timeout=self.settings.timeout, draft=self.drafts(target), sent=sent)

    def drafts(self, target: Target) -> bool:
        """Whether the server's draft model comes from the checkpoint that is trained, so that it is sent, too.

        A draft of several layers, one after the other, SGLang brings up to date from files alone.
        """
        info = self._info[target.name]
        drafts = info.get("speculative_algorithm") is not None and not info.get("enable_multi_layer_eagle")
        return drafts and info.get("speculative_draft_model_path") in (None, info.get("model_path"))

    def verify(self, ledger: verify.Ledger, requests: Sequence[dict] | None = None,
               under_way: Future | None = None) -> dict[str, float]:
        """Ask every rank of every server what it holds, and compare.

        Args:
            requests: those that went to the targets with their last bucket.
            under_way: that bucket, if the servers have not answered yet: what they hold they tell before.

        Returns:
            verify_s: seconds of the comparison, add_up_s: seconds that the slowest rank took before it.

        Raises:
            SyncError: a server that holds something else.
        """
        sent, timeout, begin = ledger.total(), self.settings.timeout, time.perf_counter()
        if requests is not None:
            answers = [self.reports.read(target, one, under_way)
                       for target, one in zip(self.targets, requests, strict=True)]
            begin = time.perf_counter()
        else:
            answers = for_all(self.targets, lambda target: self.reports.ask(target, timeout, **ledger.expectation()))
        for target, ranks in zip(self.targets, answers, strict=True):
            copies = max(1, target.size // self.settings.heads)
            random = self._info[target.name].get("load_format") == "dummy"
            verify.check(target.name, target.url, sent, ranks, layers=self.settings.layers, copies=copies,
                         random=random)
        return {"verify_s": time.perf_counter() - begin,
                "add_up_s": max(rank["seconds"] for ranks in answers for rank in ranks)}


class Meter:
    """Seconds of the parts of one sync, and its figures."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def figures(self, ledger: verify.Ledger, verified: dict[str, float]) -> dict[str, float]:
        """
        Args:
            verified: as `Servers.verify` returns it.
        """
        transfer = time.perf_counter() - self._begin - verified["verify_s"]
        return {"tensors": ledger.tensors, "bytes": ledger.bytes, "transfer_s": transfer,
                "gb_per_s": ledger.bytes / 1e9 / transfer, **verified}
