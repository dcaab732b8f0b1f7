"""A server on a port of its own that answers as a test says, for what a weight sync asks of SGLang's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler, str], None]) -> Iterator[str]:
    """The address of a server whose every request `answer(handler, path)` takes."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            answer(self, self.path)

        do_GET = do_POST

        def log_message(self, *args):
            """Nothing on the console."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def asked(handler: BaseHTTPRequestHandler) -> dict:
    """The body of a request; {} of one without."""
    return json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or "{}")


def reply(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
