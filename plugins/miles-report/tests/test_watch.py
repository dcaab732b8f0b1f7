"""miles watch serves one run's page to the person who asked, and nothing to anybody else."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from miles_report.watch import LIMITS, Server, Watched

from miles_core.errors import ConfigError, RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog

HOSTILE = "</script><img src=x onerror=alert(1)> \u2028 \ud800 __SCRIPT__"


@contextlib.contextmanager
def serving(path, **options):
    """(method="GET", target="/", **headers) -> (status, headers, body) of a server that watches `path`."""
    server = Server(Watched(path), **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(target="/", method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in headers.items():
            if value is not None:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    ask.server = server
    try:
        yield ask
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def data(ask, after=""):
    status, _, body = ask(f"/data?after={after}")
    assert status == 200, body
    return json.loads(body, parse_constant=pytest.fail)


def test_the_page_and_its_policy(run):
    with serving(run) as ask:
        status, headers, body = ask()
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
            assert policy[name] == "'none'"
        assert policy["script-src"].startswith("'sha256-") and policy["connect-src"] == "'self'"
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and "Access-Control-Allow-Origin" not in headers
        page = body.decode()
        assert not re.search(r"https?://|@import|url\(|innerHTML|document\.write|\beval\(", page)
        assert ask("/favicon.ico")[0] == 204


def test_only_who_names_this_host_is_answered(run):
    with serving(run) as ask:
        port = ask.server.server_address[1]
        # A tunnel has another port at its near end.
        for host in (f"127.0.0.1:{port}", "localhost", "LOCALHOST:9000", "127.0.0.1", f"[::1]:{port}", "127.1.2.3"):
            assert ask(Host=host)[0] == 200, host
        for host in (f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.1", "[",
                     "", None, "a@b@127.0.0.1", socket.gethostname() + ".evil.example"):
            for target in ("/", "/data", "/samples?name=rollout&rollout=3"):
                status, _, body = ask(target, Host=host)
                assert status == 403 and b"prompt" not in body, (host, target)


def test_no_other_site_gets_data(run):
    with serving(run) as ask:
        assert ask("/data", Sec_Fetch_Site="cross-site")[0] == 403
        assert ask("/samples?name=rollout&rollout=3", Sec_Fetch_Site="cross-site")[0] == 403
        assert ask("/", Sec_Fetch_Site="cross-site")[0] == 200, "a link somewhere may lead to the page"
        assert ask("/data", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW"])
def test_nothing_can_be_done_but_read(run, method):
    with serving(run) as ask:
        status, headers, _ = ask("/data", method)
        assert status in (405, 501) and "Access-Control-Allow-Origin" not in headers


def test_no_path_leads_to_another_file(run):
    (run.parent / "secret_000001.jsonl").write_text('{"prompt_uid": 1, "response": "secret"}\n')
    (run / "samples" / "hidden.txt").write_text("secret")
    with serving(run) as ask:
        for target in ("/../secret_000001.jsonl", "/%2e%2e/secret_000001.jsonl", "/plan.txt", "/events.jsonl",
                       "//etc/passwd", "/samples/rollout_000003.jsonl", "/data/..", "/samples", "/samples?name=hidden",
                       "/samples?name=../../secret&rollout=1", "/samples?name=..%2F..%2Fsecret&rollout=1",
                       "/samples?name=%2Fetc%2Fpasswd&rollout=0", "/samples?name=rollout&rollout=../59",
                       "/samples?name=rollout&rollout=000059", "/samples?name=rollout&rollout=99",
                       "/samples?name=rollout%00&rollout=59"):
            status, _, body = ask(target)
            assert status == 404 and b"secret" not in body and b"root:" not in body, target
        status, _, body = ask("/samples?name=rollout&rollout=59")
        found = json.loads(body)
        assert status == 200 and (found["name"], found["rollout"], len(found["samples"])) == ("rollout", 59, 64)


def test_what_is_new_is_added(run):
    text = (run / "events.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    begun = [json.loads(line)["event"] for line in lines].index("run_start", 1) + 1
    (run / "events.jsonl").write_bytes(b"".join(lines[:begun]))
    with serving(run) as ask:
        before = data(ask)
        assert "part" not in before and before["run"]["done"] == 36, "of the 39 the second start does three again"
        assert data(ask, before["after"])["curves"] == {}
        (run / "events.jsonl").write_bytes(b"".join(lines[:begun + 3]) + lines[begun + 3][:30])
        after = data(ask, before["after"])
        assert after["part"] and after["curves"]["rollout/raw_reward"]["x"] == [36] and after["run"]["done"] == 37
        assert len(json.dumps(after)) < len(json.dumps(before)) / 4 and "plan" not in after
        (run / "events.jsonl").write_bytes(text)
        whole, rest = data(ask), data(ask, after["after"])
        reward = [part["curves"]["rollout/raw_reward"]["y"] for part in (before, after, rest)]
        assert sum(reward, []) == whole["curves"]["rollout/raw_reward"]["y"] and len(sum(reward, [])) == 60
        lineage, offset = after["after"].split(".")
        for place in ("", "nonsense", "x.1", f"x.{offset}", f"{lineage}.{offset}9", f"{lineage}.7", "-1", ".-1",
                      f"{lineage}.{'9' * 9999}"):
            assert "part" not in data(ask, place), place


def test_a_run_that_is_not_there_yet_begins_ends_and_is_removed(tmp_path, make_run):
    path = tmp_path / "a" / "b"
    with serving(path) as ask:
        empty = data(ask)
        assert (empty["run"]["status"], empty["run"]["name"], empty["samples"]) == ("waiting", "b", [])
        assert ask()[0] == 200 and data(ask, empty["after"])["run"]["status"] == "waiting"
        with RunDirectory(path) as directory:
            assert data(ask)["run"]["status"] == "starting"
            log = EventLog(directory.events)
            log.run_start("0", {}, rollouts=2)
            log.append("metrics", 0, metrics={"rollout/raw_reward": 0.5})
            assert data(ask, empty["after"])["run"]["status"] == "running"
        killed = data(ask)["run"]
        assert (killed["status"], killed["done"]) == ("killed", 1)
        log.run_end("completed")
        assert data(ask)["run"]["status"] == "completed"
        directory.events.unlink()
        assert data(ask)["run"]["status"] == "waiting"
    (tmp_path / "plan.json").write_text("{}")
    with serving(tmp_path) as ask:
        assert data(ask)["run"]["status"] == "not started"


def test_a_damaged_line_is_told_and_what_came_before_it_is_shown(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.append("metrics", 0, metrics={"rollout/raw_reward": 0.5})
    with open(log.path, "ab") as file:
        file.write(b"{}\n")
    with serving(tmp_path) as ask:
        found = data(ask)
        assert "line 2 is damaged" in found["trouble"] and found["run"]["done"] == 1
        assert b"line 2 is damaged" in ask()[2]


def test_hostile_text_stays_text(tmp_path, make_run):
    run = make_run(tmp_path / "<b>bad", rollouts=3, resumed=None, end="failed", hostile=HOSTILE, width=2)
    with serving(run) as ask:
        page = ask()[2].decode()
        assert "<img" not in page and page.count("</script>") == 2 and "<b>" not in page
        status, headers, body = ask("/samples?name=rollout&rollout=0")
        assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(body)["samples"][0]["prompt"].endswith(HOSTILE)


def test_a_long_run_is_read_once_and_sent_thinned(tmp_path):
    with open(tmp_path / "events.jsonl", "w") as file:
        for at in range(10_000):
            metrics = {f"train/metric_{i}": at + i / 7 for i in range(20)} | {"perf/rollout_time": 1.0}
            file.write(json.dumps({"event": "metrics", "time": at, "rollout_id": at, "metrics": metrics}) + "\n")
    watched = Watched(tmp_path)
    first = watched.document()
    assert all(len(curve["x"]) <= 1.5 * LIMITS.points + 2 for curve in first["curves"].values())
    assert len(first["stages"]) <= LIMITS.bars and len(json.dumps(first)) < 1e6
    opened = time.thread_time()
    again = watched.document(first["after"])
    assert time.thread_time() - opened < 0.5 and len(json.dumps(again)) < 3000
    assert again["after"] == first["after"] and "part" in again


def test_samples_are_offered_newest_first_of_all_and_read_within_limits(tmp_path, make_sample, decode):
    import numpy as np

    from miles_core.record.samples import write_samples

    rng = np.random.default_rng(0)
    (tmp_path / "samples").mkdir()
    for rollout_id in range(120):
        write_samples(tmp_path, "rollout", rollout_id, [make_sample(rng, 0, 0, 0.5, 1)], decode)
    watched = Watched(tmp_path)
    offered = [file["rollout"] for file in watched.document()["samples"]]
    assert len(offered) == LIMITS.rollouts and offered[0] == 0 and offered[-24:] == list(range(96, 120))
    assert watched.samples("rollout", "119")["samples"] and watched.samples("rollout", "1") is None
    (tmp_path / "samples" / "rollout_000119.jsonl").unlink()
    assert watched.samples("rollout", "119") is None


def test_a_sample_file_that_comes_in_the_same_tick_as_another_is_offered(tmp_path):
    (tmp_path / "samples").mkdir()
    watched, now = Watched(tmp_path), time.time_ns() + 10**9
    for rollout_id in range(2):
        (tmp_path / "samples" / f"rollout_{rollout_id:06d}.jsonl").write_text("")
        os.utime(tmp_path / "samples", ns=(now, now))
        assert len(watched.document()["samples"]) == rollout_id + 1


def test_refusals(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="this is a file"):
        Watched(tmp_path / "file")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "events.jsonl")  # whoever opened it would wait for ever
    with pytest.raises(RunDirectoryError) as caught:
        Watched(tmp_path / "fifo")
    assert caught.value.code == "not-a-run-directory"
    with serving(tmp_path) as ask:
        port = ask.server.server_address[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen"):
            Server(Watched(tmp_path), port=port)
    with pytest.raises(ConfigError, match="cannot listen"):
        Server(Watched(tmp_path), host="no-such-host.invalid")


def test_a_record_that_cannot_be_read_ends_the_command_with_a_sentence(tmp_path):
    from click.testing import CliRunner
    from miles_report.commands.watch import watch

    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "run", tmp_path / "loop"):
        error = CliRunner().invoke(watch, [str(path)]).exception
        assert isinstance(error, RunDirectoryError) and error.code == "file-unreadable" and str(path) in error.who


def test_another_host_has_to_be_asked_for_and_may_be_named_by_its_address(run):
    with serving(run) as ask:
        assert ask.server.loopback
    with serving(run, host="0.0.0.0") as ask:
        assert not ask.server.loopback
        for host in ("192.168.0.1", "127.0.0.1", socket.gethostname(), "0.0.0.0:80"):
            assert ask(Host=host)[0] == 200, host
        assert ask(Host="evil.example")[0] == 403


@pytest.mark.parametrize("host, warns", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_ends_with_ctrl_c(run, host, warns):
    argv = [sys.executable, "-c", "from miles_core.cli import main; main()", "watch", str(run), "--host", host]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        found = re.search(r"Watching .*addition \(completed\) at http://([\d.]+):(\d+)/", line)
        assert found and found[1] == host
        connection = http.client.HTTPConnection("127.0.0.1", int(found[2]), timeout=10)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()  # and the connection is left open
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        connection.close()
    finally:
        process.kill()
    assert process.returncode == 0
    assert ("can read the prompts and answers" in errors) == warns and "Traceback" not in errors


def test_the_command_is_light_to_import():
    code = "import sys, miles_report.commands.watch; print({'numpy', 'torch', 'miles_core.record'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={"PYTHONPATH": ":".join(sys.path)})
    assert result.stdout.strip() == "set()"
