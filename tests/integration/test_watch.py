"""miles watch in a real browser beside real runs: the page keeps up without a reload, and shows what the events say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from miles_report.report import write_report
from miles_testing.forked import miles

from miles_core.record.events import EventLog, read

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
WRONG = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
SECTIONS = ("tiles", "panels", "stack", "servers", "drops", "events", "plan-text")
"""What a live page, one loaded later and the report show alike; samples come in another order of files."""


class Page:
    """A tab of a headless Chromium, by way of the DevTools protocol over a pipe."""

    def __init__(self, binary: str, profile: Path):
        ours, theirs = os.pipe(), os.pipe()  # what we write, what it writes
        hand_over = f"exec 3<&{ours[0]} 4>&{theirs[1]}; exec \"$@\""
        argv = ["bash", "-c", hand_over, "-", binary, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}",
                "about:blank"]
        self._process = subprocess.Popen(argv, pass_fds=(ours[0], theirs[1]), stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb")
        self._answers: dict[int, dict] = {}
        self._news, self._count, self._session = threading.Condition(), 0, None
        self.events: list[dict] = []
        threading.Thread(target=self._listen, daemon=True).start()
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _listen(self) -> None:
        rest = b""
        while chunk := self._read.read1(1 << 16):
            *whole, rest = (rest + chunk).split(b"\0")
            with self._news:
                for message in map(json.loads, whole):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._news.notify_all()

    def call(self, method: str, **params: object) -> dict:
        self._count += 1
        number, to = self._count, {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps({"id": number, "method": method, "params": params, **to}).encode() + b"\0")
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, 60), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script: str):
        """What a JavaScript expression gives."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Go there, with nothing told of what was before."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && typeof D !== 'undefined'")

    def until(self, script: str, seconds: float = 60.0):
        """Wait for an expression to be true; return what it gives."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"{script} did not come true: {self.run('document.body.innerText')}"
            time.sleep(0.1)
        return found

    def shown(self) -> dict[str, str]:
        """The text of each section, and the lines and bars that are drawn."""
        return {name: self.run(f"$('{name}').innerText + [...$('{name}').querySelectorAll('path, rect')]"
                               ".map(e => e.outerHTML).join()") for name in SECTIONS}

    def clean(self) -> None:
        """Nothing went wrong, nothing popped up, and nothing was asked of another host than this one."""
        wrong = [event for event in self.events if event["method"] in WRONG]
        assert not wrong, wrong
        asked = {urlsplit(event["params"]["request"]["url"])[:2] for event in self.events
                 if event["method"] == "Network.requestWillBeSent"}
        assert {host.rpartition(":")[0] for scheme, host in asked if scheme == "http"} <= {"127.0.0.1"}, asked
        assert {scheme for scheme, _ in asked} <= {"http", "file"}, asked

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._write.close()
        self._read.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    """A tab. Where there is no Chromium the tests are skipped, but not in CI."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None and os.environ.get("CI"):
        pytest.fail("there is no Chromium: .ci/run installs one")
    if binary is None:
        pytest.skip(f"there is no Chromium here (looked for {', '.join(NAMES)})")
    tab = Page(binary, tmp_path_factory.mktemp("chromium"))
    yield tab
    tab.close()


@contextlib.contextmanager
def watching(run: Path) -> Iterator[str]:
    """The address at which the real command shows a run."""
    argv = [sys.executable, "-c", "from miles_core.cli import main; main()", "watch", str(run)]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(10) == 0, "it does not end with an interrupt (a shell's background jobs ignore it)"
            finally:
                process.kill()


def beside(call: Callable) -> threading.Thread:
    """Do it while the test goes on."""
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def agrees(page: Page, run: Path) -> None:
    """The page's figures are those of the events."""
    events = list(read(run / "events.jsonl"))
    curves: dict[str, list] = {}
    for event in events:
        for name, value in event["metrics"].items() if event["event"] in ("metrics", "eval") else ():
            curves.setdefault(name, []).append((event["rollout_id"], value))
    found = page.run("D.curves")
    assert found.keys() == curves.keys()
    for name, points in curves.items():
        assert found[name]["x"] == [x for x, _ in points], name
        assert found[name]["y"] == pytest.approx([y for _, y in points], rel=1e-5, abs=1e-12), name
    last = [event for event in events if event["event"] == "metrics"][-1]["metrics"]
    tile = "document.querySelector('[data-tile=\"{}\"] strong').innerText".format
    first, reward = (float(number) for number in page.run(tile("reward")).split(" → "))
    assert first == pytest.approx(curves["rollout/raw_reward"][0][1], abs=6e-4)
    assert reward == pytest.approx(last["rollout/raw_reward"], abs=6e-4)
    assert float(page.run(tile("response length"))) == pytest.approx(last["rollout/response_len/mean"], rel=1e-2)
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert page.run(tile("engine weights")) == f"v{syncs[-1]['version']}"
    drawn = page.run("document.querySelector('#panels .chart path').getAttribute('d')")
    assert len(re.findall("[ML]", drawn)) == len(curves["rollout/raw_reward"])
    beats = [event for event in events if event["event"] == "heartbeat"]
    assert page.run("D.queue.sampling.y") == [beat["sampling"] for beat in beats] and beats
    took = page.run("D.stages.map(bar => bar.took.rollout)")
    assert took == pytest.approx([value for _, value in curves["perf/rollout_time"]], abs=1e-3)


