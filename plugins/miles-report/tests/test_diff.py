"""miles diff names the first rollout, side and tensor that differ, and says when it cannot tell."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_report.diff import SIDES, compare, load

from miles_core.cli import cli
from miles_core.errors import RunDirectoryError
from miles_core.record.directory import RunDirectory, publish
from miles_core.record.journal import Journal, Views

WEIGHTS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
COLUMNS = ("advantages", "log_probs", "loss_mask", "rollout_log_probs", "routed_experts", "tokens", "versions",
           "reward")
SIDE_OF = {"tokens": "rollout", "loss_mask": "rollout", "versions": "rollout", "rollout_log_probs": "rollout",
           "reward": "reward", "routed_experts": "plugin", "log_probs": "score", "advantages": "advantage"}


class Written:
    """A run directory as Journal writes it; `marks` are (rollout, name) of what is to differ."""

    def __init__(self, path, plan=None):
        self.directory = RunDirectory(path).acquire()
        self.journal = Journal(self.directory, Views())
        options = {"checkpoint.run_dir": str(path), "checkpoint.save": f"{path}/checkpoints", "optimizer.lr": 1e-6,
                   **(plan or {})}
        publish(self.directory.plan_json, json.dumps({
            "plugins": [{"name": "grpo", "source": "miles-grpo", "version": "0.1.0", "origin": "run.toml:1"}],
            "owners": [["reward", "math", "math", "run.toml:2"]], "order": {"finish": ["math"]}, "options": options}))

    def start(self, first=0, torch="2.13.0"):
        self.journal.events.run_start("0", {"torch": torch, "grpo": "0.1.0"}, resumed_from=first or None)
        return self

    def rollouts(self, first, stop, marks=(), norms=None, hashes=True):
        for one in range(first, stop):
            weights, batch = ({name: f"{one}{name}{(one, name) in marks}" for name in names}
                              for names in (WEIGHTS, COLUMNS))
            loss = 0.5 + ((one, "loss") in marks)
            self.journal.events.append("metrics", one, metrics={
                "rollout/raw_reward": 0.25, "train/loss": loss, "perf/x_time": id(self)})
            if hashes:
                self.journal.hashes(one, weights, batch, (norms or {}).get(one, 1.0))
        return self

    def end(self, status="completed"):
        self.journal.events.run_end(status)
        self.directory.release()
        return self.directory.path


def first_of(a, b):
    return compare(load(a), load(b)).first


def diff(*argv):
    """(exit code, output) of `miles diff`."""
    result = CliRunner().invoke(cli, ["diff", *map(str, argv)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def run(tmp_path):
    """(name, *marks) -> the folder of a run of three rollouts."""

    def write(name, *marks, stop=3, **given):
        return Written(tmp_path / name).start().rollouts(0, stop, marks, **given).end()

    return write


def test_equal_runs_are_the_same_whatever_their_folders_and_times(run):
    code, out = diff(run("a"), run("b"))
    assert code == 0
    assert "plan and versions: the same" in out and "rollouts 0 to 2: hashes are the same" in out


def test_a_weight_alone_is_the_step(run):
    code, out = diff(run("a"), run("b", (2, WEIGHTS[1]), (2, WEIGHTS[2])))
    assert code == 1
    assert f"rollout 2: first difference: weights {WEIGHTS[1]} (and 1 more of 3)" in out
    assert "the optimizer step: the batch is identical up to rollout 2" in out
    assert "the same before: rollouts 0 to 1" in out


def test_the_batch_comes_before_the_weights_and_an_earlier_rollout_before_a_later_one(run):
    first = first_of(run("a"), run("b", (1, "tokens"), (1, "advantages"), (1, WEIGHTS[0]), (2, "loss_mask")))
    assert (first.rollout_id, first.part, first.side) == (1, "batch", "rollout")
    assert first.names == ["tokens", "advantages"] and first.of == len(COLUMNS)


@pytest.mark.parametrize("column, side", SIDE_OF.items())
def test_a_column_names_its_side_of_the_loop(run, column, side):
    first = first_of(run("a"), run("b", (1, column), (1, WEIGHTS[0])))
    assert (first.names, first.side) == ([column], side)


@given(marks=st.sets(st.tuples(st.integers(0, 2), st.sampled_from(COLUMNS + WEIGHTS)), min_size=1))
@settings(max_examples=30, deadline=None)
def test_it_is_the_first_in_the_order_of_the_loop(tmp_path_factory, marks):
    """Against a brute-force search over everything that was changed; and the same the other way round."""
    folder = tmp_path_factory.mktemp("runs")
    a = Written(folder / "a").start().rollouts(0, 3).end()
    b = Written(folder / "b").start().rollouts(0, 3, marks).end()
    rollout_id, side = min((one, SIDES.index(SIDE_OF.get(name, "step"))) for one, name in marks)
    for first in (first_of(a, b), first_of(b, a)):
        assert (first.rollout_id, SIDES.index(first.side)) == (rollout_id, side)
        assert (rollout_id, first.names[0]) in marks


def test_at_the_first_rollout_it_says_what_it_cannot_know(run):
    assert "the weights before it are not on record" in diff(run("a"), run("b", (0, "tokens")))[1]
    assert "not on record" not in diff(run("c"), run("d", (1, "tokens")))[1]


def test_the_gradient_norm_alone(run):
    code, out = diff(run("a"), run("b", norms={1: 1.5}))
    assert code == 1 and "rollout 1: first difference: grad_norm: 1.0 | 1.5" in out


def test_a_killed_and_resumed_run_counts_by_what_it_did_last(tmp_path, run):
    """The killed start's rollouts 1 and 2 were others; the resumed one did 1 and 2 again, and equal ones."""
    again = Written(tmp_path / "again").start().rollouts(0, 3, [(1, "tokens"), (2, WEIGHTS[0])])
    again.start(first=1).rollouts(1, 3)
    assert diff(run("whole"), again.end())[0] == 0
    redone = Written(tmp_path / "redone").start().rollouts(0, 3).start(first=1).rollouts(1, 3, [(2, WEIGHTS[2])])
    first = first_of(tmp_path / "whole", redone.end())
    assert (first.rollout_id, first.names) == (2, [WEIGHTS[2]])


