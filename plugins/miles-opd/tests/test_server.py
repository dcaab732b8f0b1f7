"""The client of a teacher's server, over real HTTP against a small server that scores with transformers."""

import asyncio
import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_opd import server
from miles_opd.server import Servers, addresses, post
from miles_testing.batches import make_sample
from miles_testing.forked import miles

from miles_core.errors import ConfigError, RewardError
from miles_core.record.events import read


@pytest.fixture(scope="module")
def teacher():
    """A random Qwen3 with the vocabulary of the arithmetic example."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, initializer_range=0.5)).eval()


@pytest.fixture
def served(teacher, monkeypatch):
    """(answers=[status, ...]) -> the address of a server whose first answers have these statuses, then 200."""
    monkeypatch.setattr(server, "PAUSE", 0.01)
    running, over = [], threading.Event()

    def serve(*statuses, delay=0.0, change=lambda answer: answer):
        waiting = list(statuses)

        class Generate(BaseHTTPRequestHandler):
            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if over.wait(delay):
                    return  # nobody waits for it any more
                status = waiting.pop(0) if waiting else 200
                good = status == 200 and self.path == "/generate"
                body = json.dumps(change(score(teacher, payload)) if good else {"error": "busy"}).encode()
                self.send_response(status if self.path == "/generate" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments):
                """Nothing on the terminal."""

        http = ThreadingHTTPServer(("127.0.0.1", 0), Generate)
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running.append(http)
        return f"http://127.0.0.1:{http.server_port}"

    yield serve
    over.set()
    for http in running:
        http.shutdown()
        http.server_close()


def log_probs(teacher, tokens):
    """[T - 1, V] of the tokens after the first."""
    with torch.no_grad():
        return teacher(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def score(teacher, payload):
    """What SGLang answers, see the docstring of miles_opd/server.py."""
    tokens, start = payload["input_ids"], payload["logprob_start_len"]
    assert payload["return_logprob"]
    assert payload["sampling_params"]["max_new_tokens"] == 0
    rows, tokens = log_probs(teacher, tokens)[start:], tokens[start:]
    scored = [[None, tokens[0], None]] + [[float(row[t]), t, None] for row, t in zip(rows, tokens[1:], strict=True)]
    meta = {"input_token_logprobs": scored}
    if asked := payload.get("token_ids_logprob"):
        meta["input_token_ids_logprobs"] = [None, *([[float(row[t]), t, None] for t in asked] for row in rows)]
    if k := payload.get("top_logprobs_num"):
        best = [row.topk(k) for row in rows]
        meta["input_top_logprobs"] = [None, *([[float(v), int(i), None] for v, i in zip(*row, strict=True)]
                                              for row in best)]
    return {"meta_info": meta}


def servers(urls, timeout=60.0, top_k=0):
    return Servers(urls, key="opd_teacher", timeout=timeout, top_k=top_k, concurrency=4)


def ask(urls, sample, timeout=60.0, top_k=0):
    return asyncio.run(servers(urls, timeout, top_k).score(sample))


def sample(**metadata):
    made = make_sample(0, 0, 0.0, (1, 0, 1))
    made.metadata.update(metadata)
    return made


def test_log_probs_are_the_teachers_for_the_response(served, teacher):
    made = sample()
    found = ask([served()], made)
    rows = log_probs(teacher, made.tokens.tolist())
    expected = [float(rows[t - 1, made.tokens[t]]) for t in range(2, 5)]
    assert set(found) == {"teacher_log_probs"} and found["teacher_log_probs"].dtype == np.float32
    np.testing.assert_allclose(found["teacher_log_probs"], expected, rtol=1e-6)


def test_top_k_are_the_teachers_likeliest_tokens(served, teacher):
    made = sample()
    found = ask([served()], made, top_k=4)
    values, tokens = log_probs(teacher, made.tokens.tolist())[1:].topk(4)
    np.testing.assert_allclose(found["opd_teacher_top"], values, rtol=1e-6)
    np.testing.assert_array_equal(found["opd_teacher_tokens"], tokens)
    assert found["opd_teacher_tokens"].dtype == np.int32


def test_any_tokens_are_scored_in_place_of_the_samples_window_by_window(served, teacher, monkeypatch):
    monkeypatch.setattr(server, "WINDOW", 2)
    made, requests = make_sample(0, 0, 0.0, (0, 1, 1, 1, 0, 0, 0, 1)), []
    tokens = np.random.default_rng(0).integers(0, 264, (8, 3)).astype(np.int32)

    def seen(answer):
        requests.append(len(answer["meta_info"]["input_token_ids_logprobs"]) - 1)
        return answer

    found = servers([served(change=seen)]).score_tokens(made, tokens)
    expected = log_probs(teacher, made.tokens.tolist())[-8:].gather(1, torch.from_numpy(tokens).long()).numpy()
    trained = made.columns["loss_mask"] > 0
    np.testing.assert_allclose(found[trained], expected[trained], rtol=1e-6)
    assert not found[~trained].any()
    assert requests == [1, 2, 1], "about trained tokens alone"


def test_an_answer_about_tokens_that_were_not_asked_about_is_refused(served):
    def other(answer):
        answer["meta_info"]["input_token_ids_logprobs"][1][0][1] = 99
        return answer

    with pytest.raises(RewardError) as caught:
        servers([served(change=other)]).score_tokens(sample(), np.array([[3, 4]] * 3))
    assert caught.value.code == "opd-server-answer-invalid"


def test_the_last_id_of_the_vocabulary_comes_back_as_sglang_calls_it(served):
    """scheduler_components/logprob_result_processor.py of 0.5.16: `x if x < vocab_size - 1 else 0`."""
    assert len(ask([served(change=spoil(1, 0))], sample())["teacher_log_probs"]) == 3


def test_a_samples_metadata_names_its_teacher(served):
    good, bad = served(), served(*[400] * 9)
    urls = [f"maths={good}", bad]
    assert len(ask(urls, sample(opd_teacher="maths"))["teacher_log_probs"]) == 3
    with pytest.raises(RewardError, match="400"):
        ask(urls, sample())
    with pytest.raises(RewardError, match="unknown teacher.*poetry.*maths, default"):
        ask(urls, sample(opd_teacher="poetry"))


def test_an_answer_about_images_is_not_scored_without_them(served):
    """A row's own column of that name holds none."""
    made, urls = sample(image_files=["0" * 64]), [served()]
    for question in (lambda: ask(urls, made), lambda: servers(urls).score_tokens(made, np.zeros((3, 1), np.int32))):
        with pytest.raises(RewardError) as caught:
            question()
        assert caught.value.code == "opd-images-unseen" and made.name in str(caught.value)
    for names in ([], ["a.png"]):
        assert len(ask(urls, sample(image_files=names))["teacher_log_probs"]) == 3


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not(served):
    assert len(ask([served(503, 500)], sample())["teacher_log_probs"]) == 3
    with pytest.raises(RewardError, match="no answer.*422.*busy"):
        ask([served(422)], sample())


