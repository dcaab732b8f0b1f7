"""The kits by part: what is there passes them, and each property has a part that breaks it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from miles_core.config.tables import Algorithm, Checkpoint, Perf, RunConfig
from miles_core.errors import MilesError
from miles_core.stages.advantage import group_relative
from miles_core.stages.rollout import single_turn
from miles_core.stages.sync import InProcess
from miles_core.testing import (
    advantage_contract,
    buffer_contract,
    canned_samples,
    engine_contract,
    filter_contract,
    generator_contract,
    reward_contract,
    sync_contract,
    tiny_checkpoint,
    toy_run,
    trainer_contract,
)
from miles_core.types import Drop, Group, Status

WRONG = (AssertionError, MilesError)

# -------------------------------------------------------------------------------------------------------- advantages


def relative(batch):
    return group_relative(batch, Algorithm())


def whitened(batch):
    values = [sample.reward for sample in batch.samples]
    return [value - sum(values) / len(values) for value in values]


def test_estimators_of_a_group_and_of_a_batch_pass():
    advantage_contract(relative)
    advantage_contract(whitened, across_groups=True)


def forgetful(batch):
    return relative(batch)[1:]


def greedy(batch):
    for sample in batch.samples:
        sample.reward = 0.0
    return [0.0 for _ in batch.samples]


def divides(batch):
    with np.errstate(all="ignore"):
        return [np.float64(v) / np.float64(np.std([s.reward for s in batch.samples])) for v in relative(batch)]


@pytest.mark.parametrize(("estimator", "words"), [
    (forgetful, "answered for"), (greedy, "changes no column and no reward"), (divides, "not .R. finite|depend"),
    (lambda batch: [float(place) for place, _ in enumerate(batch.samples)], "the order of the groups matters"),
    (whitened, "depend on other groups"),
])  # fmt: skip
def test_estimators_that_break_a_property_are_caught(estimator, words):
    with pytest.raises(WRONG, match=words):
        advantage_contract(estimator)


# ------------------------------------------------------------------------------------------------ rewards and filters


def boxed(sample):
    return float(f"\\boxed{{{sample.prompt.label}}}" in sample.text)


async def ranked(samples):
    order = sorted(sample.response_length for sample in samples)
    return [order.index(sample.response_length) for sample in samples]


class Counts:
    """A scorer that remembers."""

    def __init__(self):
        self.seen = 0

    def score(self, sample):
        self.seen += 1
        return float(self.seen)


class Crowd:
    """A scorer that counts who of a group is scored at the same time."""

    def __init__(self):
        self.waiting = Counter()

    async def score(self, sample):
        group = sample.prompt.uid, sample.response_length > 0
        self.waiting[group] += 1
        await asyncio.sleep(0.01)
        found = float(self.waiting[group])
        await asyncio.sleep(0.01)
        self.waiting[group] -= 1
        return found


def marks(sample):
    sample.text += "!"
    return 0.0


def test_scorers_of_samples_and_of_groups_pass():
    reward_contract(boxed, right={"\\boxed{4}": 1.0, "4": 0.0}, label="4")
    reward_contract(ranked)


@pytest.mark.parametrize(("scorer", "words"), [
    (Counts().score, "one after the other"), (marks, "scoring changes"), (lambda sample: float("nan"), "finite"),
    (Crowd().score, "depends on others"),
    (lambda sample: 1 / sample.response_length, "division by zero"), (lambda samples: [1.0], "one number for each"),
])  # fmt: skip
def test_scorers_that_break_a_property_are_caught(scorer, words):
    with pytest.raises(WRONG, match=words):
        reward_contract(scorer)
    with pytest.raises(AssertionError, match="'4' for label '4' scores 0.0, and should 1.0"):
        reward_contract(boxed, right={"4": 1.0}, label="4")


def spread(group):
    rewards = {sample.reward for sample in group.samples}
    return group if len(rewards) > 1 else Drop("no_spread")


def shortens(group):
    group.samples[0].columns["tokens"] = group.samples[0].tokens[:-1]
    return group


def test_a_filter_passes_and_filters_that_break_a_property_are_caught():
    flat = Group(canned_samples()[0].prompt, canned_samples()[:1])
    filter_contract(spread, drops=lambda: flat, keeps=lambda: Group(flat.prompt, canned_samples()[:2]))
    asked = []
    broken = {
        "not NoneType": lambda group: None, "not 'No spread!'": lambda group: Drop("No spread!"), "changes": shortens,
        "a group without samples": lambda group: Group(group.prompt, []),
        "of another prompt": lambda group: Group(replace(group.prompt, uid=99), group.samples),
        "invents": lambda group: Group(group.prompt, [replace(group.samples[0], index=99)]),
        "fares otherwise": lambda group: asked.append(1) or (group if len(asked) % 2 else Drop("second")),
    }  # fmt: skip
    for words, broken_filter in broken.items():
        with pytest.raises(AssertionError, match=words):
            filter_contract(broken_filter)
    with pytest.raises(AssertionError, match="keeps the group that it has to drop"):
        filter_contract(lambda group: group, drops=lambda: flat)
    with pytest.raises(AssertionError, match="drops the group that it has to keep"):
        filter_contract(lambda group: Drop("never"), keeps=lambda: flat)


# ------------------------------------------------------------------------------------------- buffers and generators


def cuts(group):
    for sample in group.samples:
        sample.columns["versions"] = sample.columns["versions"][:-1]
    return group


def halves(group):
    for sample in group.samples:
        sample.columns["loss_mask"] = np.full(sample.response_length, 0.5)
    return group


def shrinks(group):
    for sample in group.samples:
        sample.response_length = sample.response_length // 2
        sample.columns["loss_mask"] = np.ones(sample.response_length)
    return group


def test_keepers_and_selections_pass_and_broken_ones_are_caught():
    buffer_contract(unfinished=lambda group: group, select=lambda groups, rollout_id: groups[::-1])

    calls = []

    def grows(group):
        calls.append(group)
        return replace(group, samples=group.samples * (2 - len(calls) % 2))

    def turns(groups):
        calls.append(groups)
        return groups[:: 1 if len(calls) % 2 else -1]

    for broken, words in ((cuts, "other tokens, log-probs or versions"), (halves, "masks are 0 and 1"),
                          (shrinks, "has another length"), (grows, "more samples than before"),
                          (lambda group: None, "comes back")):
        with pytest.raises(AssertionError, match=words):
            buffer_contract(unfinished=broken)
    for broken, words in ((lambda groups: [*groups, *groups], "returns a group twice"),
                          (lambda groups: [Group(group.prompt, []) for group in groups], "not others or copies"),
                          (turns, "come in another order"), (lambda groups: groups or [1], "of no group")):
        with pytest.raises(AssertionError, match=words):
            buffer_contract(select=broken)


async def two_turns(prompt, generation):
    """Samples whose second half comes from a second call."""
    first = await single_turn(prompt, generation)
    return first if first[0].status is Status.ABORTED else [
        replace(sample, metadata={"turns": 1}) for sample in first]


async def globally(prompt, generation):
    found = await single_turn(prompt, generation)
    found.sort(key=lambda sample: len(generation.engine.requests) * id(sample))
    return [replace(sample, index=place, text=str(id(found))) for place, sample in enumerate(found)]


async def stubborn(prompt, generation):
    try:
        return await single_turn(prompt, generation)
    except Exception:  # noqa: BLE001 - what a careless author writes
        return canned_samples()[:1]


async def headless(prompt, generation):
    found = await single_turn(prompt, generation)
    for sample in found:
        sample.columns["tokens"] = sample.columns["tokens"] + 1
    return found


async def deaf(prompt, generation):
    """Asks the engine without telling anybody, so that it cannot be called back."""
    found = await single_turn(prompt, replace(generation, recall=type(generation.recall)()))
    return found


async def nothing(prompt, generation):
    await single_turn(prompt, generation)
    return []


def other_prompt(sample):
    sample.prompt = replace(sample.prompt, uid=99)


def one_index(sample):
    sample.index = 0


def unfinished(sample):
    sample.status = Status.ABORTED


def other_masks(sample):
    sample.columns["loss_mask"] = sample.columns["loss_mask"] + np.uint8(1)


def no_log_probs(sample):
    sample.columns["rollout_log_probs"] = np.full_like(sample.columns["rollout_log_probs"], np.nan)


def writes(sample):
    sample.prompt.metadata["seen"] = True


@pytest.mark.parametrize(("change", "words"), [
    (other_prompt, "is of another prompt"), (one_index, "have one index"), (unfinished, "nobody called it back"),
    (other_masks, "masks other than 0 and 1"), (no_log_probs, "holds NaN"),
    (writes, "changes its prompt"),
])  # fmt: skip
def test_generators_whose_samples_are_wrong_are_caught(change, words):
    async def generate(prompt, generation):
        found = await single_turn(prompt, generation)
        for sample in found:
            change(sample)
        return found

    with pytest.raises(WRONG, match=words):
        generator_contract(generate)


def test_a_generator_that_ends_as_if_nobody_had_called_it_back_is_caught():
    async def generate(prompt, generation):
        found = await single_turn(prompt, generation)
        for sample in found:
            sample.status = Status.COMPLETED
        return found

    with pytest.raises(AssertionError, match="no sample of it is aborted"):
        generator_contract(generate)


def test_generators_pass_and_broken_ones_are_caught(monkeypatch):
    from miles_core.testing import generators

    generator_contract(single_turn)
    generator_contract(two_turns)
    monkeypatch.setattr(generators, "PATIENCE", 0.3)
    for broken, words in ((globally, "samples depend on when"), (stubborn, "the engine failed, and samples came back"),
                          (headless, "does not begin with its prompt"), (nothing, "a list of samples")):
        with pytest.raises(WRONG, match=words):
            generator_contract(broken)
    with pytest.raises((*WRONG, TimeoutError)):
        generator_contract(deaf)


# ------------------------------------------------------------------------------------ engines, trainers, weight syncs


@pytest.fixture(scope="module")
def engine():
    """(wrap) -> what makes a local engine, and the weights of versions."""
    import torch
    from safetensors.torch import load_file

    from miles_core.backends.local.engine import LocalEngine

    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")

    def weights(version):
        scale = 1 + 0.1 * version
        return [(name, tensor * scale) for name, tensor in tensors.items()]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LocalEngine, folder, weights
    torch.set_num_threads(before)


def test_the_local_engine_passes(engine):
    kind, folder, weights = engine
    engine_contract(lambda: kind(folder, random_init=True), weights, vocabulary=264)


def test_engines_that_break_a_property_are_caught(engine):
    kind, folder, weights = engine

    class Deaf(kind):
        async def pause(self, mode="retract"):
            """Goes on."""

    class Eager(kind):
        async def update_weights(self, weights, version):
            self.version = version
            await super().update_weights(weights, version)

    class Stale(kind):
        async def generate(self, request):
            answer = await super().generate(request)
            answer.versions[:] = 0
            return answer

    class Chatty(kind):
        async def generate(self, request):
            more = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens + 1)
            return await super().generate(replace(request, sampling=more))

    class Random(kind):
        async def generate(self, request):
            self.drawn = getattr(self, "drawn", 0) + 1
            return await super().generate(replace(request, key=self.drawn))

    for broken, words in ((Deaf, "it answers|draws"), (Eager, "version"), (Stale, "weight versions"),
                          (Chatty, "more tokens"), (Random, "other tokens or log-probs|left traces")):
        with pytest.raises(WRONG, match=words):
            engine_contract(lambda broken=broken: broken(folder, random_init=True), weights, vocabulary=264)


def settings():
    return RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tiny_checkpoint())),
                     perf=Perf(bf16=False, update_weight_buffer_size=2000, weight_sync_timeout=20.0))


def test_weight_syncs_pass_and_broken_ones_are_caught():
    from miles_core.backends.sync.shared import SharedMemory

    sync_contract(lambda: InProcess("retract"))
    sync_contract(lambda: SharedMemory(settings()))

    class Rude(InProcess):
        async def sync(self, trainer, engine, version):
            await engine.update_weights(await trainer.weights(), version)

    class Lossy(InProcess):
        async def sync(self, trainer, engine, version):
            await engine.pause()
            stream = [(name, tensor.bfloat16()) for name, tensor in await trainer.weights()]
            await engine.update_weights(stream, version)
            await engine.resume()
            return {"tensors": len(stream), "bytes": 1}

    class Hasty(InProcess):
        async def sync(self, trainer, engine, version):
            try:
                return await super().sync(trainer, engine, version)
            finally:
                await engine.resume()

    for broken, words in ((Rude, "while it serves"), (Lossy, "not what was sent"), (Hasty, "it served|it serves")):
        with pytest.raises(WRONG, match=words):
            sync_contract(lambda broken=broken: broken("retract"))


def test_the_megatron_trainer_passes_and_a_broken_one_is_caught(tmp_path):
    trainer_contract("megatron")
    (tmp_path / "lazy.py").write_text(LAZY)
    with pytest.raises(AssertionError, match="no weight is another"):
        trainer_contract("lazy", plugins=[str(tmp_path / "lazy.py")])


LAZY = '''
from miles_core import hookimpl


class Lazy:
    """Megatron's trainer, whose optimizer steps do nothing."""

    @hookimpl(name="lazy")
    def trainer(self, config, hooks, columns, rank):
        from miles_core.backends.megatron.step import MegatronTrainer

        class Trainer(MegatronTrainer):
            def step(self, index):
                return {"train/loss": 0.0}

        return Trainer(config, hooks, columns, rank)
'''


def test_a_toy_run_trains_with_plugins_within_five_seconds(tmp_path):
    (tmp_path / "loud.py").write_text("from miles_core import hookimpl\n\nclass Loud:\n    @hookimpl\n"
                                      "    def filter_group(self, group):\n        return 1 / 0\n")
    toy_run(steps=1)  # the session's imports
    run = toy_run(["grpo"], options={"rollout.max_lag": 1})
    assert len(run.metrics) == 2 and run.metrics[-1]["rollout/reward/toy"] >= 0
    assert run.seconds < 5  # 1 s on two quiet cores
    with pytest.raises(AssertionError, match="plugin loud .*hook filter_group: ZeroDivisionError"):
        toy_run([tmp_path / "loud.py"], steps=1)
