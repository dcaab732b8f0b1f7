"""[debug]: one side alone, replay bit for bit, hashes, printed samples, stopping early and going on."""

import gzip
import json
import subprocess
import sys

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.record.samples import read_samples, sample_file


def go(argv, folder, name):
    outcome = miles(["run", *argv, "--no-live", "--run-dir", f"runs/{name}"], folder)
    assert outcome.code == 0, outcome.err
    return list(read(folder / f"runs/{name}/events.jsonl"))


def metrics(events):
    """Of each rollout, times aside."""
    return [{key: value for key, value in event["metrics"].items() if not key.startswith("perf/")}
            for event in events if event["event"] == "metrics"]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


IMPORTED = '''
"""Writes down what was imported when the run ended."""
from miles_core import hookimpl


class Imported:
    """Looks at sys.modules."""

    @hookimpl
    def finish(self):
        import sys

        with open("imported.txt", "w") as file:
            file.write("\\n".join(sys.modules))
'''


def test_rollout_only_imports_no_trainer_and_samples_from_the_checkpoint(run_file, tmp_path):
    """In a fresh interpreter; log-probs of the sampled tokens are the checkpoint's, not those of random weights."""
    (tmp_path / "imported.py").write_text(IMPORTED)
    argv = ["run", str(run_file()), "--no-live", "--plugin", str(tmp_path / "imported.py"), "--debug-rollout-only",
            "--run-dir", "runs/alone", "--num-rollout", "1"]
    code = f"import sys; sys.argv = ['miles', *{argv!r}]; from miles_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules = (tmp_path / "imported.txt").read_text().split("\n")
    assert "torch" in modules and "miles_local.engine" in modules
    assert not [name for name in modules if name.partition(".")[0] == "megatron"]
    assert "miles_megatron.step" not in modules
    trained = go([run_file(), "--num-rollout", "1"], tmp_path, "both")
    alone = metrics(list(read(tmp_path / "runs/alone/events.jsonl")))
    assert alone[0]["rollout/raw_reward"] == metrics(trained)[0]["rollout/raw_reward"], "the same tokens were sampled"
    assert not [key for key in alone[0] if key.startswith("train/")]


BOMB = '''
"""An engine that must not be made."""
from miles_core import hookimpl


class Bomb:
    """Offers the engine "bomb"."""

    @hookimpl("engine", name="bomb")
    def bomb(self, config, tokenizer):
        raise AssertionError("an engine was made")
'''


ASKS = '''
"""A generator of demonstrations that the model draws itself."""
from miles_core import hookimpl
from miles_core.stages.rollout import single_turn


class Asks:
    """Offers the generator "asks"."""

    @hookimpl("generate", name="asks")
    async def asks(self, prompt, generation):
        return await single_turn(prompt, generation)
'''


def test_a_replay_trains_bit_for_bit_without_an_engine(run_file, tmp_path):
    """Saved rollouts give the same metrics and weights; replaying implies train-only, and says so."""
    (tmp_path / "bomb.py").write_text(BOMB)
    common = [run_file(), "--use-kl-loss", "--kl-loss-coef", "0.1", "--num-steps-per-rollout", "2"]
    first = go([*common, "--save-debug-rollout-data", "data/{rollout_id}", "--save", "a", "--save-hf", "hf_a"],
               tmp_path, "a")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["0", "1", "2"]
    again = go([*common, "--load-debug-rollout-data", "data/{rollout_id}", "--save", "b", "--save-hf", "hf_b",
                "--plugin", tmp_path / "bomb.py", "--engine", "bomb"], tmp_path, "b")
    assert metrics(again) == metrics(first)
    assert weights(tmp_path / "hf_a") == weights(tmp_path / "hf_b")
    said = [event["text"] for event in again if event["event"] == "message"]
    assert any("--debug-train-only is implied" in text for text in said)
    assert all(event["tensors"] == 0 for event in again if event["event"] == "weight_sync")
    on = go([*common, "--load", "b", "--num-rollout", "4"], tmp_path, "on")
    assert [event["rollout_id"] for event in on if event["event"] == "metrics"] == [3]
    uids = {one["prompt_uid"] for one in read_samples(sample_file(tmp_path / "runs/on", "rollout", 3))}
    assert uids == {12, 13, 14, 15}, "sampling goes on after the prompts that were replayed"


