"""Routing replay as a single file outside the repository: its ids travel the whole way without a line in the core."""

import asyncio

import numpy as np
import pytest
from miles_testing.clock import run_virtual
from miles_testing.toy import toy_run

from miles_core.columns import Columns, split
from miles_core.config.tables import RunConfig
from miles_core.errors import OwnerError, SharedStateError
from miles_core.loop import train
from miles_core.plugins import bind, resolve, select
from miles_core.stages.reward import Scoring
from miles_core.stages.rollout import Generation, Response, SamplingParams, single_turn
from miles_core.types import Group

REPLAY = '''
"""Carry the engine's expert ids to the trainer."""
from miles_core import hookimpl, option
from dataclasses import dataclass, replace

@dataclass(frozen=True, kw_only=True)
class Options:
    keep: bool = option(True, "Ask for the ids.", flags=("--use-toy-replay",))

class Replay:
    """Toy routing replay."""
    def __init__(self, options: Options):
        self.options = options
        self.seen = []

    @hookimpl
    def columns(self):
        from miles_core.columns import Align, Column
        return [Column("routes", Align.PREDICTION, "int16", axes=("layer", "topk"), pad=-1, missing="pad",
                       owner="replay")]

    @hookimpl
    def generate_request(self, request):
        return replace(request, want=request.want | {"routed_experts"})

    @hookimpl
    def generate_response(self, sample, response):
        sample.columns["routes"] = response.extra["routed_experts"]
        return sample

    @hookimpl
    def microbatch(self, proceed, packed, model):
        self.seen.append(packed.rows["routes"])
        return proceed(packed)

    @hookimpl("policy_loss", name="twice")
    def one(self, inputs):
        return 2 * inputs.log_probs, {}

    @hookimpl("policy_loss", name="thrice")
    def other(self, inputs):
        return 3 * inputs.log_probs, {}

    @hookimpl("reward", name="length")
    def length(self, sample):
        return float(sample.response_length)

    @hookimpl("reward", name="rank")
    async def rank(self, samples):
        return [float(i) for i in range(len(samples))]
'''


class Engine:
    """Answers with ids that tell which prompt, position, layer and choice they belong to."""

    version = 1

    async def generate(self, request):
        assert "routed_experts" in request.want
        count = 3 + request.key % 4
        rows = len(request.input_ids) + count - 1
        ids = np.arange(rows * 4 * 2).reshape(rows, 4, 2) + 100 * (request.key % 7)
        return Response(np.arange(count), np.full(count, -1.0), np.ones(count, np.int32), "stop", "",
                        {"routed_experts": ids})


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "replay.py"
    path.write_text(REPLAY)
    return select.select([(str(path), "--plugin")], [])


def config(selected):
    return RunConfig(options={one.manifest.name: {} for one in selected})


def test_ids_reach_the_consumer_through_generator_filter_buffer_packing_and_split(plugin):
    rollout, trainer = (bind.bind(plugin, config(plugin), role) for role in ("rollout", "trainer"))
    run = toy_run(rollouts=2, batch_size=3, max_lag=0, duration=lambda uid, tries: 1.0, dropped=lambda uid: uid == 1)

    async def generate(slot):
        prompt = slot.prompt
        generation = Generation(Engine(), SamplingParams(), 2, lambda index, turn: prompt.uid * 31 + index,
                                lambda ids, skip: "", 9.0,
                                on_request=lambda request: rollout.generate_request(request, prompt),
                                on_response=rollout.generate_response)
        group = Group(prompt, await single_turn(prompt, generation))
        await asyncio.sleep(1.0 + prompt.uid % 3)
        return group

    run.generate = generate
    run.scoring = Scoring({name: rollout.reward[name] for name in ("length", "rank")}, {"length": 1.0, "rank": 0.5},
                          lambda sample, weights: sum(weights[n] * v for n, v in sample.rewards.items()), 9.0)
    run_virtual(lambda: train(run))

    columns = Columns(trainer.columns())
    for batch in run.trainer.batches:
        for sample in batch.samples:
            columns.check(sample)
            assert sample.columns["routes"].shape == (sample.length - 1, 4, 2)
            assert sample.reward == sample.response_length + 0.5 * sample.index
        packed = columns.pack(batch.samples, multiple=4)
        parts = [split(packed, rank, 2) for rank in range(2)]
        for part in parts:
            assert trainer.microbatch(lambda given: "hidden", part, "actor") == "hidden"
        consumed = trainer.instances["replay"].seen[-2:]
        # Token t of a sample and the ids of its prediction stand in the same row, on whichever side of the split.
        pairs = {(int(t), tuple(r.ravel())) for part, rows in zip(parts, consumed)
                 for t, r in zip(part.rows["tokens"], rows)}
        for sample in batch.samples:
            for t, ids in zip(sample.tokens, sample.columns["routes"]):
                assert (int(t), tuple(ids.ravel())) in pairs
    assert rollout.instances["replay"].seen == [], "an instance belongs to one role"


def test_losses_and_scorers_live_side_by_side_and_are_chosen_by_name(plugin):
    trainer, rollout = bind.bind(plugin, config(plugin), "trainer"), bind.bind(plugin, config(plugin), "rollout")
    assert set(trainer.policy_loss) == {"twice", "thrice"} and set(rollout.reward) == {"length", "rank"}

    class Inputs:
        log_probs = 5.0

    assert trainer.policy_loss["thrice"](Inputs) == (15.0, {})
    manifest = plugin[0].manifest
    assert [offer.name for offer in manifest.offers if offer.hook == "reward"] == ["length", "rank"]
    assert manifest.options["keep"].flags == ("--use-toy-replay",)


def test_two_owners_of_one_name_are_both_named(plugin, tmp_path):
    copy = tmp_path / "copy.py"
    copy.write_text(REPLAY)
    both = select.select([(str(tmp_path / "replay.py"), "a"), (str(copy), "b")], [])
    with pytest.raises(OwnerError, match="replay and copy"):
        resolve.resolve(both, RunConfig())


SHARING = {
    "on the class": ("class Shares:\n    memory = {}\n", "keeps memory on its class"),
    "in the module": ("MEMORY = []\nclass Shares:\n", "MEMORY between its roles"),
    "through a default": ("def made(memory=[]):\n    return memory\n"
                          "class Shares:\n    def __init__(self):\n        self.memory = made()\n",
                          "self.memory between its roles"),
}


@pytest.mark.parametrize("how", SHARING)
def test_a_plugin_that_shares_state_between_roles_is_caught(how, tmp_path):
    head, message = SHARING[how]
    use = {"on the class": "self.memory", "in the module": "MEMORY", "through a default": "self.memory"}[how]
    body = f'''
    @hookimpl
    def filter_group(self, group):
        {use}
        return group
    @hookimpl
    def loss_terms(self, inputs):
        {use}
        return {{}}
'''
    path = tmp_path / f"shares_{abs(hash(how))}.py"
    path.write_text("from miles_core import hookimpl\n" + head + body)
    selected = select.select([(str(path), "--plugin")], [])
    with pytest.raises(SharedStateError, match=message):
        bind.check_roles_apart([bind.bind(selected, config(selected), role)
                                for role in ("driver", "rollout", "trainer")])
