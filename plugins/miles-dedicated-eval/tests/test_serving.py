"""The engine that evaluates, in a plan: its GPUs, what it shares with that of training, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from miles_dedicated_eval import serving
from miles_dedicated_eval.plugin import DedicatedEval, DedicatedEvalOptions

from miles_core.config.tables import Checkpoint, Debug, Eval, Perf, Rollout, RunConfig
from miles_core.errors import ConfigError
from miles_core.stages.placement import Local


def config(tmp_path="run", engine="sglang", external=False, **perf) -> RunConfig:
    """A run of two trainer GPUs and three engines of one, that evaluates."""
    made = RunConfig(
        checkpoint=Checkpoint(run_dir=str(tmp_path)), rollout=Rollout(engine=engine),
        eval=Eval(eval_interval=5, eval_prompt_data=["a", "a.jsonl"]),
        perf=Perf(**{"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, **perf}),
        options={"sglang": {"router": "smg", "router_ip": "10.0.0.1", "router_port": 3000}})  # fmt: skip
    words = ("servers", "server_args", *["external"] * external)
    return replace(made, stated={"engine:sglang": words, "engine:local": ("tensors",)})


def derived(config, note=lambda text: None, **options):
    options = DedicatedEvalOptions(**options)
    made = DedicatedEval(options, config)
    return made.derive(config, note), list(made.plan_lines(config))


@pytest.mark.parametrize(("engine", "options", "says"), [
    ("sglang", {}, "on 1 GPU,"), ("sglang", {"eval_num_gpus": 2}, "on 2 GPUs,"),
    ("sglang", {"eval_engine_addrs": ["h:1"]}, "at h:1,"), ("local", {}, "its own, beside"),
    ("local", {"eval_overflow_policy": "skip"}, "is skipped")])
def test_the_plan_says_what_evaluates(engine, options, says):
    before = config(engine=engine)
    after, [(title, line)] = derived(before, **options)
    assert after == before and title == "evaluation" and says in line


def test_a_run_that_evaluates_nothing_or_by_itself_says_so():
    for run, options in ((replace(config(), eval=Eval()), {}), (config(), {"eval_num_gpus": 0}),
                         (replace(config(), debug=Debug(debug_rollout_only=True)), {})):
        notes = []
        assert derived(run, notes.append, **options) == (run, []) and len(notes) == 1


@pytest.mark.parametrize(("perf", "options", "code"), [
    ({"colocate": True}, {}, "dedicated-eval-colocated"),
    ({}, {"eval_num_gpus_per_engine": 2}, "dedicated-eval-server-size"),
    ({"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 4}, {"eval_num_gpus": 3}, "dedicated-eval-server-size"),
    ({"placement": "ray"}, {}, "dedicated-eval-placement"),
    ({"external": True}, {}, "dedicated-eval-placement"),
    ({"engine": "local"}, {"eval_engine_addrs": ["h:1"]}, "dedicated-eval-addresses-other-engine"),
])
def test_what_cannot_be_is_refused(perf, options, code):
    with pytest.raises(ConfigError) as caught:
        derived(config(**perf), **options)
    assert caught.value.code == code


def test_gpus_are_counted_with_those_of_training(monkeypatch):
    for here, fits in ((0, True), (5, False), (6, True)):
        monkeypatch.setattr(serving, "gpus", lambda here=here: here)
        if fits:
            derived(config())
        else:
            with pytest.raises(ConfigError) as caught:
                derived(config())
            assert caught.value.code == "dedicated-eval-gpus"


@pytest.mark.parametrize("placement", ["local", "ray"])
def test_servers_that_run_already_need_no_gpus_here(placement, monkeypatch):
    monkeypatch.setattr(serving, "gpus", lambda: 5)
    derived(config(placement=placement), eval_engine_addrs=["h:1"])


def made(tmp_path, run, **options):
    """(configuration that the engine is made with, placement)"""
    parts = SimpleNamespace(config=run, tokenizer=None, rollout=SimpleNamespace(
        engine={name: lambda config, *rest: config for name in ("sglang", "local")}))
    return serving.engine_of(parts, DedicatedEvalOptions(**options))


def test_servers_have_the_gpus_after_those_of_training_and_neither_its_router_nor_its_logs(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_core.stages.placement.visible_gpus", lambda: (10, 11, 12, 13, 14, 15, 16, 17))
    engine, placement = made(tmp_path, config(tmp_path), eval_num_gpus=2)
    assert isinstance(placement, Local)
    handles = placement.servers(lambda seat: SimpleNamespace(gpus=lambda: seat.gpus))
    assert [asyncio.run(handle.call("gpus")) for handle in handles] == [(15,), (16,)]
    assert engine.perf.rollout_num_gpus == 2 and engine.checkpoint.run_dir == str(tmp_path / "dedicated-eval")
    assert {engine.options["sglang"][key] for key in ("router", "router_ip", "router_port")} == {None}
    assert engine.options["sglang"]["rollout_external"] is False


def test_servers_that_run_already_are_reached_and_not_started(tmp_path):
    engine, placement = made(tmp_path, config(tmp_path), eval_engine_addrs=["h:1", "h:2"])
    assert placement is None
    assert engine.options["sglang"]["rollout_external_engine_addrs"] == ["h:1", "h:2"]
    assert engine.options["sglang"]["rollout_external"] is True
