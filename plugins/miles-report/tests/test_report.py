"""The report: self-contained, deaf to hostile text, bounded, and there for runs in any state."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from miles_report.commands.doctor import doctor, fitted
from miles_report.commands.report import report
from miles_report.page import FOLDER, render
from miles_report.page.document import Limits
from miles_report.report import write_report

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog

HOSTILE = ("</script><img src=x onerror=alert(1)><!-- <script> https://example.com/x //cdn \u2028 \ud800 "
           "__DATA__ __TITLE__ __SCRIPT__")
POLICY = "Content-Security-Policy"
VOID = {"meta", "input", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """Parses strictly enough to see that elements close, and keeps what the tests ask for."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.scripts, self.references, self.attributes = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, attrs))
        self.references += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def data_of(path) -> tuple[dict, Page]:
    page = Page(path.read_text("utf-8"))
    assert len(page.scripts) == 2
    return json.loads(page.scripts[0], parse_constant=pytest.fail), page


def test_a_terminal_gets_the_doctors_lines_between_words_and_a_program_whole(monkeypatch):
    line = "  do     " + "free some space; " * 9
    assert fitted(line) == line
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    first, *others = fitted(line).splitlines()
    assert first.startswith("  do     free") and all(one.startswith(" " * 9 + "f") and len(one) <= 60 for one in others)


def test_other_runs_are_drawn_beside(run, tmp_path):
    with RunDirectory(tmp_path / "other") as directory:
        log = EventLog(directory.events)
        log.run_start("0", {})
        log.append("metrics", 0, metrics={"rollout/raw_reward": 0.5})
        log.close()
    path = write_report(run, tmp_path / "page.html", against=[tmp_path / "other"])
    assert data_of(path)[0]["against"] == [{"name": "other", "curves": {"rollout/raw_reward": {"x": [0], "y": [0.5]}}}]
    with pytest.raises(RunDirectoryError):
        write_report(run, against=[tmp_path / "none"])


def test_the_page_of_a_run(run):
    data, page = data_of(write_report(run))
    assert data["run"]["status"] == "completed" and data["run"]["done"] == data["run"]["total"] == 60
    assert [start["from"] for start in data["run"]["starts"]] == [0, 36]
    assert data["run"]["plan_hash"].startswith("9f2c") and data["run"]["versions"]["torch"] == "2.13.0"
    assert data["evals"] == ["eval/addition", "eval/carry"]
    curve = data["curves"]["rollout/raw_reward"]
    assert curve["x"] == list(range(60)) and len(curve["y"]) == 60
    assert data["curves"]["train/grad_norm"]["y"][41] is None
    assert data["against"] == []
    stages = set().union(*(bar["took"] for bar in data["stages"]))
    assert stages == {"rollout", "score", "train", "sync", "other"}
    assert [(bar["from"], bar["to"]) for bar in data["stages"]] == [(at, at) for at in range(60)]
    assert [reason for reason, _ in data["drops"]] == ["zero reward variance", "response too long"]
    assert any(entry["level"] == "warning" for entry in data["log"]) and data["syncs"]["version"] == 61
    assert "estimator        grpo" in data["plan"]
    assert [(hook["plugin"], hook["hook"], hook["calls"], round(hook["seconds"], 9)) for hook in data["hooks"]] == [
        ("tis", "token_weights", 120, 1.77), ("math-reward", "reward", 3840, 0.36)]
    assert data["hooks"][1]["share"] == pytest.approx(0.36 / sum(data["curves"]["perf/step_time"]["y"]), rel=1e-4)
    assert {file["name"] for file in data["samples"]} == {"rollout", "eval_addition"}


