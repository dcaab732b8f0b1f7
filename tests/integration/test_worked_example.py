"""The worked example of plugins/miles-partial-rollout/README.md: the same groups through plain rollout, dynamic
sampling and partial rollout have the gradient that is worked out by hand.

Three groups of two answers with given tokens and rewards go through the shipped loop: generator, filter, call-back,
joined spans. What it would train on goes to the real trainer. Its gradient has to be

    - sum over tokens of c_t x gradient of log p(token t)

with the numbers c_t of `by_hand`, which are those of the README's table; transformers' autograd has the gradients of
log p. The engine's log-probs are given so that a token of older weights has the ratio that RATIOS says.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_dapo_filter.plugin import DapoFilter, DapoFilterOptions
from miles_partial_rollout.plugin import PartialRollout, PartialRolloutOptions
from miles_testing.clock import run_virtual
from miles_testing.toy import toy_run

from miles_core.build import trainer_part, with_context
from miles_core.config.tables import Rollout, RunConfig
from miles_core.loop import train
from miles_core.plugins import bind
from miles_core.plugins.plan import prepare
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.stages.rollout import Generation, Response, SamplingParams, single_turn
from miles_core.types import Batch, Group, Rank, Sample

README = Path(__file__).parents[2] / "plugins" / "miles-partial-rollout" / "README.md"
PROMPT = (1, 2, 3)
TOKENS = {"A": ([20, 21, 22], [30, 31]), "B": ([40, 41], [50]), "C": ([60, 61, 62, 63], [70, 71])}
REWARDS = {"A": (1.0, 0.0), "B": (1.0, 1.0), "C": (1.0, 0.0)}
CUT = 2
"""Tokens of the first answer of C when it is called back; the second has finished by then."""
RATIOS = {"C": ([1.1, 1.5, 1.0, 1.0], [0.9, 0.5])}
"""Probability by the weights that are trained over that by the weights that drew it; 1 where it is not given."""


@dataclass(frozen=True)
class Case:
    """One column of the table: flags of the run, and prompts in the order in which they are handed out."""

    title: str
    prompts: str
    flags: tuple[str, ...] = ()
    batch: str = "AC"

    @property
    def partial(self) -> bool:
        return self.prompts == "ABACA"

    @property
    def mask(self) -> bool:
        return "--mask-offpolicy-in-partial-rollout" in self.flags


CASES = (
    Case("plain", "AB", batch="AB"), Case("dynamic sampling", "ABC"), Case("partial rollout", "ABACA"),
    Case("... masked", "ABACA", ("--mask-offpolicy-in-partial-rollout",)),
    Case("... `--use-rollout-logprobs`", "ABACA", ("--use-rollout-logprobs",)),
    Case("... `--use-tis`", "ABACA", ("--use-tis",)),
)  # fmt: skip


def by_hand(case: Case) -> dict[tuple[str, int, int], float]:
    """c of each token (group, answer, place) that is in the batch: factor x advantage / (rollouts x trained tokens).

    GRPO's advantage of rewards (1, 0) is +-0.5 / (std + 1e-6) with std sqrt(0.5), that of (1, 1) is 0.
    """
    found, rollouts = {}, 4
    for name in case.batch:
        mean = sum(REWARDS[name]) / 2
        std = math.sqrt(sum((reward - mean) ** 2 for reward in REWARDS[name]))
        for answer, tokens in enumerate(TOKENS[name]):
            advantage = (REWARDS[name][answer] - mean) / (std + 1e-6)
            old = range(CUT if answer == 0 else len(tokens)) if case.partial and name == "C" else ()
            kept = [place for place in range(len(tokens)) if not (case.mask and place in old)]
            for place in range(len(tokens)):
                ratio = RATIOS[name][answer][place] if place in old else 1.0
                factor = 1.0
                if "--use-rollout-logprobs" in case.flags:  # the clipped branch is constant: it has no gradient
                    clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
                    factor = 0.0 if clipped else ratio
                elif "--use-tis" in case.flags:
                    factor = min(ratio, 2.0)
                weight = factor * advantage / (rollouts * len(kept)) if place in kept else 0.0
                found[name, answer, place] = weight
    return found


def table() -> str:
    """The README's table."""
    lines = ["| token | version | ratio | " + " | ".join(case.title for case in CASES) + " |",
             "|---" * (3 + len(CASES)) + "|"]
    columns = [by_hand(case) for case in CASES]
    for name, answers in TOKENS.items():
        for answer, tokens in enumerate(answers):
            for place, token in enumerate(tokens):
                old = name == "C" and (answer == 1 or place < CUT)
                cells = [column.get((name, answer, place)) for column in columns]
                ratio = RATIOS[name][answer][place] if old else 1
                lines.append(f"| {name}{answer + 1}, {token} | {'1' if old else '2'} | {ratio:g} | " + " | ".join(
                    "-" if cell is None else f"{cell:.4f}".replace("-0.0000", "0.0000") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


class Script:
    """An engine that answers what it is told: the first answer to C ends after CUT tokens until it is asked again.

    Args:
        log_probs: (group, answer) -> [R] of the weights that are trained.
    """

    version = 0

    def __init__(self, order: str, partial: bool, log_probs):
        self.order, self.partial, self.log_probs = order, partial, log_probs
        self.ended = asyncio.Event()

    async def start(self):
        """Ready."""

    async def abort(self, ids=None):
        self.ended.set()

    async def generate(self, request):
        _, uid, answer = request.id.split("-")
        name, answer, held = self.order[int(uid) % len(self.order)], int(answer), len(request.input_ids) - len(PROMPT)
        tokens, stop = TOKENS[name][answer], None
        await asyncio.sleep(1.0 if name == "A" else 0.1)  # so that C begins before the batch is full
        if self.partial and name == "C" and answer == 0 and held == 0:
            await self.ended.wait()
            stop = CUT
        old = self.partial and name == "C" and self.version == 1
        ratios = np.array(RATIOS[name][answer] if old else [1.0] * len(tokens))
        log_probs = (self.log_probs[name, answer] - np.log(ratios))[held:stop]
        return Response(np.array(tokens[held:stop], np.int32), log_probs.astype(np.float32),
                        np.full(len(log_probs), self.version, np.int32), "abort" if stop else "stop")


class Sync:
    async def sync(self, trainer, engine, version):
        engine.version = version
        return {}


async def score(sample: Sample) -> float:
    return REWARDS[sample.metadata["name"]][sample.index]


def batch_of(case: Case, log_probs) -> Batch:
    """What the loop would train on."""
    run = toy_run(rollouts=2 if case.partial else 1, batch_size=2, max_lag=0, credit=int(case.partial),
                  duration=lambda uid, tries: 0.0, again=frozenset({"aborted"}), resumes=True)
    run.engine, run.weight_sync = Script(case.prompts, case.partial, log_probs), Sync()
    run.scoring = Scoring({"given": score}, {"given": 1.0}, weighted_sum, 60.0)
    config = RunConfig(rollout=Rollout(n_samples_per_prompt=2, rollout_max_response_len=8))
    if case.title != "plain":
        run.chain = DapoFilter(DapoFilterOptions(), config).filter_group
    if case.partial:
        plugin = PartialRollout(PartialRolloutOptions(mask_offpolicy_in_partial_rollout=case.mask), config)
        run.unfinished = plugin.unfinished

    async def generate(slot):
        samples = await single_turn(slot.prompt, Generation(
            engine=run.engine, sampling=SamplingParams(max_new_tokens=8), samples=2, key=lambda index, turn: 0,
            decode=lambda ids, skip: "", timeout=600.0, begun=slot.begun, recall=slot.recall))
        for sample in samples:
            sample.metadata["name"] = case.prompts[slot.prompt.uid % len(case.prompts)]
        return Group(slot.prompt, samples)

    run.generate = generate
    run_virtual(lambda: train(run))
    return run.trainer.batches[-1]


def names(batch: Batch) -> str:
    return "".join(sorted(group.samples[0].metadata["name"] for group in batch.groups))


@pytest.fixture(scope="module")
def model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny / "qwen3", dtype=torch.float64, attn_implementation="eager")


def log_probs_of(model, name: str, answer: int) -> torch.Tensor:
    """[R] log-probs of an answer, with gradient."""
    ids = torch.tensor([*PROMPT, *TOKENS[name][answer]])
    rows = torch.arange(len(PROMPT), len(ids))
    return torch.log_softmax(model(ids[None]).logits[0], -1)[rows - 1, ids[rows]]


@pytest.fixture(scope="module")
def trainers(tiny, tmp_path_factory):
    """(case) -> the real trainer of a step of four samples that leaves the weights as they are."""
    run_file = tmp_path_factory.mktemp("worked") / "run.toml"
    run_file.write_text(f"""
    [checkpoint]
    hf_checkpoint = "{tiny / "qwen3"}"
    [rollout]
    prompt_data = "{tiny}/train.jsonl"
    input_key = "prompt"
    label_key = "label"
    apply_chat_template = true
    rm_type = ["math"]
    rollout_batch_size = 2
    n_samples_per_prompt = 2
    num_rollout = 2
    rollout_max_response_len = 8
    [perf]
    bf16 = false
    [optimizer]
    lr = 0.0
    clip_grad = 0.0
    """)
    torch.set_num_threads(1)
    made = []

    def make(case: Case):
        plan = prepare(run_file, ["--plugin", "grpo", *case.flags])
        trainer = trainer_part(plan.selected, with_context(plan.config), Rank(),
                               bind.bind(plan.selected, plan.config, "trainer"))
        if made:
            trainer.models = made[0].models
        else:
            trainer.load()
            made.append(trainer)
        return trainer

    return make


def gradient(trainer, batch: Batch) -> dict[str, torch.Tensor]:
    """Of one optimizer step, by Hugging Face name."""
    trainer.take_batch(batch)
    trainer.score()
    trainer.advantage()
    trainer.step(0)
    trainer.end_batch()
    with torch.no_grad():
        parameters = list(trainer.models.actor.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = {name: tensor.double().clone() for name, tensor in trainer.weights()}
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_gradient_is_the_one_worked_out_by_hand(case, model, trainers):
    with torch.no_grad():
        given = {(name, answer): log_probs_of(model, name, answer).numpy() for name in TOKENS for answer in (0, 1)}
    batch = batch_of(case, given)
    assert names(batch) == case.batch
    if case.partial:
        first = next(s for s in batch.samples if s.metadata["name"] == "C" and s.index == 0)
        assert first.columns["versions"].tolist() == [1, 1, 2, 2] and first.metadata["start_rollout_id"] == 0

    model.zero_grad()
    weights = by_hand(case)
    total = sum(-sum(weights[name, answer, place] * value for place, value in enumerate(
        log_probs_of(model, name, answer))) for name in case.batch for answer in (0, 1))
    total.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = gradient(trainers(case), batch)
    assert found.keys() == expected.keys()
    gap = math.sqrt(sum(float((found[name] - value).square().sum()) for name, value in expected.items()))
    size = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert size > 1e-3 and gap / size <= 1e-5


def test_the_cases_differ_where_the_text_says_so():
    plain, dynamic, partial, masked, behaviour, tis = map(by_hand, CASES)
    assert partial == dynamic, "by default an older token counts like one of the current weights"
    assert plain["A", 0, 0] == dynamic["A", 0, 0] and plain["B", 0, 0] == 0
    assert masked["C", 0, 2] == 2 * partial["C", 0, 2] and masked["C", 1, 0] == 0
    assert behaviour["C", 0, 1] == 0 == behaviour["C", 1, 1] and behaviour["C", 0, 0] == 1.1 * partial["C", 0, 0]
    assert tis["C", 0, 1] == 1.5 * partial["C", 0, 1]


def test_the_readme_has_these_numbers():
    assert table() in README.read_text(encoding="utf-8"), f"its table should be\n{table()}"
