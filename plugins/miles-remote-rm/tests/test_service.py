"""The client against a real server that fails in every way a server can."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from miles_remote_rm import service
from miles_remote_rm.plugin import RemoteRm, RemoteRmOptions
from miles_remote_rm.service import Service
from miles_testing.forked import miles

from miles_core.config.options import Origin
from miles_core.config.tables import Debug, Eval, Rollout, RunConfig
from miles_core.errors import ConfigError, RewardError
from miles_core.record.events import read
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Group, Prompt, Sample, Status

OK = b"HTTP/1.1 200 OK\r\n"


def said(body, status="200 OK"):
    """A whole HTTP answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


class Server:
    """Takes one connection after another; for each, the next of `acts` is called with (connection, request body).

    The last act goes on for ever. `bodies` are the documents that came, `most` how many were open at once.
    """

    def __init__(self, *acts):
        self._acts, self.bodies, self._open, self.most = list(acts), [], 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/score"
        self._over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        self._over.set()
        self._listener.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection):
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError), connection:  # the client may be gone when its run is
            while not self._over.is_set() and (body := self._request(connection)) is not None:
                self.bodies.append(body)
                act = self._acts.pop(0) if len(self._acts) > 1 else self._acts[0]
                self._open += 1
                self.most = max(self.most, self._open)
                try:
                    if act(connection, body, self._over) == "close":
                        return
                except OSError:
                    return
                finally:
                    self._open -= 1

    def _request(self, connection):
        """The document of the next request on this connection, None at its end."""
        data = b""
        try:
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return None
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:])
            while len(body) < length:
                body += connection.recv(65536)
        except OSError:
            return None
        return json.loads(body)


def answers(body, status="200 OK", after=0.0):
    def act(connection, _document, over):
        over.wait(after)
        connection.sendall(said(body, status))

    return act


def raw(data):
    """These bytes, and the end of the connection."""
    def act(connection, _document, _over):
        connection.sendall(data)
        return "close"

    return act


def hangs(connection, _document, over):
    over.wait(10)
    return "close"


def drips(connection, _document, over):
    """A well-formed answer, a byte each 20 ms: no single read ever takes long."""
    connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")
    return "close"


def resets(connection, _document, _over):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    return "close"


def breaks(connection, _document, _over):
    connection.sendall(OK + b"Content-Length: 50\r\n\r\n0.")
    return "close"


