"""The bundle of miles doctor has what a reader needs and no secret, wherever in a run one was planted."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from miles_report.doctor.bundle import LINES, write_bundle
from miles_report.doctor.record import Record
from miles_report.doctor.redact import GONE, Redactor, is_secret
from miles_report.doctor.rules import examine
from miles_testing.forked import miles

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "arithmetic"

SECRETS = ("hf_abcDEF1234567890abcdef", "sk-proj-abcdef0123456789", "hunter2hunter2", "Zm9vOmJhcg==", "s3cr3t-value-9",
           "ghp_0123456789abcdefghij", "AKIAABCDEFGHIJKLMNOP", "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln", "alice",
           "w4ndb-k3y", "p4ss:w0rd")

LOG = """$ python -m sglang.launch_server --api-key s3cr3t-value-9 --model-path /home/alice/models/q
HF_TOKEN=hf_abcDEF1234567890abcdef WANDB_API_KEY="w4ndb-k3y" OPENAI_API_KEY: 'sk-proj-abcdef0123456789'
Authorization: Bearer eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln
curl -H 'authorization: Basic Zm9vOmJhcg==' https://bob:hunter2hunter2@mirror.example/simple?token=s3cr3t-value-9&x=1
{"password": "p4ss:w0rd", "note": "{\\"api_key\\": \\"s3cr3t-value-9\\"}", "steps": 3}
cloned git+https://ghp_0123456789abcdefghij@github.com/x/y with AKIAABCDEFGHIJKLMNOP
#new-token: 8192, #cached-token: 0, token usage: 0.86
the variable from the environment was hunter2hunter2 and lay in /Users/alice/.netrc and /data/alice/cache
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A real run, with secrets in its flags, that prints its samples."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "run.toml").write_text(f'''
plugins = ["grpo", "math"]
[checkpoint]
hf_checkpoint = "{DATA}/tiny-qwen3"
[rollout]
prompt_data = "{DATA}/train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
num_rollout = 2
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 8
rm_type = ["math"]
rollout_stop = ["hf_abcDEF1234567890abcdef"]
[perf]
bf16 = false
[debug]
debug_rollout_print_every = 1
''')
    outcome = miles(["run", "run.toml", "--no-live", "--run-dir", "run"], folder)
    assert outcome.code == 0, outcome
    return folder / "run"


@pytest.fixture
def planted(real, tmp_path) -> Path:
    """A copy of it with secrets in logs, events and plan."""
    run = shutil.copytree(real, tmp_path / "run")
    (run / "logs" / "engine-0.log").write_text(LOG + "filler\n" * 500 + "the last line\n")
    plan = json.loads((run / "plan.json").read_text())
    plan["options"] |= {"tools.session_token": "s3cr3t-value-9", "tracker.api_key": "w4ndb-k3y",
                        "server.model_path": "/home/alice/models/q"}
    (run / "plan.json").write_text(json.dumps(plan))
    with open(run / "events.jsonl", "a") as file:
        for event in ({"event": "environment", "role": "engine", "variables": {"NCCL_AUTH_KEY": "s3cr3t-value-9",
                                                                               "NCCL_DEBUG": "INFO"}},
                      {"event": "message", "level": "warning", "text": "cannot reach https://bob:hunter2hunter2@host/"},
                      {"event": "run_end", "status": "failed", "error": f"tracker said no to {SECRETS[0]}"}):
            file.write(json.dumps({"time": 2e9, "rollout_id": None, **event}) + "\n")
    return run


def unpack(run: Path, path: Path, **options) -> dict[str, str]:
    """The files of a bundle, by their names in it."""
    record = Record.load(run)
    redactor = Redactor({"MIRROR_PASSWORD": "hunter2hunter2", "PATH": "/usr/bin"}, home="/home/alice", user="alice")
    write_bundle(record, examine(record), path, redactor=redactor, **options)
    with tarfile.open(path) as archive:
        assert all(entry.uname == entry.gname == "" and entry.mtime == 0 for entry in archive)
        return {entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive}


@pytest.mark.parametrize("samples", [False, True])
def test_no_planted_secret_is_in_it(planted, tmp_path, samples):
    files = unpack(planted, tmp_path / "b.tar.gz", samples=samples)
    found = [(secret, name) for name, text in files.items() for secret in SECRETS if secret in text]
    assert not found
    assert all(GONE in files[name] for name in ("plan.json", "events.jsonl", "doctor.txt", "logs/engine-0.log"))


def test_what_a_reader_needs_is_in_it(planted, tmp_path):
    files = unpack(planted, tmp_path / "b.tar.gz")
    assert set(files) == {"doctor.txt", "doctor.json", "plan.json", "plan.txt", "versions.json", "events.jsonl",
                          "logs/engine-0.log", "logs/run.log"}
    assert "tracker said no" in files["doctor.txt"]
    plan, versions = json.loads(files["plan.json"]), json.loads(files["versions.json"])
    assert plan["options"]["rollout.label_key"] == "label" and plan["options"]["perf.max_tokens_per_gpu"] is None
    assert versions["starts"][0]["torch"].startswith("2.") and versions["environment"][-1]["variables"] == {
        "NCCL_AUTH_KEY": GONE, "NCCL_DEBUG": "INFO"}
    assert {"torch", "python"} <= set(versions["packed with"])
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    real = [json.loads(line) for line in (planted / "events.jsonl").read_text().splitlines()]
    assert [one["metrics"] for one in events if one["event"] == "metrics"] == [
        one["metrics"] for one in real if one["event"] == "metrics"]
    engine = files["logs/engine-0.log"].splitlines()
    assert len(engine) == LINES + 1 and engine[-1] == f"(the first {LINES} lines)"
    assert "#new-token: 8192, #cached-token: 0, token usage: 0.86" in engine


def test_texts_of_samples_are_in_it_only_if_asked_for(planted, tmp_path):
    file = planted / "samples" / "rollout_000000.jsonl"
    texts = [json.loads(line) for line in file.read_text().splitlines()]
    words = [sample["response"] for sample in texts] + [texts[0]["prompt"].splitlines()[1]]  # such as 67+63=<|im_end|>

    def holders(files):
        return {name for name, text in files.items() if any(json.dumps(word)[1:-1] in text for word in words)}

    assert "rollout 0: " in (planted / "logs" / "run.log").read_text()  # --debug-rollout-print-every wrote one there
    assert not holders(unpack(planted, tmp_path / "without.tar.gz"))
    asked = holders(unpack(planted, tmp_path / "with.tar.gz", samples=True))
    assert "samples/rollout_000000.jsonl" in asked and all(name.startswith("samples/") for name in asked)
    shutil.rmtree(planted / "samples")
    assert "samples/rollout_000000.jsonl" not in unpack(planted, tmp_path / "gone.tar.gz", samples=True)


def test_the_command_writes_it_and_says_what_is_in_it(planted, tmp_path):
    done = miles(["doctor", planted, "--bundle", "x.tar.gz"], tmp_path)
    assert done.code == 1 and "no samples are in it" in done.err, done
    assert tarfile.is_tarfile(tmp_path / "x.tar.gz")
    assert miles(["doctor", planted, "--with-samples"], tmp_path).code == 2
    refused = miles(["doctor", planted, "--bundle", tmp_path / "nowhere" / "x.tar.gz"], tmp_path)
    assert refused.code == 2 and "Fix: " in refused.err


def test_it_does_not_claim_that_errors_and_logs_quote_no_sample(planted, tmp_path):
    with open(planted / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": 2e9, "rollout_id": None, "event": "run_end", "status": "failed",
                               "error": "scorer 'mine' failed (got ValueError: no number: 'the answer')"}) + "\n")
    done = miles(["doctor", planted, "--bundle", "x.tar.gz"], tmp_path)
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert b"the answer" in archive.extractfile("run-doctor/events.jsonl").read()
    assert "no answer" not in done.err and "may quote" in done.err


@pytest.mark.parametrize(("name", "secret"), [
    ("HF_TOKEN", True), ("MY_TOKENS", True), ("AWS_SECRET_ACCESS_KEY", True), ("DB_PASSWORD", True), ("api_key", True),
    ("apiKey", True), ("--api-key", True), ("sglang.api_key", True), ("session_token", True), ("client_secret", True),
    ("label_key", False), ("rollout.input_key", False), ("max_tokens_per_gpu", False), ("eos_token_id", False),
    ("rollout/raw_reward", False), ("monkey", False), ("tokenizer", False), ("OMP_NUM_THREADS", False),
])  # fmt: skip
def test_which_names_speak_of_a_secret(name, secret):
    assert is_secret(name) is secret


@pytest.mark.parametrize("url", [
    "https://b.s3.amazonaws.com/x?X-Amz-Credential=PL4NTED%2Fs3&X-Amz-Date=2026&X-Amz-Signature=PL4NTED",
    "https://a.blob.core.windows.net/c/x?sv=2024&se=2027&sig=PL4NTED%3D", "https://host/x?token=PL4NTED#part",
    "https://cdn/x?Expires=1&Signature=PL4NTED&Key-Pair-Id=K2", "s3://user:PL4NTED@host/x", "redis://:p@PL4NTED@host",
])  # fmt: skip
def test_a_url_loses_its_signature_and_its_password(url):
    redactor = Redactor({}, home="/", user="")
    assert "PL4NTED" not in redactor.text(f"fetching '{url}' failed") and "host" in redactor.text("http://host/?a=1")


def test_the_value_of_a_secret_option_is_taken_out_wherever_it_appears(planted, tmp_path):
    """Also where no name is beside it."""
    with open(planted / "logs" / "run.log", "a") as file:
        file.write("the tracker refused s3cr3t-value-9 twice, and w4ndb-k3y once\n")
    files = unpack(planted, tmp_path / "b.tar.gz")
    assert f"refused {GONE} twice, and {GONE} once" in files["logs/run.log"]


FORMS = ("export {}={}", "{}: {}", '{{"{}": "{}", "x": 1}}', "--{} {} --lr 1e-4", "({}='{}')", 'url?a=1&{}={}&b=2',
         "{}=\"{}\"", "\\\"{}\\\": \\\"{}\\\"")
NAMES = ("HF_TOKEN", "MIRROR_PASSWORD", "api_key", "client-secret", "auth_token", "apiKey", "WANDB_API_KEY")


@hypothesis.given(form=st.sampled_from(FORMS), name=st.sampled_from(NAMES),
                  value=st.from_regex(r"[A-Za-z][A-Za-z0-9+/_.=-]{7,40}", fullmatch=True),
                  before=st.sampled_from(["", "a line with words ", "--key ", "token ", "secret: x, "]))
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_value_of_a_secret_name_is_left(form, name, value, before):
    redactor = Redactor({}, home="/", user="")
    assert value not in redactor.text(before + form.format(name, value) + " and more")
    assert redactor.value({name: value, "note": form.format(name, value)}) == {
        name: GONE, "note": redactor.text(form.format(name, value))}


def test_taking_out_twice_changes_nothing_more():
    redactor = Redactor({}, home="/home/alice", user="alice")
    once = redactor.text(LOG)
    assert redactor.text(once) == once and "--model-path ~/models/q" in once
