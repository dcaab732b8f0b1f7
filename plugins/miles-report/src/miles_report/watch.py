"""miles watch: the page of a run, served while the run goes on.

    /                   the page with its document
    /data?after=PLACE   the document, or what is to be added to the one that a page has
    /samples?name=..&rollout=..   one of the sample files that the document offers

What is served holds prompts and answers, so it stays on this machine, whose other users can read it: GET only, on
loopback unless told otherwise, for requests that name this host (a page elsewhere may let its own name lead here), and
to documents of this origin.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import parse_qs, urlsplit

from miles_core.errors import ConfigError, RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_report.page import render
from miles_report.page.document import Limits, addition, document, status_of
from miles_report.page.follow import Follower
from miles_report.page.history import History
from miles_report.page.samples import Item, chosen, excerpt, list_samples, surviving

LIMITS = Limits(rollouts=40, evals=24, samples=512, points=800, megabytes=4.0)
NEWEST = 24
"""Files of each name that are offered because they are new; the others are spread over the run."""
FAR = 1 << 20
"""Bytes of events up to which a page is told what is new; one that is further behind gets all of it, thinned."""
SETTLED = 2 * 10**9
"""Nanoseconds after which a folder's time tells of every file in it. The clock of a file system moves in ticks, and
what comes within the tick of a listing leaves the time as it was."""


class Watched:
    """A run that is looked at. It may not be there yet.

    Args:
        path: its folder.

    Raises:
        RunDirectoryError: this is a file, or its events.jsonl is a pipe, which would be waited for.
    """

    def __init__(self, path: str | os.PathLike[str], limits: Limits = LIMITS):
        self.run, self.limits, self._mutex = RunDirectory(path), limits, threading.Lock()
        if self.run.events.is_fifo() or self.run.path.exists() and not self.run.path.is_dir():
            RunDirectory.existing(path)
        self._follower = Follower(self.run.events)
        self._listed: tuple[object, list[Item]] = (None, [])

    def document(self, after: str = "") -> dict[str, object]:
        """What the page shows now.

        Args:
            after: "after" of the document that a page has; empty, or one that nothing can be added to, gives all.
        """
        with self._mutex:
            was_held, trouble = self.run.holder() is not None, None
            try:
                self._follower.advance()
            except RunDirectoryError as error:  # what came before the damage is shown
                trouble = str(error)
            history = self._follower.history
            status = status_of(self.run, history, was_held)
            if status == "not started" and not self.run.plan_json.is_file():
                status = "waiting"
            lineage, _, offset = after.rpartition(".")
            known = lineage == self._follower.lineage and offset.isdecimal() and len(offset) < 20
            events = self._follower.since(int(offset), FAR) if known else None
            if events is None:
                data = document(self.run, history, self.limits, status)
            else:
                later = History()
                for event in events:
                    later.take(event)
                data = addition(self.run, history, later, self.limits, status)
            data["samples"] = [{"name": name, "rollout": rollout_id, "stamp": stamp}
                               for (name, rollout_id, _), stamp in self._offered().items()]
            return {**data, "trouble": trouble, "after": f"{self._follower.lineage}.{self._follower.offset}"}

    def samples(self, name: str, rollout: str) -> dict[str, object] | None:
        """The samples of a file that is offered; None when there is no such one.

        Raises:
            RunDirectoryError: the file is damaged.
        """
        with self._mutex:
            offered = list(self._offered())
        item = next((item for item in offered if item[0] == name and str(item[1]) == rollout), None)
        try:
            return None if item is None else excerpt(item, self.limits)
        except FileNotFoundError:  # removed, with its run
            return None

    def _offered(self) -> dict[Item, int]:
        """The files that a page may ask for -> when they were written. Listed again only when something has changed."""
        try:
            seen, now = (self.run.samples.stat().st_mtime_ns, self._follower.lineage), time.time_ns()
            if seen != self._listed[0]:
                files = chosen(surviving(list_samples(self.run), self._follower.history), self.limits, NEWEST)
                stamps = {item: item[2].stat().st_mtime_ns // 1000 for item in files}
                self._listed = (seen if now - seen[0] > SETTLED else None, stamps)
        except FileNotFoundError:  # not written yet, or removed meanwhile
            self._listed = (None, {})
        return self._listed[1]


class Server(ThreadingHTTPServer):
    """Serves one run's page.

    Args:
        host, port: to listen at; port 0 takes a free one.

    Raises:
        ConfigError: it cannot listen on this address.
    """

    daemon_threads = True

    def __init__(self, watched: Watched, host: str = "127.0.0.1", port: int = 0):
        self.watched, self.host = watched, host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError("cannot listen on this address", got=getattr(error, "strerror", None) or error,
                              who=f"--host {host} --port {port}", code="watch-address-unusable",
                              fix="leave out --port to use a free one, and --host to listen on this machine "
                                  "only") from error
        self.loopback = ipaddress.ip_address(self.server_address[0]).is_loopback

    def server_bind(self) -> None:
        """Bind, and do not ask the name service what this host is called, as HTTPServer does."""
        TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def is_meant(self, host: str | None) -> bool:
        """Whether a request's Host is this one. The port is left out: a tunnel has another at its near end."""
        match = re.fullmatch(r"(\[[^]]+\]|[^]:@/]+)(:\d*)?", host or "")
        name = match[1].strip("[]").lower() if match else ""
        if name in ("localhost", self.host.lower()) or (not self.loopback and name == socket.gethostname().lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.loopback

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that goes away in mid-answer is no error; anything else is told by the answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds without a request, after which the connection is closed
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        origin = self.headers.get("Sec-Fetch-Site", "none")
        if not self.server.is_meant(self.headers.get("Host")) or (url.path != "/" and origin == "cross-site"):
            return self._error(403, "this is not the address of the page")
        try:
            if url.path == "/":
                return self._page()
            if url.path == "/data":
                return self._json(200, self.server.watched.document(query.get("after", "")))
            if url.path == "/samples":
                samples = self.server.watched.samples(query.get("name", ""), query.get("rollout", ""))
                return self._error(404, "no such file") if samples is None else self._json(200, samples)
            if url.path == "/favicon.ico":
                return self._answer(204, b"", "image/x-icon")
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the page says it, and asks again
            return self._error(500, str(error) if isinstance(error, RunDirectoryError) else repr(error))
        return self._error(404, "not found")

    def _refuse(self) -> None:
        self.close_connection = True  # what may come with it is not read
        self._error(405, "this page can only be read")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _page(self) -> None:
        data = self.server.watched.document()
        page, policy = render(f"{data['run']['name']} · Miles", data, live=True)
        self._answer(200, page.encode("utf-8", "backslashreplace"), "text/html; charset=utf-8",
                     f"{policy}; frame-ancestors 'none'")

    def _json(self, code: int, data: object) -> None:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        self._answer(code, text.encode("utf-8", "backslashreplace"), "application/json")

    def _error(self, code: int, what: str) -> None:
        self._json(code, {"error": what})

    def _answer(self, code: int, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            ("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff"),
                            ("Referrer-Policy", "no-referrer"), ("Cross-Origin-Resource-Policy", "same-origin")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "miles"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line in the terminal."""