def test_rows_that_bring_their_answers_are_trained_on_without_an_engine(run_file, tmp_path):
    """An engine, which an evaluation asks for, changes nothing that is trained; what nobody scores has no reward."""
    def trained(events):
        return [{key: value for key, value in one.items() if "reward" not in key} for one in metrics(events)]

    (tmp_path / "bomb.py").write_text(BOMB)
    common = [run_file(), "--generate", "sft", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1",
              "--plugin", tmp_path / "bomb.py"]
    evaluated = [*common, "--eval-prompt-data", "held", tmp_path / "eval.jsonl", "--eval-interval", "9"]
    (tmp_path / "eval.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}\n')
    alone = go([*common, "--engine", "bomb", "--rm-type", "--save", "a", "--save-hf", "hf_a"], tmp_path, "alone")
    beside = go([*evaluated, "--save", "b", "--save-hf", "hf_b"], tmp_path, "beside")
    assert trained(alone) == trained(beside) and weights(tmp_path / "hf_a") == weights(tmp_path / "hf_b")
    assert not any("rollout/raw_reward" in one or one["rollout/weight_version/lag"] for one in metrics(alone))
    told = go([*evaluated, "--engine", "bomb", "--debug-train-only"], tmp_path, "told")
    assert trained(told) == trained(alone)
    assert any("nothing is evaluated" in event["text"] for event in told if event["event"] == "message")
    asks = [run_file(), "--loss-type", "sft_loss", "--generate", "asks", "--plugin", tmp_path / "asks.py"]
    (tmp_path / "asks.py").write_text(ASKS)
    outcome = miles(["run", *asks, "--debug-train-only", "--no-live", "--run-dir", "runs/asks"], tmp_path)
    assert outcome.code == 1 and "[run-without-engine]" in outcome.err


@pytest.mark.full
def test_determinism_is_on_record_and_a_diff_names_what_differs(run_file, tmp_path):
    """Equal for equal runs, one of them in two starts; the seed shows in the tokens, the rate in the weights alone."""
    def hashes(name, *flags):
        events = go([run_file(), "--debug-determinism", *flags], tmp_path, name)
        return [(e["weights"], e["batch"], e["grad_norm"]) for e in events if e["event"] == "hashes"]

    def diff(a, b):
        outcome = miles(["diff", f"runs/{a}", f"runs/{b}", "--json"], tmp_path)
        found = json.loads(outcome.out)
        return outcome.code, found["first"], [label for label, *_ in found["facts"]]

    one, other = hashes("a"), hashes("c", "--rollout-seed", "43")
    assert len(one) == 3 and len({weights for weights, _, _ in one}) == 3
    assert all(a[place] != b[place] for a, b in zip(one, other, strict=True) for place in range(3))
    hashes("b", "--save", "saved", "--debug-exit-after-rollout", "2")
    assert hashes("b", "--save", "saved", "--load", "saved") == one
    code, first, _ = diff("a", "b")
    assert (code, first) == (0, None)
    code, first, facts = diff("a", "c")
    assert (code, first["rollout_id"], first["part"], first["names"][0]) == (1, 0, "batch", "tokens")
    assert facts == ["rollout.rollout_seed"]
    hashes("d", "--lr", "1e-3")
    code, first, facts = diff("a", "d")
    assert (code, first["rollout_id"], first["part"], first["side"]) == (1, 0, "weights", "step")
    assert first["names"][0] == "model.embed_tokens.weight" and len(first["names"]) == first["of"]
    assert facts == ["optimizer.lr"]


@pytest.mark.full
def test_a_traced_run_has_the_stages_in_its_traces_and_the_same_weights(run_file, tmp_path):
    common = [run_file(), "--use-kl-loss", "--num-steps-per-rollout", "2", "--save"]
    go([*common, "a", "--save-hf", "hf_a"], tmp_path, "plain")
    go([*common, "b", "--save-hf", "hf_b", "--use-pytorch-profiler", "--profile-step-start", "1",
        "--profile-step-end", "2"], tmp_path, "traced")
    assert weights(tmp_path / "hf_a") == weights(tmp_path / "hf_b")
    assert not (tmp_path / "runs/plain/profile").exists()
    traces = {path.name.removesuffix(".json.gz"): json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
              for path in (tmp_path / "runs/traced/profile").iterdir()}
    phases = ("log_probs", "ref_log_probs", "advantage", "step-0", "step-1")
    assert set(traces) == {f"rank-0-rollout-1-{phase}" for phase in phases}
    step = {event["name"] for event in traces["rank-0-rollout-1-step-1"]}
    assert {"step 1", "forward/backward", "optimizer", "aten::mm"} <= step


def test_a_sample_of_every_second_rollout_is_printed(run_file, tmp_path):
    events = go([run_file(), "--debug-rollout-print-every", "2"], tmp_path, "a")
    said = [event["text"] for event in events if event["event"] == "message" and event["text"].startswith("rollout ")]
    assert [text.partition(":")[0] for text in said] == ["rollout 0", "rollout 2"]
    assert all("reward" in text and "label" in text for text in said)


@pytest.mark.full
def test_a_run_that_stops_early_goes_on_where_it_was(run_file, tmp_path):
    """--debug-exit-after-rollout counts from each start, and the resumed run ends with the uninterrupted one's bits."""
    whole = go([run_file(), "--save", "whole", "--save-hf", "hf_whole"], tmp_path, "whole")
    parts = [run_file(), "--save", "parts", "--load", "parts", "--save-hf", "hf_parts"]
    first = go([*parts, "--debug-exit-after-rollout", "2"], tmp_path, "first")
    second = go([*parts, "--debug-exit-after-rollout", "2"], tmp_path, "second")
    assert [len(metrics(events)) for events in (first, second)] == [2, 1]
    assert metrics(first) + metrics(second) == metrics(whole)
    assert weights(tmp_path / "hf_parts") == weights(tmp_path / "hf_whole")