def test_every_wait_is_bounded(served):
    begin = time.monotonic()
    with pytest.raises(RewardError, match="no answer.*opd_teacher_timeout"):
        ask([served(delay=5)], sample(), timeout=0.2)
    with pytest.raises(RewardError, match="no answer"):
        post("http://127.0.0.1:1/generate", {}, timeout=0.2)
    assert time.monotonic() - begin < 4


def spoil(place, value):
    def change(answer):
        answer["meta_info"]["input_token_logprobs"][2][place] = value
        return answer

    return change


@pytest.mark.parametrize("change, words", [
    (spoil(1, 99), "other tokens"), (spoil(0, None), "not finite"), (spoil(0, float("nan")), "not finite"),
    (lambda answer: {"text": "hello"}, "meta_info"),
    (lambda answer: {"meta_info": {"input_token_logprobs": [[0.0, 1, None]]}}, "1 other tokens than the 5"),
])
def test_an_answer_about_something_else_is_refused(served, change, words):
    with pytest.raises(RewardError, match=f"cannot be used.*{words}.*tokenizer"):
        ask([served(change=change)], sample())


STUDENT = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
RUN = ["run", "--no-live", "--hf-checkpoint", STUDENT, "--prompt-data", STUDENT.parent / "train.jsonl", "--input-key",
       "prompt", "--label-key", "label", "--apply-chat-template", "--num-rollout", "2", "--rollout-batch-size", "4",
       "--rollout-max-response-len", "8", "--no-bf16", "--threads", "1", "--lr", "1e-3", "--advantage-estimator",
       "on_policy_distillation"]


