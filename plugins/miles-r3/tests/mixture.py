"""A tiny mixture of experts whose bfloat16 engine routes otherwise than its float32 trainer, and what both are held to.

A router's rows are one direction plus little else, so its logits lie close together and bfloat16 often orders them
otherwise; experts are large, so that it shows. transformers with the given routes forced on it is the reference.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from miles_local.engine import LocalEngine
from miles_r3.plugin import R3, R3Options

from miles_core.config.tables import Checkpoint, RunConfig
from miles_core.stages.rollout import Request, SamplingParams, to_sample
from miles_core.types import Batch, Group, Prompt

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258,
             tie_word_embeddings=False, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=24,
             norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1])  # fmt: skip
"""The second layer is dense."""
SPARSE = (0, 2, 3)
GROUPS, SAMPLES = 4, 4


def checkpoint(folder: Path) -> Path:
    """Random weights as the module's docstring says."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.5 if "experts" in name else 3)
            if name.endswith("gate.weight"):
                parameter.copy_(0.06 * torch.randn(1, SIZES["hidden_size"]) + 0.002 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def rollout(folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Batch:
    """What a real engine draws: answers of unequal lengths, their log-probs and routes."""
    draw = np.random.default_rng(seed)
    plugin = R3(R3Options(), RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(folder))))

    async def sample() -> list[Group]:
        engine = LocalEngine(folder, dtype=dtype)
        await engine.start()
        try:
            return [await group(engine, uid) for uid in range(GROUPS)]
        finally:
            await engine.stop()

    async def group(engine: LocalEngine, uid: int) -> Group:
        ids = tuple(int(token) for token in draw.integers(0, 256, draw.integers(3, 12)))
        prompt = Prompt(uid, uid, "", ids)
        lengths = draw.integers(1, 41, SAMPLES)
        requests = [plugin.generate_request(Request(
            f"{uid}-{i}", ids, SamplingParams(max_new_tokens=int(length), ignore_eos=True), 100 * uid + i), prompt)
            for i, length in enumerate(lengths)]  # fmt: skip
        answers = await asyncio.gather(*map(engine.generate, requests))
        samples = [plugin.generate_response(to_sample(prompt, i, request, answer), answer)
                   for i, (request, answer) in enumerate(zip(requests, answers, strict=True))]
        for one in samples:
            one.columns["versions"] = np.ones(one.response_length, np.int32)
            one.reward = float(draw.integers(0, 3))
        return Group(prompt, samples)

    return Batch(0, asyncio.run(sample()))


@contextmanager
def forced(model, routes: np.ndarray | None):
    """transformers' routers take the experts of [rows, layers, topk], whatever their logits say; None: they are free.

    Yields the experts that each sparse layer would have chosen by itself, by its number.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    free: dict[int, torch.Tensor] = {}

    def hook(number):
        def change(router, _inputs, output):
            logits, weights, chosen = output
            free[number] = chosen
            if routes is None:
                return output
            rows = torch.cat([torch.from_numpy(routes[:, number].astype(np.int64)), chosen[len(routes):]])
            weights = torch.softmax(logits.float(), -1).gather(1, rows)
            return logits, weights / weights.sum(-1, keepdim=True), rows
        return change

    routers = {number: model.model.layers[number].mlp.gate for number in SPARSE}
    assert all(isinstance(router, Qwen3MoeTopKRouter) for router in routers.values())
    handles = [router.register_forward_hook(hook(number)) for number, router in routers.items()]
    try:
        yield free
    finally:
        for handle in handles:
            handle.remove()


def log_probs(model, sample, routes: np.ndarray | None) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """[R] of a sample's response, and [T-1, topk] free experts by layer."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    with forced(model, routes) as free:
        logits = model(tokens[None]).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    return found[-sample.response_length:], {number: chosen[:-1] for number, chosen in free.items()}


def reference(folder: Path):
    """The checkpoint in transformers, float32."""
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def tokenizer(folder: Path) -> None:
    """The byte tokenizer of the examples beside the model."""
    import subprocess
    import sys

    make = Path(__file__).parents[3] / "examples" / "arithmetic" / "make_tokenizer.py"
    subprocess.run([sys.executable, make, folder], check=True)