@pytest.mark.full
def test_a_run_that_is_killed_and_goes_on_is_followed_without_a_reload(page, run_file, tmp_path):
    file, run = run_file(), tmp_path / "runs/a"
    scorer = tmp_path / "digits.py"
    scorer.write_text(scorer.read_text().replace("        ids = ", "        time.sleep(0.05)\n        ids = ")
                      .replace("from miles_core", "import time\n\nfrom miles_core"))
    argv = ["run", file, "--no-live", "--run-dir", "runs/a", "--num-rollout", "24", "--max-lag", "1", "--save", "saved",
            "--load", "saved", "--save-interval", "3", "--heartbeat-interval", "0.2"]
    with watching(run) as url:
        page.open(url)
        page.until("$('status').textContent === 'waiting'")
        page.run("window.same = 'page'")

        def kill(process):
            page.until("D.run.done >= 4 && D.run.status === 'running'")
            assert page.run("document.querySelectorAll('#panels .chart:not([hidden]) path').length") > 5
            process.kill()

        assert miles(argv, tmp_path, while_running=kill).code == -signal.SIGKILL
        page.until("$('status').textContent === 'killed'")
        assert "it was killed" in page.run("$('head').innerText")
        done = page.run("D.run.done")
        again = beside(lambda: miles(argv, tmp_path))
        page.until("poll() && D.run.starts.length === 2")  # a page asks seldom after a run that was killed
        # What the killed start did from the checkpoint on is gone, until the second has done it again.
        assert [start["from"] for start in page.run("D.run.starts")][1] >= 3 and done >= 4
        page.until("$('status').textContent === 'completed'")
        again.join(60)
        page.until("D.run.done === 24 && S.file && S.file.rollout === 23")
        agrees(page, run)
        assert page.run("D.part && window.same") == "page", "it was never loaded again, and what is new was added"
        assert page.run("$('list').querySelectorAll('.row').length") == 16
        written = json.loads((run / "samples/rollout_000023.jsonl").read_text().splitlines()[0])
        assert page.run("document.querySelector('#detail .text:not(.prompt)').textContent") == \
            "".join(written["pieces"])
        live = page.shown()
        asked = len(page.events)
        time.sleep(1.5)
        assert len(page.events) == asked, "a run that is complete is not asked after"
        page.clean()

        page.open(url)
        assert page.shown() == live, "the page of a finished run is the one that was followed"
        agrees(page, run)
        page.clean()
    page.open(write_report(run).as_uri())
    assert page.shown() == live, "and so is its report"
    page.clean()


def test_text_of_a_run_is_never_markup(page, tmp_path):
    turn = "\u202e"  # what follows it in a line is read from the right
    hostile = f"</script><img src=x onerror=alert(1)><script>alert(2)</script> {turn}\u2028"
    run = tmp_path / "<img src=x onerror=alert(3)>"
    (run / "samples").mkdir(parents=True)
    log = EventLog(run / "events.jsonl")
    log.run_start(hostile, {hostile: hostile}, rollouts=1)
    log.append("metrics", 0, metrics={f"rollout/{hostile}": 1.0, "rollout/raw_reward": 1.0})
    log.append("eval", 0, metrics={f"eval/{hostile}": 1.0})
    log.append("drop", 0, reason=hostile, count=1)
    log.append("message", level="warning", text=hostile)
    log.append("engine_lost", engine=hostile, why=hostile, text=hostile)
    log.run_end("failed", hostile)
    sample = {"rollout_id": 0, "groups": 1, "prompt_uid": hostile, "row": hostile, "index": 0, "prompt": hostile,
              "response": hostile, "pieces": [hostile, "\n"], "token_ids": [1, 2], "log_probs": [-1.0, None],
              "loss_mask": [1, 0], "versions": [1, 2], "reward": 1.0, "rewards": {hostile: 1.0}, "label": hostile,
              "status": hostile, "advantage": 0.0}
    (run / "samples" / "rollout_000000.jsonl").write_text(json.dumps(sample) + "\n")
    (run / "plan.txt").write_text(hostile)
    with watching(run) as url:
        for address in (url, write_report(run, tmp_path / "report.html").as_uri()):
            page.open(address)
            page.run("$('every').open = true")
            page.until("$('detail').innerText.includes('alert(2)') && $('groups').innerText.includes('alert(1)')")
            assert page.run("document.querySelectorAll('img, main script, header script').length") == 0
            assert page.run("$('head').innerText + $('events').innerText").count("alert(2)") >= 3
            page.run("tip({clientX: 0, clientY: 0}, D.run.error)")
            assert turn not in page.run("document.body.innerText + $('tip').textContent")
            page.clean()


def test_keys_reach_what_a_pointer_does(page, tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.run_start("0", {}, rollouts=3)
    for rollout_id in range(3):
        log.append("metrics", rollout_id, metrics={"rollout/raw_reward": rollout_id / 4, "train/loss": 0.5})
    log.run_end("completed")
    page.open(write_report(tmp_path).as_uri())

    def keys():
        return page.run("[...document.querySelector('#panels .keys').children].map(key => key.textContent)")

    def press(key):
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=37)
        return keys()

    page.run("document.querySelector('#panels svg').focus()")
    assert press("ArrowLeft") == ["rollout 2", "rollout0.500"]
    assert press("ArrowLeft") == ["rollout 1", "rollout0.250"]
    assert "Reward: rollout 1" in page.run("document.activeElement.getAttribute('aria-label')")
    page.run("document.activeElement.blur()")
    assert keys() == ["rollout0.500"]
    for width in (1280, 400):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        assert page.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    page.call("Emulation.clearDeviceMetricsOverride")
    page.clean()
