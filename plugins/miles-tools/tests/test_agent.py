"""The generator "agent" with a real engine: agents that work, and agents that fail in every way."""

import asyncio
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from miles_local.engine import LocalEngine
from miles_testing.forked import miles
from miles_tools import agent_call
from miles_tools.agent import Agents, check, figures_of, reward_of
from miles_tools.agent_call import AgentFailed, load_function, result_of
from miles_tools.plugin import ToolsOptions

from miles_core import rng
from miles_core.columns import Columns
from miles_core.config.tables import Checkpoint, Rollout, RunConfig
from miles_core.errors import ConfigError, EngineError, RewardError, RolloutError
from miles_core.record.events import read
from miles_core.stages.rollout import Generation, SamplingParams
from miles_core.types import CancelHandle, Prompt, Sample, Status

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "arithmetic" / "tiny-qwen3"
USER = {"role": "user", "content": "3+4="}
ASK = '''
import asyncio, json, os, sys, threading, time, urllib.error, urllib.request

def ask(base_url, api_key, messages, **more):
    """The next message of the conversation."""
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"messages": messages} | more).encode(),
                                     {"Authorization": "Bearer " + api_key})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        error.close()
        raise
'''


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Whoever does not end when asked to is not waited for."""
    monkeypatch.setattr(agent_call, "GRACE", 0.5)


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def config(**rollout):
    return RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(MODEL)), rollout=Rollout(**{
        "generate": "agent", "apply_chat_template": True, "rollout_max_context_len": 256} | rollout))


def samples_of(options, *, samples=2, during=None, spoil=lambda engine: None, stream="train", begun=(), recall=None,
               **rollout):
    """The group that these options sample with a real engine."""
    async def sampled():
        engine = LocalEngine(MODEL, tokenizer=tokenizer(), max_context=256)
        await engine.start()
        agents = Agents(options, config(**rollout))
        ids = tokenizer().apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
        prompt = Prompt(3, 5, "", tuple(ids), "7", {"level": 2}, (USER,), stream)
        generation = Generation(
            engine, SamplingParams(max_new_tokens=128), samples, lambda i, turn: rng.key(7, stream, 3, i, turn),
            lambda ids, skip: tokenizer().decode(list(ids), skip_special_tokens=skip), timeout=20.0,
            begun=begun, recall=recall or CancelHandle())
        spoil(engine)
        try:
            going = asyncio.ensure_future(agents.generate(prompt, generation))
            if during is not None:
                await during(agents, going)
            return await going
        finally:
            agents.stop()
            await engine.stop()

    return asyncio.run(sampled())


@pytest.fixture
def function(tmp_path):
    """(source, **options) -> the options of an agent that is the function `agent` of this source."""
    def write(source, **options):
        path = tmp_path / f"agent{len(list(tmp_path.iterdir()))}.py"
        path.write_text(ASK + source)
        return ToolsOptions(agent=f"{path}:agent", **options)

    return write


@pytest.fixture
def program(tmp_path):
    """(source, **options) -> the options of an agent that is a program of this source."""
    def write(source, **options):
        path = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        where = "base_url, api_key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"
        path.write_text(ASK + where + source)
        return ToolsOptions(agent_command=[sys.executable, str(path)], **options)

    return write


TALK = "messages.append(ask(base_url, api_key, messages)); messages.append({'role': 'user', 'content': 'sure?'}); "
FUNCTIONS = {
    "plain": f"def agent(base_url, api_key, messages, metadata, label):\n    {TALK}ask(base_url, api_key, messages)\n"
             "    return {'reward': 0.5, 'level': metadata['level'] + int(label)}",
    "coroutine": f"async def agent(base_url, api_key, messages, metadata, label):\n    {TALK}"
                 "await asyncio.to_thread(ask, base_url, api_key, messages)\n"
                 "    return {'reward': 0.5, 'level': metadata['level'] + int(label)}",
    "blocking coroutine": f"async def agent(**task):\n    base_url, api_key = task['base_url'], task['api_key']\n"
                          f"    messages = task['messages']\n    {TALK}ask(base_url, api_key, messages)\n"
                          "    return {'reward': 0.5, 'level': 9}",
}


def same_figures(group):
    for index, sample in enumerate(group):
        assert (sample.status, sample.index, sample.reward) == (Status.COMPLETED, index, 0.5)
        assert sample.rewards == {"agent": 0.5} and reward_of(sample) == 0.5
        figures = sample.metadata["figures"]
        assert figures["agent/turns"] == 2 and figures["agent/level"] == 9 and "agent/reward" not in figures
        assert 0 < figures["agent/own_time"] < figures["agent/time"] < 20
        assert 0 < sample.columns["loss_mask"].sum() < sample.response_length
        assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant"] * 2
        Columns().check(sample)
    return [sample.tokens.tolist() for sample in group]


def test_functions_and_programs_are_agents_alike(function, program):
    """Each kind of agent has the same conversation, and its tokens are drawn by the keys of sample and turn alone."""
    found = [same_figures(samples_of(function(source))) for source in FUNCTIONS.values()]
    found.append(same_figures(samples_of(program(
        f"given = json.load(sys.stdin); messages = given['messages']\n{TALK}ask(base_url, api_key, messages)\n"
        "level = given['metadata']['level'] + int(given['label'])\n"
        "print('done'); print(json.dumps({'reward': 0.5, 'level': level}))"))))
    assert found[0][0] != found[0][1] and all(one == found[0] for one in found)


def test_agents_that_run_at_once_are_bounded(function):
    source = ("open_now, most = [], []\ndef agent(base_url, api_key, messages):\n    open_now.append(1)\n"
              "    most.append(len(open_now))\n    ask(base_url, api_key, messages)\n    time.sleep(0.05)\n"
              "    open_now.pop()\n    return {'reward': 1, 'most': max(most)}")
    group = samples_of(function(source, agent_concurrency=2), samples=6)
    assert max(sample.metadata["figures"]["agent/most"] for sample in group) == 2


REWRITE = ("def agent(base_url, api_key, messages):\n    messages.append(ask(base_url, api_key, messages))\n"
           "    messages[-1]['content'] = 'as if'\n    messages.append({'role': 'user', 'content': 'sure?'})\n"
           "    try:\n        ask(base_url, api_key, messages)\n    except Exception:\n        return 1.0")


@pytest.mark.parametrize("source, reason, words", [
    ("def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    raise ValueError('no luck')",
     "agent_raised", "ValueError: no luck"),
    ("async def agent(base_url):\n    raise asyncio.CancelledError()", "agent_raised", "CancelledError"),
    ("def agent():\n    sys.exit(3)", "agent_raised", "SystemExit: 3"),
    ("def agent():\n    return 1.0", "agent_never_called", "without an answer of the model"),
    (REWRITE, "agent_rewrote_history", "messages[1] is not the answer that was given"),
    ("def agent(base_url, messages):\n    ask(base_url, 'stolen', messages)", "agent_raised", "401"),
    ("def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    return float('nan')",
     "agent_bad_result", "nan"),
    ("def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    return {'reward': 'high'}",
     "agent_bad_result", "high"),
    ("def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    return 10**400",
     "agent_bad_result", "000"),
    ("class Odd(Exception):\n    def __str__(self):\n        sys.exit(1)\ndef agent():\n    raise Odd", "agent_raised",
     "Odd"),
    ("def agent():\n    raise ValueError('\\ud800 no')", "agent_raised", "? no"),
    ("def agent(base_url, api_key, messages):\n    messages[0]['content'] += '\\ud800'\n"
     "    ask(base_url, api_key, messages)", "agent_raised", "400"),
    ("def agent(base_url, api_key, messages):\n    for _ in range(900):\n        messages[0]['x'] = {'x': "
     "messages[0].get('x')}\n    ask(base_url, api_key, messages)", "agent_raised", "400"),
])
def test_an_agent_that_fails_is_a_drop_with_a_reason(function, source, reason, words):
    failed(samples_of(function(source)), reason, words)


def failed(group, reason, words):
    for sample in group:
        assert sample.status is Status.FAILED and sample.reward is None and not sample.rewards
        assert sample.response_length == 0 and sample.tokens.tolist() == list(sample.prompt.token_ids)
        drop = sample.metadata["drop"]
        assert drop["reason"] == reason and words in drop["detail"] and sample.name in drop["detail"]
        Columns().check(sample)


@pytest.mark.parametrize("source", [
    "def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    time.sleep(8)",
    "async def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    await asyncio.sleep(60)",
    "async def agent():\n    while True:\n        try:\n            await asyncio.sleep(1)\n"
    "        except asyncio.CancelledError:\n            time.sleep(1)\n            break",
])
def test_a_function_that_hangs_is_given_up(function, source):
    begin = time.monotonic()
    group = samples_of(function(source, agent_timeout=0.6))
    assert time.monotonic() - begin < 6
    failed(group, "agent_timeout", "longer than 0.6 s")


def test_an_agent_is_not_charged_for_a_loop_that_is_blocked(function):
    """Nobody answers it meanwhile."""
    async def block(_agents, going):
        await asyncio.sleep(0.1)
        time.sleep(1.5)

    source = "def agent(base_url, api_key, messages):\n    time.sleep(0.3)\n    ask(base_url, api_key, messages)"
    (sample,) = samples_of(function(source, agent_timeout=1.0), samples=1, during=block)
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize("ends", [0, 1])
def test_agents_that_all_hang_end_the_run(function, monkeypatch, ends):
    """One group after the other would be given up, each after its time."""
    monkeypatch.setattr("miles_tools.agent.HUNG", 3)
    source = f"import itertools\nn = itertools.count()\ndef agent():\n    time.sleep(0 if next(n) < {ends} else 60)"
    options = function(source, agent_timeout=0.4, agent_concurrency=1)
    if ends:
        assert len(samples_of(options, samples=4)) == 4
        return
    with pytest.raises(RolloutError) as caught:
        samples_of(options, samples=4)
    assert caught.value.code == "agents-hang" and options.agent in str(caught.value)


def test_a_function_that_was_given_up_cannot_go_on(function):
    source = ("said, given_up = [], threading.Event()\ndef agent(base_url, api_key, messages):\n"
              "    given_up.wait(60)\n    try:\n        ask(base_url, api_key, messages)\n"
              "        said.append(200)\n    except Exception as error:\n        said.append(error.code)")
    options = function(source, agent_timeout=0.2)
    there = load_function(options.agent).__globals__

    async def wait(_agents, going):
        await asyncio.wait({going})
        there["given_up"].set()
        async with asyncio.timeout(20):
            while not there["said"]:
                await asyncio.sleep(0.01)

    failed(samples_of(options, samples=1, during=wait), "agent_timeout", "")
    assert there["said"] == [401]


def ends(path):
    """Whether the process of this id is gone soon, or waits for nothing but its parent."""
    stat = Path(f"/proc/{int(path.read_text())}/stat")
    for _ in range(1000):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


TELLS = "pid = os.fork() or os._exit(0 * time.sleep(60))\nopen({path!r}, 'w').write(str(pid))\n"


@pytest.mark.parametrize("source, reason, words", [
    ("sys.exit('no luck')", "agent_exit", "code 1: no luck"),
    ("os.kill(os.getpid(), 11)", "agent_exit", "code -11"),
    ("os._exit(0)", "agent_never_called", ""),
    ("print('x' * 10**7, file=sys.stderr); sys.exit(2)", "agent_exit", "code 2: xxx"),
])
def test_a_program_that_crashes_is_a_drop_with_a_reason(program, source, reason, words):
    failed(samples_of(program(source)), reason, words)


def test_a_program_that_is_not_there():
    failed(samples_of(ToolsOptions(agent_command=["/no/such/program"])), "agent_not_started", "No such file")


def test_words_of_a_command_never_meet_a_shell(tmp_path):
    words = ["$(touch hit)", "; touch hit", "*", "it's"]
    options = ToolsOptions(agent_command=[sys.executable, "-c", "import sys; sys.exit(repr(sys.argv[1:]))", *words])
    failed(samples_of(options, samples=1), "agent_exit", repr(words))
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("then, reason, words", [
    ("ask(base_url, api_key, json.load(sys.stdin)['messages'])\nprint('{\"reward\": 1}')", None, ""),
    ("sys.exit('no luck')", "agent_exit", "no luck"),
    ("time.sleep(60)", "agent_timeout", ""),
    ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "agent_timeout", ""),
])
def test_what_a_program_forks_ends_with_it(program, tmp_path, then, reason, words):
    """A child that keeps the pipes open holds nobody up, however the program ends."""
    path = tmp_path / "pid"
    begin = time.monotonic()
    limit = 5.0 if reason == "agent_timeout" else 20.0
    group = samples_of(program(TELLS.format(path=str(path)) + then, agent_timeout=limit), samples=1)
    assert time.monotonic() - begin < 40
    assert ends(path)
    if reason is None:
        assert group[0].reward == 1.0 and group[0].status is Status.COMPLETED
    else:
        failed(group, reason, words)


def test_a_child_that_leaves_the_process_group_holds_nobody_up(program, tmp_path):
    path = tmp_path / "pid"
    source = (f"pid = os.fork()\nif not pid:\n    os.setsid()\n    open({str(path)!r}, 'w').write(str(os.getpid()))\n"
              f"    time.sleep(60)\n    os._exit(0)\nwhile not os.path.exists({str(path)!r}):\n    time.sleep(0.01)\n"
              "ask(base_url, api_key, json.load(sys.stdin)['messages'])\nprint('{\"reward\": 1}')")
    begin = time.monotonic()
    group = samples_of(program(source), samples=1)
    assert time.monotonic() - begin < 40 and group[0].reward == 1.0
    os.kill(int(path.read_text()), 9)


def test_a_run_that_ends_takes_its_agents_along(program, tmp_path):
    path = tmp_path / "pid"
    options = program(f"open({str(path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")

    async def cancel(agents, going):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
        going.cancel()
        await asyncio.wait({going}, timeout=5)
        assert going.done() and not agents._server._sessions

    with pytest.raises(asyncio.CancelledError):
        samples_of(options, samples=1, during=cancel)
    assert ends(path)


def test_a_group_that_is_called_back_ends_its_agents(function):
    recall = CancelHandle()

    async def call_back(_agents, _going):
        await asyncio.sleep(0.3)
        recall.cancelled = True

    begin = time.monotonic()
    group = samples_of(function("async def agent(base_url):\n    await asyncio.sleep(60)"), recall=recall,
                       during=call_back)
    assert time.monotonic() - begin < 5 and {sample.status for sample in group} == {Status.ABORTED}


def test_samples_that_were_finished_before_a_recall_stay(function):
    done = Sample(Prompt(3, 5, "", (1,)), 0, status=Status.COMPLETED, reward=1.0)
    torn = Sample(Prompt(3, 5, "", (1,)), 1, status=Status.ABORTED)
    options = function("def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n    return 1")
    group = samples_of(options, begun=(done, torn))
    assert group[0] is done and group[1] is not torn and group[1].status is Status.COMPLETED


def test_an_engine_that_fails_ends_the_run_and_not_the_sample(function):
    def spoil(engine):
        async def generate(_request):
            raise EngineError("the engine burns")

        engine.generate = generate

    source = "def agent(base_url, api_key, messages):\n    try:\n        ask(base_url, api_key, messages)\n" \
             "    except Exception:\n        time.sleep(1)\n        return 0.0"
    with pytest.raises(EngineError, match="the engine burns"):
        samples_of(function(source), spoil=spoil)


OUT = ("def agent(base_url, api_key, messages):\n    while True:\n"
       "        messages.append(ask(base_url, api_key, messages))\n"
       "        messages.append({'role': 'user', 'content': 'and then?' * 6})")


def test_out_of_context_is_truncated_where_others_score(function):
    group = samples_of(function(OUT), rm_type=["math"])
    for sample in group:
        assert sample.status is Status.TRUNCATED and sample.reward is None
        assert sample.metadata["figures"]["agent/turns"] > 1 and sample.response_length <= 128
    failed(samples_of(function(OUT)), "agent_out_of_context", "the agent gave no reward")


@pytest.mark.parametrize(("told", "status"), [("True", Status.TRUNCATED), ("0", Status.COMPLETED)])
def test_an_agent_that_ends_at_a_limit_of_its_own_says_so(function, told, status):
    says = "def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n"
    group = samples_of(function(says + f"    return {{'reward': 0.5, 'truncated': {told}}}"))
    assert [(sample.status, sample.reward) for sample in group] == [(status, 0.5)] * 2


def test_who_rewards(function):
    says = "def agent(base_url, api_key, messages):\n    ask(base_url, api_key, messages)\n"
    assert [s.reward for s in samples_of(function(says + "    return 2"), rm_type=["agent", "math"])] == [2.0, 2.0]
    with pytest.raises(RewardError, match="add agent to --rm-type"):
        samples_of(function(says + "    return 2"), rm_type=["math"])
    silent = samples_of(function(says), rm_type=["math"])
    assert [sample.reward for sample in silent] == [None, None]
    with pytest.raises(RewardError, match="let the agent return one"):
        reward_of(silent[0])


def test_in_an_evaluation_a_failure_is_no_answer_either(function):
    (sample, *_) = samples_of(function("def agent():\n    raise ValueError('no luck')"), stream="eval/sums")
    assert sample.status is Status.FAILED and "no luck" in sample.metadata["drop"]["detail"]


@pytest.mark.parametrize("output, result", [
    ("", None), ("hello\n", None), ('log\n{"reward": 1}\n', {"reward": 1}), ('{"reward": 1}\nlog', None), ("[1]", None),
    ("[" * 10**5, None),
])
def test_the_result_of_a_program_is_its_last_line(output, result):
    assert result_of(output) == result


class Wild:
    """A number that is none, and cannot be shown."""

    def __float__(self):
        raise KeyError

    def __repr__(self):
        raise KeyError


def deep(inner, levels):
    for _ in range(levels):
        inner = {"x": inner}
    return inner


@pytest.mark.parametrize("result, numbers", [
    (None, {}), (1, {"reward": 1.0}), (True, {"reward": 1.0}), ({"reward": 0.5, "x": 2}, {"reward": 0.5, "x": 2.0}),
    ({}, {}), ("1", None), ([1.0], None), ({"x": None}, None), (float("inf"), None), (10**400, None),
    pytest.param(10**5000, None, id="digits"),
    ({"reward": 1, "x": -10**400}, None), ({"\ud800": 1}, None), (Wild(), None), (deep({}, 900), None),
])
def test_what_an_agent_tells_is_numbers(result, numbers):
    if numbers is None:
        with pytest.raises(AgentFailed, match="finite numbers"):
            figures_of(result)
    else:
        assert figures_of(result) == numbers


@pytest.mark.parametrize("options, rollout, words", [
    ({}, {}, "exactly one agent.*neither"),
    ({"agent": "a.py:f", "agent_command": ["a"]}, {}, "a function and a program"),
    ({"agent": "a.py"}, {}, "FILE.py:FUNCTION"), ({"agent": "a.py:f-g"}, {}, "FILE.py:FUNCTION"),
    ({"agent": "nowhere.py:f"}, {}, "no such file"), ({"agent": "no_such_package.sub:f"}, {}, "no such file or pack"),
    ({"agent": "json:loads", "agent_timeout": 0.0}, {}, "above 0"),
    ({"agent": "json:loads", "agent_concurrency": 0}, {}, "at least 1"),
    ({"agent": "json:loads"}, {"rollout_temperature": 0.0}, "--rollout-temperature 1"),
])
def test_settings_that_cannot_be_are_refused(options, rollout, words):
    with pytest.raises(ConfigError, match=words):
        check(ToolsOptions(**options), config(**rollout))


@pytest.mark.parametrize("source, words", [
    ("agent = 3", "not a function"), ("x = 1", "has no 'agent'"), ("import no_such_package", "No module named"),
    ("def agent(base_url, model):\n    pass", "takes 'model'"), ("def agent(:", "SyntaxError"),
])
def test_a_function_that_cannot_be_called_is_refused(function, source, words):
    with pytest.raises(ConfigError, match=words):
        load_function(function(source).agent)


RUN = ["run", "plugins/miles-tools/examples/agent.toml", "--no-live", "--run-dir", "runs/a", "--threads", "1"]


@pytest.mark.integration
def test_the_example_trains(tmp_path):
    """The README's agent in a whole run: two turns a sample, its own rewards and figures, and weights that change.

    The trainer, which sees nothing but the ids, gives each drawn token the log-prob of its draw, bit for bit.
    """
    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    outcome = miles([*RUN, "--num-rollout", "2"], tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    metrics = [event["metrics"] for event in read(tmp_path / "runs/a/events.jsonl") if event["event"] == "metrics"]
    assert len(metrics) == 2
    for one in metrics:
        assert one["rollout/agent/turns"] == 2 and one["rollout/agent/ignored_parameters"] == 0
        assert one["rollout/raw_reward"] == one["rollout/reward/agent"] and 0 <= one["rollout/agent/changed"] <= 1
        assert one["train/grad_norm"] > 0 and one["train/train_rollout_logprob_abs_diff_max"] == 0


SEVERAL = '''
import json, urllib.request

def several(base_url, api_key, messages, label):
    """A conversation, a branch of it, and an agent sent out that speaks another protocol."""
    def ask(path, messages, **more):
        request = urllib.request.Request(base_url + path, json.dumps({"messages": messages} | more).encode(),
                                         {"Authorization": "Bearer " + api_key})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    first = [*messages, ask("/chat/completions", messages)["choices"][0]["message"]]
    for question in ("sure?", "really?"):
        ask("/chat/completions", [*first, {"role": "user", "content": question}])
    last = ask("/messages", [{"role": "user", "content": "1+1="}], max_tokens=20)
    return {"reward": float(label in first[-1]["content"]), "two": "2" in last["content"][0]["text"]}
'''


@pytest.mark.integration
def test_several_conversations_of_an_agent_are_one_rollout(tmp_path):
    """Each is a sample, and every drawn token is trained on once with the log-prob of its draw, bit for bit."""
    (tmp_path / "agent.py").write_text(SEVERAL)
    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    outcome = miles([*RUN, "--num-rollout", "1", "--agent", "agent.py:several", "--agent-conversations", "3",
                     "--rollout-batch-size", "4"], tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    (one,) = [event["metrics"] for event in read(tmp_path / "runs/a/events.jsonl") if event["event"] == "metrics"]
    assert one["rollout/agent/conversations"] == 3 and one["rollout/agent/superseded"] == 0
    assert one["rollout/agent/turns"] == pytest.approx(5 / 3) and one["train/train_rollout_logprob_abs_diff_max"] == 0
    assert one["train/grad_norm"] > 0 and one["rollout/raw_reward"] == one["rollout/reward/agent"]


@pytest.mark.integration
def test_agents_that_all_fail_starve_the_run_with_a_sentence(tmp_path):
    (tmp_path / "agent.py").write_text("def agent():\n    raise ValueError('no luck')\n")
    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    outcome = miles([*RUN, "--agent", "agent.py:agent", "--max-over-sampling-waves", "2"], tmp_path)
    assert outcome.code == 1 and "filters dropped 16 groups (agent_raised 16)" in outcome.err
    assert "the agent raised ValueError: no luck, in " in outcome.err
    assert outcome.err.startswith("Error: ") and "Traceback" not in outcome.err
