"""A small server that is started as SGLang's is and speaks its wire: /health, /server_info, /classify and /generate.

Its score is the number of token ids it was given, its verdict the same in words. `--plan FILE` names a file of one word
for each request to come: an HTTP status, "garbage", "nan", "die", or "ok".
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--port", "--tp-size", "--random-seed", "--plan", "--asked"):
    parser.add_argument(flag)
for flag in ("--is-embedding", "--skip-server-warmup"):
    parser.add_argument(flag, action="store_true")
parsed = parser.parse_args()


def planned() -> str:
    """The word for this request, which is taken off the plan."""
    if parsed.plan is None or not (words := Path(parsed.plan).read_text().split()):
        return "ok"
    Path(parsed.plan).write_text(" ".join(words[1:]))
    return words[0]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say(200, {})

    def do_POST(self) -> None:
        body, word = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), planned()
        if parsed.asked:
            with open(parsed.asked, "a") as file:
                file.write(json.dumps({"path": self.path, **body}) + "\n")
        if word == "die":
            os._exit(3)
        if word.isdecimal():
            return self.say(int(word), {"error": word})
        if (self.path == "/classify") != parsed.is_embedding:
            return self.say(400, {"error": "another kind of model"})
        if self.path == "/generate":
            text = {"garbage": "I cannot say."}.get(word, f"Of 1 to 10: Score: {len(body['input_ids'])}")
            return self.say(200, {"text": text})
        value = float("nan") if word == "nan" else None
        answers = [{"embedding": [len(ids) if value is None else value, -1.0]} for ids in body["input_ids"]]
        return self.say(200, answers[1:] if word == "garbage" else answers)

    def say(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Nothing: the log is for what goes wrong."""


ThreadingHTTPServer((parsed.host, int(parsed.port)), Handler).serve_forever()
