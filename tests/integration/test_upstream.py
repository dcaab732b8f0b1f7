"""Example functions of Miles and slime, unmodified, in whole runs, where checkouts are given: nothing is fetched.

MILES_UPSTREAM names a folder with the checkouts radixark+miles and THUDM+slime; with MILES_UPSTREAM_RECORD=1 what came
of each example is written to upstream.json, and into the page.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from miles_testing.forked import miles

sys.path.insert(0, str(Path(__file__).parent))
import upstream

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-miles.md"
CHECKOUTS = os.environ.get("MILES_UPSTREAM")
RECORD = os.environ.get("MILES_UPSTREAM_RECORD")


class Search(BaseHTTPRequestHandler):
    """Answers every question with the same passage, as search-r1's retriever does."""

    def do_POST(self) -> None:
        body = json.dumps({"result": [[{"document": {"contents": "France\\nIts capital is Paris."}}]]}).encode()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def search():
    server = ThreadingHTTPServer(("127.0.0.1", 8000), Search)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def results():
    """What came of each example."""
    found: dict[str, str] = {}
    yield found
    if RECORD and found:
        checkouts = {name: Path(str(CHECKOUTS)) / name.replace("/", "+") for name in (upstream.MILES, upstream.SLIME)}
        commits = {name: (folder / "COMMIT").read_text().strip() if (folder / "COMMIT").is_file() else subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
            for name, folder in checkouts.items()}
        upstream.RESULTS.write_text(json.dumps({"commits": commits, "examples": found}, indent=1) + "\n")
        PAGE.write_text(upstream.page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def wide(tiny: Path, folder: Path) -> Path:
    """The tiny checkpoint with room for prompts that list tools."""
    shutil.copytree(tiny / "qwen3", folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "max_position_embeddings": 8192}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUTS is None, reason="MILES_UPSTREAM names no checkouts")
@pytest.mark.parametrize("example", upstream.EXAMPLES, ids=lambda one: one.id)
def test_an_example_runs_unmodified(example, run_file, tiny, tmp_path, results, request, monkeypatch):
    if any(importlib.util.find_spec(name) is None for name in example.needs):
        results[example.id] = f"not run: needs {', '.join(example.needs)}"
        pytest.skip(results[example.id])
    if example.search:
        request.getfixturevalue("search")
    checkout = Path(str(CHECKOUTS)) / example.repository.replace("/", "+")
    path = run_file()
    shutil.copytree(checkout / "examples", tmp_path / "examples")
    rows = [{"prompt": f"{i}+{i}=" if "--no-apply-chat-template" in example.flags else
             [{"role": "user", "content": f"{i}+{i}="}], "label": str(2 * i), **json.loads(example.row)}
            for i in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [str(tmp_path), *([str(tmp_path / example.folder)] if example.folder else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.syspath_prepend(folders[-1])
    outcome = miles(["run", path, "--no-live", "--run-dir", "runs/0", "--num-rollout", "2", "--prompt-data",
                     str(tmp_path / "rows.jsonl"), "--hf-checkpoint", str(wide(tiny, tmp_path / "model")),
                     "--max-tokens-per-gpu", "16384", *example.flags], tmp_path)  # fmt: skip
    results[example.id] = "runs" if outcome.code == 0 else reason(outcome.err)
    assert outcome.code == 0, outcome.err


def reason(error: str) -> str:
    """What stopped a run, in its first line."""
    line = next((line for line in error.splitlines() if line.startswith("Error: ")), error[-200:])
    return line.removeprefix("Error: ").partition(" Fix: ")[0].replace("|", "/")[:200]


def test_the_page_shows_what_ran():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- upstream examples -->") == 1
    assert page == upstream.page(page), "python tests/integration/upstream.py docs/coming-from-miles.md"
    results = json.loads(upstream.RESULTS.read_text(encoding="utf-8"))["examples"]
    assert set(results) == {one.id for one in upstream.EXAMPLES}