def pours(connection, _document, over):
    connection.sendall(OK + b"Content-Length: 100000000\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"1" * 65536)
    return "close"


@contextmanager
def serving(*acts):
    server = Server(*acts)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pauses that a test can wait for."""
    monkeypatch.setattr(service, "PAUSE", 0.01)


def config(*scorers, timeout=10.0, **more):
    return RunConfig(rollout=Rollout(rm_type=list(scorers or ("remote_rm",)), rm_timeout=timeout), **more)


def group():
    prompt = Prompt(3, 5, "3+4=", (1, 2, 3), "7", metadata={"level": 2})
    return Group(prompt, [Sample(prompt, i, text=f"answer {i}", status=Status.COMPLETED) for i in range(4)])


def score(server, scorer="remote_rm", timeout=10.0, **options):
    """The rewards that the core's reward stage makes of a group."""
    async def scored():
        plugin = RemoteRm(RemoteRmOptions(**{"rm_url": server.url, "rm_check": False} | options), config(scorer))
        call = plugin.one if scorer == "remote_rm" else plugin.group
        try:
            return await Scoring({scorer: call}, {scorer: 1.0}, weighted_sum, timeout)(group())
        finally:
            plugin.finish()

    return [sample.reward for sample in asyncio.run(scored()).samples]


@pytest.mark.parametrize("body", [0.25, {"reward": 0.25}, {"score": 0.25, "why": "close"}])
def test_a_number_comes_back_in_three_forms(body):
    with serving(answers(body)) as server:
        rewards = score(server)
    samples = group().samples
    assert rewards == [0.25] * len(samples)
    sent = sorted(server.bodies, key=lambda body: body["response"])
    assert sent == sorted(({"prompt": "3+4=", "response": s.text, "label": "7"} for s in samples),
                          key=lambda body: body["response"])


def test_metadata_is_sent_on_request():
    with serving(answers(1)) as server:
        score(server, rm_send_metadata=True)
    assert all(body["metadata"] == {"level": 2} for body in server.bodies)


@pytest.mark.parametrize("key", [None, "rewards", "scores"])
def test_a_group_is_one_request(key):
    values = [float(i) for i in range(4)]
    with serving(answers(values if key is None else {key: values})) as server:
        assert score(server, "remote_group_rm") == values
    assert [len(body["samples"]) for body in server.bodies] == [len(values)]
    assert server.bodies[0]["samples"][0] == {"prompt": "3+4=", "response": group().samples[0].text, "label": "7"}


@pytest.mark.parametrize("act", [resets, breaks, raw(b""), answers("busy", "502 Bad Gateway"),
                                 answers("busy", "503 Service Unavailable"), answers("busy", "504 Gateway Timeout")])
def test_what_another_attempt_may_mend_is_tried_again(act):
    with serving(act, act, answers(1.0)) as server:
        assert score(server, rm_concurrency=1) == [1.0] * 4
    assert len(server.bodies) == 4 + 2


@pytest.mark.parametrize("act, words", [
    (answers(b"it broke: \xff", "500 Internal Server Error"), "is a refusal (got HTTP 500: it broke"),
    (answers("who are you", "401 Unauthorized"), "is a refusal (got HTTP 401"),
    (answers(b"", "302 Found\r\nLocation: /elsewhere"), "is a refusal (got HTTP 302: an empty body"),
    (answers(b"<html>hello</html>"), "is not JSON (got HTTP 200: <html>hello</html>)"),
    (answers(b"[" * 100_000), "is not JSON"),
    (answers(b""), "is not JSON (got HTTP 200: an empty body)"),
    (answers(b"NaN"), "not finite (got HTTP 200: NaN)"),
    (answers(b'{"reward": -Infinity}'), "not finite"),
    (answers(b"1" * 400), "holds no number"),
    (answers({"value": 1}), 'holds no number (got HTTP 200: {"value": 1})'),
    (answers({"reward": None}), "holds no number"),
    (answers({"reward": "1"}), "holds no number"),
    (answers(True), "holds no number (got HTTP 200: true)"),
    (answers([1.0]), "holds no number"),
    (pours, "has more than 1048576 bytes (got HTTP 200: 111"),
    (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "is not HTTP"),
])
def test_anything_else_is_an_error_at_once_and_names_all(act, words):
    with serving(act) as server, pytest.raises(RewardError) as caught:
        score(server, rm_concurrency=1)
    text = str(caught.value)
    assert text.startswith(f"{server.url}: ") and "train prompt 3 (row 5), sample " in text and words in text
    assert len(text) < 700 and len(server.bodies) <= 4


@pytest.mark.parametrize("body, words", [
    ([1.0, 2.0], "is no list of"), ({"rewards": 1.0}, "is no list of"), ([None] * 4, "something else than finite"),
    ([1.0, True, 1.0, 1.0], "something else"), (b"[1, 1, 1, NaN]", "something else"),
])
def test_a_groups_answer_has_a_number_for_each_sample(body, words):
    with serving(answers(body)) as server, pytest.raises(RewardError) as caught:
        score(server, "remote_group_rm")
    assert words in str(caught.value) and "train prompt 3, all 4 samples" in str(caught.value)


@pytest.mark.parametrize("act", [hangs, drips])
def test_a_service_that_is_too_slow_is_named(act):
    begin = time.monotonic()
    with serving(act) as server, pytest.raises(RewardError) as caught:
        score(server, rm_request_timeout=0.3)
    assert 0.3 <= time.monotonic() - begin < 2
    assert caught.value.who == server.url and "train prompt 3 (row 5), sample" in str(caught.value)
    assert "within 0.3 s (got no answer to attempt 1)" in str(caught.value)


def test_waiting_for_a_turn_counts():
    async def late(url):
        asked = Service(url, timeout=0.3, connect_timeout=1.0, concurrency=1, retries=0)
        await asked._turns.acquire()  # by one that never ends
        try:
            await asked.ask({}, "two")
        finally:
            asked.close()

    with serving(hangs) as server, pytest.raises(RewardError) as caught:
        asyncio.run(late(server.url))
    assert "no reward for two within 0.3 s (got no turn yet: others are being asked)" in str(caught.value)
    assert not server.bodies


def test_attempts_end_and_the_last_failure_is_told():
    with serving(answers("no room", "503 Service Unavailable")) as server, pytest.raises(RewardError) as caught:
        score(server, "remote_group_rm", rm_retries=2)
    assert "in 3 attempts (got HTTP 503: \"no room\")" in str(caught.value) and len(server.bodies) == 3


def test_requests_under_way_are_bounded():
    with serving(answers(1.0, after=0.05)) as server:
        score(server, rm_concurrency=2)
    assert server.most == 2


def test_connections_are_kept_and_closed_in_the_end(recwarn):
    accepted = []

    def act(connection, _document, _over):
        accepted.append(connection.getpeername())
        connection.sendall(said(1.0))

    with serving(act) as server:
        score(server, rm_concurrency=1)
    assert len(accepted) == 4 and len(set(accepted)) == 1
    assert not [w for w in recwarn if "aiohttp" in str(w.message) or "nclosed" in str(w.message)]


def test_a_password_is_sent_and_not_shown():
    heads = []

    def act(connection, _document, _over):
        connection.sendall(said("no", "403 Forbidden"))

    with serving(act) as server, pytest.raises(RewardError) as caught:
        request = server._request
        server._request = lambda c: heads.append(c.recv(65536, socket.MSG_PEEK)) or request(c)
        score(server, rm_url=server.url.replace("//", "//me:secret@"))
    assert "secret" not in str(caught.value) and server.url in str(caught.value)
    assert b"authorization: basic" in heads[0].lower()


@pytest.mark.parametrize("url", [None, "", "localhost:8000", "ftp://h/x", "http://", "http://h:99999/", "http://[::1/",
                                 "http://h:x/", " http://h/", "http://h/#part"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT/PATH"):
        RemoteRm(RemoteRmOptions(rm_url=url, rm_check=False), config())


@pytest.mark.parametrize("options, words", [
    ({"rm_concurrency": 0}, "at least 1"), ({"rm_retries": -1}, "at least 0"),
    ({"rm_connect_timeout": 0.0}, "above 0"), ({"rm_request_timeout": 11.0}, "11 s of 10 s"),
    ({"rm_request_timeout": float("nan")}, "nan s"),
])
def test_numbers_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        RemoteRm(RemoteRmOptions(rm_url="http://127.0.0.1:9/", rm_check=False, **options), config())


def test_an_address_that_nobody_asks_is_refused():
    with pytest.raises(ConfigError, match="add remote_rm to --rm-type"):
        RemoteRm(RemoteRmOptions(rm_url="http://127.0.0.1:9/", rm_check=False), config("math"))


def test_nobody_there_is_found_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = RemoteRmOptions(rm_url=f"http://127.0.0.1:{port}/score")
    with pytest.raises(ConfigError, match=f"cannot be reached.*{port}|{port}.*cannot be reached"):
        RemoteRm(options, config())
    RemoteRm(options, config(debug=Debug(load_debug_rollout_data="{rollout_id}")))
    with serving(answers(1.0)) as server:
        RemoteRm(RemoteRmOptions(rm_url=server.url), config())
    assert not server.bodies


MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
RUN = ["run", "--no-live", "--hf-checkpoint", MODEL, "--prompt-data", MODEL.parent / "train.jsonl", "--input-key",
       "prompt", "--label-key", "label", "--apply-chat-template", "--num-rollout", "1", "--rollout-batch-size", "2",
       "--n-samples-per-prompt", "4", "--rollout-max-response-len", "4", "--no-bf16", "--threads", "1",
       "--debug-rollout-only", "--rm-type", "remote_rm"]


@pytest.mark.integration
def test_a_run_takes_its_rewards_from_the_service(tmp_path):
    """Miles's spelling enables the plugin: --rm-type remote_rm --rm-url URL."""
    with serving(answers({"reward": 0.75})) as server:
        outcome = miles([*RUN, "--rm-url", server.url, "--run-dir", "runs/a"], tmp_path)
    assert (outcome.code, outcome.err) == (0, "") and len(server.bodies) == 8
    assert all(set(body) == {"prompt", "response", "label"} and body["label"] for body in server.bodies)
    metrics = [event["metrics"] for event in read(tmp_path / "runs/a/events.jsonl") if event["event"] == "metrics"]
    assert metrics[0]["rollout/raw_reward"] == metrics[0]["rollout/reward/remote_rm"] == 0.75


@pytest.mark.integration
def test_a_service_that_fails_ends_the_run_with_one_sentence(tmp_path):
    with serving(answers(b"out of memory", "500 Internal Server Error")) as server:
        outcome = miles([*RUN, "--rm-url", server.url, "--run-dir", "runs/a"], tmp_path)
    assert outcome.code == 1 and "HTTP 500: out of memory" in outcome.err and server.url in outcome.err
    assert outcome.err.count("Error:") == 1 and "Traceback" not in outcome.err and "nclosed" not in outcome.err


@pytest.mark.parametrize(("stream", "reward"), [("train", 0.25), ("eval/sums", 0.75)])
def test_the_reward_keys_name_the_number(stream, reward):
    run = RunConfig(rollout=Rollout(rm_type=["remote_rm"], reward_key="soft"), eval=Eval(eval_reward_key="hard"),
                    origin={"rollout.reward_key": Origin("flag", "--reward-key")})
    one = Sample(Prompt(0, 0, "", (1,), stream=stream), 0)

    async def asked(url):
        plugin = RemoteRm(RemoteRmOptions(rm_url=url, rm_check=False), run)
        try:
            return await plugin.one(one)
        finally:
            plugin.finish()

    with serving(answers({"reward": 0.0, "soft": 0.25, "hard": 0.75})) as server:
        assert asyncio.run(asked(server.url)) == reward
