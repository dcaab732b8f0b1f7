"""What holds for the three parts: the kits of miles-testing, and a run that is stopped and goes on."""

from miles_foreign.sync import Handed
from miles_testing import engine_contract, plugin_contract, sync_contract, tiny_checkpoint, toy_run, trainer_contract

OPTIONS = {"rollout.engine": "foreign", "perf.trainer": "foreign", "perf.weight_sync": "foreign"}

TestContract = plugin_contract("foreign", options=OPTIONS)


def test_the_engine_keeps_its_contract():
    import torch
    from miles_foreign.engine import HfEngine
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_checkpoint()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def weights(version):
        draw = torch.Generator().manual_seed(version)
        return [(name, 0.3 * torch.randn(one.shape, generator=draw)) for name, one in model.named_parameters()]

    engine_contract(lambda: HfEngine(str(folder), tokenizer, 128), weights, vocabulary=264, exact=False)


def test_the_trainer_keeps_its_contract():
    trainer_contract("foreign", plugins=["foreign"], options=OPTIONS)


def test_the_sync_keeps_its_contract():
    sync_contract(lambda: Handed("retract"))


def told(*runs):
    """Rollout -> metrics that are no times, and hashes of weights and batches, over the starts of a run."""
    found = {}
    for event in (event for run in runs for event in run.events):
        if event["event"] in ("metrics", "hashes"):
            kept = event.get("metrics") or {name: event[name] for name in ("weights", "batch")}
            found[event["event"], event["rollout_id"]] = {
                name: value for name, value in kept.items() if not name.startswith("perf/")}
    return found


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    def run(name, *flags):
        folder = str(tmp_path / name)
        return toy_run(["foreign"], steps=4, options=OPTIONS, flags=[
            "--save", folder, "--load", folder, "--save-interval", "2", "--debug-determinism", *flags])

    whole, stopped, resumed = run("whole"), run("halves", "--debug-exit-after-rollout", "2"), run("halves")
    assert [event["resumed_from"] for event in resumed.events if event["event"] == "run_start"] == [2]
    assert len(whole.metrics) == 4 and len(resumed.metrics) == 2
    assert told(stopped, resumed) == told(whole)
    assert any(each["train/grad_norm"] > 0 for each in whole.metrics)