def test_a_kill_in_the_middle_of_a_line_is_passed_over(run):
    path = run("b")
    for name in ("events.jsonl", "hashes.jsonl"):
        with open(path / name, "ab") as file:
            file.write(b'{"event":"hashes","rollout')
    assert diff(run("a"), path)[0] == 0


def test_runs_of_different_length_are_compared_as_far_as_both_go(tmp_path, run):
    short, long = run("a"), run("b", stop=5)
    code, out = diff(short, long)
    assert code == 1
    assert "rollouts 0 to 2: hashes are the same" in out and "B is longer: it goes on to rollout 4" in out
    later = Written(tmp_path / "later").start(first=1).rollouts(1, 3).end("interrupted")
    code, out = diff(short, later)
    assert code == 1 and "one lacks rollouts that the other has" in out and "interrupted" in out


def test_a_tensor_that_only_one_run_has(run):
    path = run("b")
    text = (path / "hashes.jsonl").read_text().replace(WEIGHTS[0], "model.embed.weight")
    (path / "hashes.jsonl").write_text(text)
    events = (path / "events.jsonl").read_text().replace('"weights":"', '"weights":"x')
    (path / "events.jsonl").write_text(events)
    first = first_of(run("a"), path)
    assert first.names == [WEIGHTS[0], "model.embed.weight"] and first.values[1] == "absent"


def test_without_the_names_the_totals_still_tell(run):
    path = run("b", (1, "tokens"))
    (path / "hashes.jsonl").unlink()
    code, out = diff(run("a"), path)
    assert code == 1 and "rollout 1: first difference: batch (the names are not on record)" in out


def test_what_the_plans_differ_in_comes_first_and_does_not_count(tmp_path, run):
    other = Written(tmp_path / "b", {"optimizer.lr": 1e-4}).start(torch="2.14.0").rollouts(0, 3).end()
    code, out = diff(run("a"), other)
    assert code == 0
    assert "plan and versions: 2 differ\n  optimizer.lr: 1e-06 | 0.0001\n  version of torch: 2.13.0 | 2.14.0" in out
    assert out.index("optimizer.lr") < out.index("hashes are the same")