SETS = ("only-teacher", "only-student", "intersection", "union", "xor")


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize("top", [None, *SETS])
def test_a_server_and_the_trainer_teach_the_same(served, teacher, tmp_path, top):
    """Two rollouts with the same teacher here and there: the same tokens, divergences and losses."""
    teacher.save_pretrained(tmp_path / "teacher")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STUDENT / file, tmp_path / "teacher")
    kinds = {"asks": ["--opd-teacher-urls", served(), "--rm-type", "math", "on_policy_distillation"],
             "holds": ["--opd-teacher-load", tmp_path / "teacher", "--rm-type", "math"]}
    sets = ["--opd-log-prob-top-k", 6, "--opd-top-k-strategy", top] if top else []
    runs = {kind: steps([*RUN, *flags, *sets], tmp_path / kind) for kind, flags in kinds.items()}
    np.testing.assert_allclose(runs["asks"], runs["holds"], rtol=1e-4)
    assert runs["asks"][0] != runs["asks"][1]


@pytest.mark.full
@pytest.mark.integration
def test_the_teacher_of_each_sample_is_asked_on_every_rank(served, tmp_path):
    """Two ranks of a layer, and of the data: each asks about its share, of the teacher that the row names."""
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1), "metadata": {"opd_teacher": ("one", "other")[n % 2]}}
            for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"one": 0, "other": 0}

    def counting(name):
        def count(answer):
            asked[name] += "input_token_ids_logprobs" in answer["meta_info"]
            return answer

        return f"{name}={served(change=count)}"

    flags = [*RUN, "--prompt-data", tmp_path / "rows.jsonl", "--rm-type", "on_policy_distillation",
             "--opd-log-prob-top-k", "4", "--opd-teacher-urls", *map(counting, asked), "--actor-num-gpus-per-node", "2"]
    found = [steps([*flags, *layout], tmp_path / str(place)) for place, layout in enumerate((
        [], ["--tensor-model-parallel-size", "2"]))]
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert asked["one"] == asked["other"] > 0


@pytest.mark.full
@pytest.mark.integration
def test_a_rank_whose_teacher_fails_ends_the_run_at_once(served, tmp_path):
    """The other rank has its answers and would wait for those."""
    rows = [{"prompt": f"{n}+1=", "label": "1", "metadata": {"opd_teacher": ("good", "bad")[n == 0]}} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def empty(answer):
        return {"meta_info": {**answer["meta_info"], "input_token_ids_logprobs": []}}

    outcome = miles([*RUN, "--prompt-data", tmp_path / "rows.jsonl", "--rm-type", "on_policy_distillation",
                     "--opd-log-prob-top-k", "4", "--opd-teacher-urls", f"good={served()}",
                     f"bad={served(change=empty)}", "--actor-num-gpus-per-node", "2", "--run-dir", "run"], tmp_path)
    assert outcome.code == 1 and "[opd-server-answer-invalid]" in outcome.err and outcome.seconds < 60


def steps(argv, folder):
    """Loss, divergence and the teacher's log-probs of each rollout of a run."""
    outcome = miles([*argv, "--run-dir", folder], folder.parent)
    assert outcome.code == 0, outcome.err
    metrics = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "metrics"]
    return [(m["train/loss"], m["rollout/opd_reverse_kl"], m["rollout/teacher_log_probs"]) for m in metrics]


def test_addresses():
    assert addresses(["http://a:1/", "maths=https://b/generate"]) == {
        "default": "http://a:1/generate", "maths": "https://b/generate"}
    for bad, words in ((["localhost:1"], "localhost:1"), (["http://a", "http://b"], "two addresses")):
        with pytest.raises(ConfigError, match=words):
            addresses(bad)
