"""The parity kit's second half: a family cut into tensor-parallel, context-parallel and expert ranks, and stages.

    with Ranks(1) as one, Ranks(2) as two:
        for case in cases(Path("parity.toml")):
            for cut in reshard_parity(case, tmp_path, one, two):
                cut.check()

One whole trainer step of the plan that `miles run` would carry out, on two ranks and on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_core.plugins.plan import prepare
from miles_core.plugins.scan import BUILT_IN
from miles_megatron.architecture import NAMES
from miles_megatron.testing.parity import TINY, Case, Cut, builder, random_model, save
from miles_megatron.testing.ranks import Ranks, batches, distance

CUTS = {
    "TP2 + SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "CP2": ("--context-parallel-size", "2"),
    "EP2": ("--expert-model-parallel-size", "2"),
}
"""The last one only where there are experts."""

RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "96",
       "--trainer-host", "process", "--disable-rewards-normalization",
       "--no-use-distributed-optimizer", "--clip-grad", "0", "--lr", "0")  # fmt: skip


def reshard_parity(case: Case, folder: Path, one: Ranks, two: Ranks) -> Iterator[Cut]:
    """The case on two ranks, under each of CUTS that it can have, beside itself on one."""
    from miles_megatron.hashes import tensor_hashes

    saved = tensor_hashes(save(random_model(case), case, folder).items())
    [batch] = batches(1, groups=2, samples=2, vocab=TINY["vocab_size"])
    name = builder(case.family)[0].manifest.name
    argv = ["--hf-checkpoint", str(folder), *RUN, *([] if name in BUILT_IN else ["--plugin", name])]
    _, expected = one.gradients(prepare(None, argv), batch)
    sparse = any(case.text.get(name) for name in NAMES["experts"][0])
    for layout, flags in CUTS.items():
        if layout == "EP2" and not sparse:
            continue
        plan = prepare(None, [*argv, "--actor-num-gpus-per-node", "2", *flags, *case.flags])
        sharded = two.ask("gradients", list(plan.selected), plan.config, batch)
        yield Cut(case, layout, distance(sharded["gradients"], expected), sharded["hashes"].items() <= saved.items()
                  and sharded["hashes"].keys() == expected.keys())