def test_what_a_plan_holds_cannot_steer_the_terminal(tmp_path, run):
    other = Written(tmp_path / "b", {"rollout.rollout_stop": "\x1b]0;title\x07\u202e"}).start().rollouts(0, 3).end()
    _, out = diff(run("a"), other)
    assert "rollout.rollout_stop: " in out and not {"\x1b", "\x07", "\u202e"} & set(out)


def test_without_hashes_metrics_are_compared_and_said_to_be_no_proof(run):
    """Other metrics are a difference; equal ones leave it open; times never count."""
    plain = run("a", hashes=False)
    code, out = diff(plain, run("b", (1, "loss")))
    assert code == 1 and "no hashes on record in" in out and "--debug-determinism" in out
    assert "rollout 1: first difference: metrics train/loss: 0.5 | 1.5" in out
    code, out = diff(plain, run("c"))
    assert code == 2 and "rollouts 0 to 2: metrics are the same\nequal metrics do not prove equal runs" in out


def test_runs_that_only_evaluate_are_compared_by_that(tmp_path):
    """A run that trains as well has nothing that such a one could be held against."""
    def evaluated(name, score):
        written = Written(tmp_path / name).start()
        written.journal.events.append("eval", 0, metrics={"eval/sums": score})
        return written

    a, b = evaluated("a", 0.5).end(), evaluated("b", 0.75).end()
    code, out = diff(a, b)
    assert code == 1 and "rollout 0: first difference: metrics eval/sums: 0.5 | 0.75" in out
    assert diff(a, evaluated("c", 0.5).end())[0] == 2
    both = evaluated("both", 0.5).rollouts(0, 1, hashes=False).end()
    with pytest.raises(RunDirectoryError, match="runs-without-common-rollout"):
        compare(load(a), load(both))


def test_what_cannot_be_compared_is_refused(tmp_path, run):
    path = run("a")
    with pytest.raises(RunDirectoryError, match=r"\[not-a-run-directory\]") as caught:
        load(tmp_path / "nowhere")
    assert caught.value.exit_code == 2
    later = Written(tmp_path / "later").start(first=7).rollouts(7, 8).end()
    with pytest.raises(RunDirectoryError, match=r"no rollout in common \(got rollouts 0 to 2 and 7\).*debug-det"):
        compare(load(path), load(later))
    (path / "plan.json").write_text("[1]")
    with pytest.raises(RunDirectoryError, match="plan.json is damaged"):
        load(path)


def test_json_has_everything(run):
    code, out = diff(run("a"), run("b", (1, "reward")), "--json")
    found = json.loads(out)
    assert code == found["exit_code"] == 1
    assert found["compared"] == [0, 1, 2] and found["facts"] == [] and found["by"] == "hashes"
    assert {key: found["first"][key] for key in ("rollout_id", "part", "side", "names")} == {
        "rollout_id": 1, "part": "batch", "side": "reward", "names": ["reward"]}
    assert json.loads(diff(run("c"), run("d"), "--json")[1])["first"] is None


def test_a_run_that_is_going_can_be_compared(run):
    """Reading takes no lock."""
    path = run("a")
    with RunDirectory(path):
        assert diff(path, run("b"))[0] == 0


def test_options_of_a_plugin_that_one_run_lacks_go_without_saying(tmp_path):
    """A tracker has a dozen, and the forty lines that are shown would end before what matters."""
    paths = [Written(tmp_path / name, plan).start().rollouts(0, 1).end()
             for name, plan in (("a", {"optimizer.lr": 2e-6}), ("b", {"wandb.project": "miles"}))]
    plan = json.loads((paths[1] / "plan.json").read_text())
    plan["plugins"].append({"name": "wandb", "source": "miles-wandb", "version": "0.1.0", "origin": "--plugin"})
    (paths[1] / "plan.json").write_text(json.dumps(plan))
    assert [label for label, *_ in compare(*map(load, paths)).facts] == ["optimizer.lr", "plugin wandb"]
