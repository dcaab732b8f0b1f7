"""SGLang servers as a sender sees them: HTTP from any process, and the store that their ranks report to."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import pickle
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from miles_core.errors import SyncError
from miles_sglang.sync.releases import draft_fields, takes_sessions

logger = logging.getLogger(__name__)

LOADER = "miles_weights.load"
"""The load_format of our requests; the file is miles_sglang/server_extension/miles_weights.py."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is brought up to date.

    Args:
        engine: number of the engine; engine e has the GPUs e x size and those after it, in the order of placement.
        size: its GPUs, the ranks of its tensor parallelism.
        gpus: their CUDA device numbers; empty on a CPU.
    """

    name: str
    url: str
    engine: int = 0
    size: int = 1
    gpus: tuple[int, ...] = ()

    @classmethod
    def of(cls, server) -> Target:
        """From a Server of the engine."""
        seats = sorted(server.seats, key=lambda seat: seat.node)
        gpus = tuple(gpu for seat in seats for gpu in seat.gpus)
        return cls(server.name, server.url, seats[0].engine if seats else 0, server.size, gpus)


def post(target: Target, path: str, body: dict | None = None, *, timeout: float,
         sent: Callable[[], object] = lambda: None) -> dict:
    """POST JSON to a server; its answer, {} where that is no JSON. `sent` is called when the request is on its way.

    Raises:
        SyncError: names the server: no answer within `timeout` seconds, a lost connection, or what it said.
    """
    address = urllib.parse.urlsplit(target.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)
    try:
        with contextlib.closing(connection):
            connection.request("POST", f"/{path}", json.dumps(body or {}), {"Content-Type": "application/json"})
            sent()
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode(errors="replace")
    except TimeoutError:
        raise SyncError(f"{target.name} did not answer /{path} within {timeout:g} s", code="sync-request-timeout",
                        who=target.url, fix="look at the engine's log, or raise --weight-sync-timeout") from None
    except (OSError, http.client.HTTPException) as error:
        raise SyncError(f"the connection to {target.name} was lost in /{path}", code="sync-connection-lost",
                        who=target.url, got=f"{type(error).__name__}: {error}",
                        fix="look at the engine's log") from error
    try:
        reply = json.loads(text)
    except ValueError:
        reply = {}
    if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
        raise SyncError(f"{target.name} refused /{path}", who=target.url, got=text.strip()[:1000],
                        fix="look at the engine's log", code="sync-request-refused")
    return reply if isinstance(reply, dict) else {}


def get(target: Target, path: str, *, timeout: float) -> dict:
    """GET JSON of a server; errors as in `post`."""
    address = urllib.parse.urlsplit(target.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)
    try:
        with contextlib.closing(connection):
            connection.request("GET", f"/{path}")
            return json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SyncError(f"{target.name} did not answer /{path}", code="sync-no-answer", who=target.url,
                        got=f"{type(error).__name__}: {error}", fix="look at the engine's log") from error


def beside(work: Callable[[], Any]) -> Future:
    """Run work in a daemon thread: what hangs in there must not keep the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def for_all(targets: Sequence[Target], ask: Callable[[Target], Any]) -> list[Any]:
    """Ask all at once; the first error is raised when all have answered."""
    futures = [beside(lambda target=target: ask(target)) for target in targets]
    wait(futures)
    return [future.result() for future in futures]


def plain(plan: dict, flat: torch.Tensor | None = None) -> str:
    """A bucket as `update_weights_from_tensor` takes it, the bytes themselves included; an empty one without `flat`."""
    flat = torch.empty(0, dtype=torch.uint8) if flat is None else flat.to("cpu", copy=True)  # not all of its buffer
    return base64.b64encode(pickle.dumps([(json.dumps(plan), flat)])).decode()


def load(target: Target, packed: str | Sequence[str], *, timeout: float, draft: bool = False,
         sent: Callable[[], object] = lambda: None) -> None:
    """Hand a bucket to every rank of a server: the same to all, or one for each.

    The cache is not flushed here: SGLang ends itself when it cannot. Nor is the version set: only after the reports.

    Args:
        draft: a draft model for speculative decoding gets it, too.
        sent: see `post`.
    """
    each = [packed] * target.size if isinstance(packed, str) else list(packed)
    body = {"serialized_named_tensors": each, "load_format": LOADER, "flush_cache": False, **draft_fields(draft)}
    post(target, "update_weights_from_tensor", body, timeout=timeout, sent=sent)


