"""Sides on tiny random models: side A of each and its noisy replay are computed once."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from miles_divergence.compare import compare
from miles_divergence.replay import replay
from miles_megatron.testing.parity import Case, builder, cases, random_model, save
from miles_megatron.testing.ranks import batches

from miles_core.plugins.plan import prepare

PACKAGES = Path(__file__).parents[2]
DEFECTS = Path(__file__).with_name("defects.py")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
BUILT_IN = [Case("qwen3", "Qwen3"), Case("qwen3_moe", "Qwen3-MoE", EXPERTS),
            Case("granite", "Granite", {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 4.0,
                                        "attention_multiplier": 0.0625, "initializer_range": 0.25}),
            Case("qwen2", "Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
            Case("llama", "Llama", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True})]
RUN_FILE = """
plugins = [{plugins}]
[rollout]
prompt_data = "none.jsonl"
num_rollout = 1
rollout_batch_size = 2
n_samples_per_prompt = 4
rollout_max_response_len = 41
[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 96
[algorithm]
rewards_normalization = false
"""


def recorded():
    """Eight samples of unequal lengths, without the token that transformers' embeddings give no gradient."""
    (batch,) = batches(1, groups=2, samples=4, vocab=96)
    for sample in batch.samples:
        sample.columns["tokens"] = np.maximum(sample.columns["tokens"], 3)
    return batch


def variants():
    """Of every family of the repository, by name."""
    files = sorted(PACKAGES.glob("miles-specs-*/tests/parity.toml"))
    return {case.name: case for case in [*(case for file in files for case in cases(file)), *BUILT_IN]}


class Sides:
    """Two sides of a model, and what compares them."""

    def __init__(self, folder):
        self.folder, self.batch, self.cases, self._known = folder, recorded(), variants(), {}
        self.defects = DEFECTS

    def run_file(self, name):
        """Of a variant, whose checkpoint is written when it is first asked for."""
        case, folder = self.cases[name], self.folder / name.replace(" ", "-")
        if not folder.is_dir():
            save(random_model(case), case, folder)
            plugins = dict.fromkeys(["grpo", builder(case.family)[0].manifest.name])
            plugins.pop("megatron", None)
            (folder / "run.toml").write_text(
                RUN_FILE.format(plugins=", ".join(f'"{one}"' for one in plugins))
                + f'[checkpoint]\nhf_checkpoint = "{folder}"\n')
        return folder / "run.toml"

    def side(self, name, *flags):
        """What a side of it computes; remembered unless a defect is planted."""
        if (name, flags) not in self._known:
            out = self.folder / f"side-{len(self._known)}"
            plan = prepare(self.run_file(name), [*flags, "--plugin", "divergence", "--divergence.out", str(out),
                                                 "--load-debug-rollout-data", str(out / "{rollout_id}")])
            self._known[name, flags] = replay(plan, self.batch, out)
        return self._known[name, flags]

    def compare(self, name, a, b):
        """Side a (flags), side b, and a with noise."""
        one, other = self.side(name, *a), self.side(name, *b)
        noise = max(one.epsilon, other.epsilon)
        return compare(one, other, self.side(name, *a, "--divergence.noise", repr(noise)))

    def planted(self, name, trainer, defect):
        """A defect in one trainer, beside the other."""
        sound = "megatron" if trainer == "fsdp" else "fsdp"
        defective = ["--trainer", trainer, "--plugin", str(DEFECTS), "--defects.plant", defect]
        return self.compare(name, ["--trainer", sound], defective)


@pytest.fixture(scope="session")
def sides(tmp_path_factory):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return Sides(tmp_path_factory.mktemp("sides"))