def test_no_reference_leaves_the_page(run):
    text = write_report(run).read_text()
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(|\bfetch\b|XMLHttpRequest|WebSocket", text)
    assert page.references == [] and not {"img", "link", "iframe", "object"} & set(page.tags)
    assert "innerHTML" not in text and "document.write" not in text and "default-src 'none'" in text


def test_the_policy_admits_the_script_of_the_page_and_no_other(run):
    page = Page(write_report(run).read_text())
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    policy = next(dict(attrs)["content"] for _, attrs in page.attributes if ("http-equiv", POLICY) in attrs)
    assert f"script-src 'sha256-{digest}';" in policy and "connect-src" not in policy
    assert "connect-src 'self'" in render("x", {}, live=True)[1]


def test_hostile_text_stays_text(tmp_path, make_run):
    run = make_run(tmp_path / "<b>bad&__DATA__", rollouts=6, resumed=None, end="failed", hostile=HOSTILE, width=2)
    path = write_report(run)
    data, page = data_of(path)
    template = Page((FOLDER / "page.html").read_text())
    assert page.tags == template.tags and page.references == []
    assert not re.search("https?://", path.read_text("utf-8"))
    assert data["samples"][0]["samples"][0]["prompt"].endswith(HOSTILE)
    assert HOSTILE in data["run"]["error"] and HOSTILE.split("\ud800")[0] in data["plan"]


@pytest.mark.parametrize("kwargs", [dict(rollouts=0), dict(rollouts=1, samples=False), dict(rollouts=3)])
def test_unfinished_runs_and_runs_without_samples(tmp_path, make_run, kwargs):
    run = make_run(tmp_path / "r", resumed=None, end=None, **kwargs)
    data, _ = data_of(write_report(run))
    assert data["run"]["status"] == "killed" and data["run"]["done"] == kwargs["rollouts"]
    with open(RunDirectory(run).events, "ab") as file:
        file.write(b'{"event": "metr')
    with RunDirectory(run):
        data, _ = data_of(write_report(run, tmp_path / "elsewhere.html"))
    assert data["run"]["status"] == "running"


def test_a_run_that_has_only_a_plan(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    data, _ = data_of(write_report(tmp_path))
    assert data["run"]["status"] == "not started"


def test_the_page_is_bounded_and_says_what_was_left_out(run):
    limits = Limits(rollouts=5, evals=3, samples=64, tokens=3, points=10, messages=4)
    data, _ = data_of(write_report(run, limits=limits))
    rollouts = [file["rollout"] for file in data["samples"] if file["name"] == "rollout"]
    assert rollouts == [0, 15, 30, 44, 59] and len(data["samples"]) == 8
    assert all(len(sample["pieces"]) <= 3 for file in data["samples"] for sample in file["samples"])
    whole = [[s["i"] for s in file["samples"]] for file in data["samples"] if file["name"] == "rollout"]
    assert all(indices == list(range(8)) for indices in whole), "whole groups"
    assert len(data["curves"]["rollout/raw_reward"]["x"]) <= 16
    notes = " ".join(data["notes"])
    for words in ("8 of 66 recorded", "64 of 368 samples", "responses are cut after 3 tokens", "older messages"):
        assert words in notes, words
    tiny, _ = data_of(write_report(run, limits=Limits(megabytes=0)))
    assert {len(file["samples"]) for file in tiny["samples"]} == {1}


def test_samples_that_a_resumed_run_has_yet_to_do_again_are_not_shown(tmp_path, make_run):
    run = make_run(tmp_path / "r", rollouts=8, resumed=5, width=1)
    for file in sorted((run / "samples").iterdir())[6:]:  # as if killed right after the second rollout's first
        os.utime(file, (1_759_999_000, 1_759_999_000))
    data, _ = data_of(write_report(run))
    assert [file["rollout"] for file in data["samples"]] == [0, 1, 2, 3, 4, 5]


def test_several_steps_of_a_rollout_are_all_there(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for value in (1.0, 2.0):
        log.append("metrics", 3, metrics={"train/loss": value})
    data, _ = data_of(write_report(tmp_path))
    assert data["curves"]["train/loss"] == {"x": [3, 3], "y": [1.0, 2.0]}


def test_the_command(run, tmp_path):
    result = CliRunner().invoke(report, [str(run), "-o", str(tmp_path / "x.html")])
    assert result.exit_code == 0 and "x.html" in result.output and (tmp_path / "x.html").is_file()
    result = CliRunner().invoke(report, [str(tmp_path / "none")])
    assert isinstance(result.exception, RunDirectoryError) and "--run-dir" in str(result.exception)
    blocked = CliRunner().invoke(report, [str(run), "-o", str(run / "plan.txt" / "x.html")])
    assert isinstance(blocked.exception, RunDirectoryError) and "-o FILE" in blocked.exception.fix


def test_a_dash_is_standard_output(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(report, [str(run), "-o", "-"])
    assert result.exit_code == 0 and result.output.startswith("<!doctype html>") and result.output.endswith("</html>\n")
    assert not (tmp_path / "-").exists()


def test_the_command_is_light_to_import():
    code = "import sys, miles_report.commands.report; print({'numpy', 'torch', 'miles_core.record'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={"PYTHONPATH": ":".join(sys.path)})
    assert result.stdout.strip() == "set()"


def test_what_a_log_says_does_not_steer_the_terminal_of_the_doctor(run):
    log = EventLog(run / "events.jsonl")
    log.append("run_end", None, status="failed", error="\x1b]0;title\x07", code="x")
    log.close()
    answer = CliRunner().invoke(doctor, [str(run)])
    assert "]0;title" in answer.output and not {"\x1b", "\x07"} & set(answer.output)