def address_towards(host: str) -> str:
    """This machine's address on the way to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), 9))  # sends nothing
        return probe.getsockname()[0]


class Reports:
    """Where servers' ranks say what they hold: a key-value store of this process.

    Args:
        targets: who will report.
        timeout: seconds that a report may take once the server has answered.
    """

    def __init__(self, targets: Sequence[Target], timeout: float):
        addresses = sorted({address_towards(urllib.parse.urlsplit(target.url).hostname) for target in targets},
                           key=lambda address: address.startswith("127."))
        self.address = addresses[0]
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False,
                                    timeout=timedelta(seconds=timeout))
        self._timeout, self._number = timeout, 0

    def request(self) -> dict:
        """The `report` of a plan; the same one may go to several targets only if each gets its own key."""
        self._number += 1
        return {"store": self.store, "key": f"report/{self._number}"}

    @property
    def store(self) -> list:
        """Where the ranks find it."""
        return [self.address, self._store.port]

    def put(self, key: str, value: object) -> None:
        """For the ranks to get."""
        self._store.set(key, json.dumps(value))

    def read(self, target: Target, request: dict, under_way: Future | None = None) -> list[dict]:
        """What each rank of the target said before it answered the HTTP request that asked for it.

        Args:
            under_way: that request, if it may not have been answered yet; waited for as long as nothing is said.

        Raises:
            SyncError: a rank that could not load, or that said nothing; what the request itself raises.
        """
        reports = []
        for rank in range(target.size):
            try:
                reports.append(json.loads(self._said(f"{request['key']}/{rank}", under_way)))
            except dist.QueueEmptyError:
                raise SyncError(f"rank {rank} of {target.name} did not report what it loaded", who=target.url,
                                fix=f"the engine's hosts have to reach {self.address} at port {self._store.port}; "
                                "see the engine's log", code="sync-rank-silent") from None
        errors = [f"rank {i}: {one['error']}" for i, one in enumerate(reports) if one["error"]]
        if errors:
            raise SyncError(f"{target.name} could not load the weights", who=target.url, got="; ".join(errors[:3]),
                            fix="look at the engine's log; the engine stays paused", code="sync-load-failed")
        return reports

    def _said(self, key: str, under_way: Future | None) -> bytes:
        while True:
            answered = under_way is None or under_way.done()
            try:
                return self._store.queue_pop(key, block=False)
            except dist.QueueEmptyError:
                if answered:
                    if under_way is not None:
                        under_way.result()
                    raise
                time.sleep(1e-4)

    def ask(self, target: Target, timeout: float, plan: dict | None = None, **request: object) -> list[dict]:
        """Have a target report now; see miles_weights.load for what may be asked."""
        wanted = self.request()
        load(target, plain({**(plan or {}), "report": {**wanted, **request}}), timeout=timeout)
        return self.read(target, wanted)


def _open_session(target: Target, timeout: float) -> None:
    """Have a server take tensors, as long as it lives: no session of ours is ended, and a second one is refused.

    It is of drafts alone, with or without any: a session of the model would unpack its layers and pack them again, and
    miles_weights does so itself.
    """
    try:
        post(target, "begin_weight_update", {"selector": "draft"}, timeout=timeout)
    except SyncError as error:
        if "already open" not in str(error.got):
            raise


def describe(reports: Reports, target: Target, timeout: float) -> tuple[dict, frozenset[str]]:
    """What a server runs with (its ServerArgs) and the parameters of its model, before anything is sent.

    Raises:
        SyncError: it was started without our loader.
    """
    info = get(target, "server_info", timeout=timeout)
    if LOADER not in (info.get("custom_weight_loader") or []):
        raise SyncError(f"{target.name} was started without --custom-weight-loader {LOADER}",
                        code="weight-loader-missing", who=target.url,
                        fix="start it with that flag and PYTHONPATH=.../miles_sglang/server_extension")
    if takes_sessions(info):
        _open_session(target, timeout)
    answers = reports.ask(target, timeout, names_only=True)
    for reason in {answer.get("one_by_one") for answer in answers} - {None}:
        logger.info("weight_sync: %s loads experts one by one: %s", target.name, reason)
    return info, frozenset(name for answer in answers for name in answer["names"])
