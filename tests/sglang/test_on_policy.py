"""What servers compute under --true-on-policy-mode: the trainer's module of transformers, row by row as it does."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from miles_sglang.serving import EXACT

from conftest import ROOT, serving

TEMPERATURE, PROMPT = 0.7, [5, 17, 33, 64, 90, 12]


@pytest.mark.parametrize("case", ["attention", "long"])
def test_a_token_that_decodes_attends_as_a_row_of_prefill_does(found, case):
    """In the servers' kernels, under Triton's interpreter: no bit differs, at any length, wherever the cache has it."""
    assert found[case]["differ"] == 0 and found[case]["from_exact"] < 2e-6


def test_a_long_sequence_has_larger_chunks(found):
    """Sixteen of 256 keys, and one of 512 for the 404 others."""
    assert found["long"]["chunks"] == 17


def test_a_rope_in_one_kernel_rounds_where_transformers_does(found):
    assert found["rope"]["differ"] == 0


def test_a_rotation_back_is_the_gradient_of_a_rope(found):
    assert found["rope"]["gradient"] < 4e-3  # float16 of numbers up to 4


def test_a_gated_activation_in_one_kernel_is_silu_of_the_gate_times_the_other(found):
    assert found["gated"] < 1e-6


def test_products_are_whole_in_each_size_of_blocks(found):
    """That their bits are those of SGLang's own blocks only a GPU can tell (docs/benchmarks.md)."""
    assert list(found["products"].values()) == [0, 0, 0]


@pytest.fixture(params=["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen2"))])
def folder(request, tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(
        request.param, vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=258, pad_token_id=256, initializer_range=0.2)).save_pretrained(folder)
    subprocess.run([sys.executable, ROOT / "examples" / "arithmetic" / "make_tokenizer.py", folder], check=True)
    return folder


def test_a_server_has_the_trainers_log_probs_of_a_prompt_bit_for_bit(config, folder):
    """At a temperature: log_softmax(logits / temperature). Attention is torch's, as Triton's kernels are for GPUs."""
    from miles_fsdp.module import CausalModule, read
    from miles_fsdp.plugin import FsdpOptions
    from miles_fsdp.scored import Temperature
    from miles_sglang.client import Client

    flags = {name: value for name, value in EXACT.items() if name == "model_impl"}
    exact = replace(config, checkpoint=replace(config.checkpoint, hf_checkpoint=str(folder)),
                    algorithm=replace(config.algorithm, true_on_policy_mode=True),
                    surfaces={"server": {"max_total_tokens": 4096, "custom_weight_loader": ["miles_weights.load"],
                                         "disable_radix_cache": True, **flags}})

    async def ask(url):
        client = Client(url, "the server")
        try:
            sampling = {"temperature": TEMPERATURE, "max_new_tokens": 40, "ignore_eos": True}
            first = await client.call("/generate", {"input_ids": PROMPT, "return_logprob": True,
                                                   "sampling_params": sampling}, timeout=60)
            answer = first["meta_info"]["output_token_logprobs"]
            tokens = [*PROMPT, *(token for _, token, *_ in answer)]
            again = await client.call("/generate", {
                "input_ids": tokens, "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 1}}, timeout=60)
            return tokens, answer, again["meta_info"]["input_token_logprobs"][1:]
        finally:
            await client.reset()

    with serving(exact, "on-policy.log") as url:
        tokens, answer, prefilled = asyncio.run(ask(url))
    model = read(str(folder), FsdpOptions(), torch.float32)
    module = CausalModule(model, Temperature(1.0, 1024))
    module.boundaries.set([len(tokens)], torch.device("cpu"))
    with torch.no_grad():
        rows = model.base_model(input_ids=torch.tensor([tokens]), position_ids=torch.arange(len(tokens))[None],
                                use_cache=False).last_hidden_state[0, :-1]
        logits = module._logits(rows)
    targets = torch.tensor(tokens[1:])[:, None]
    expected = torch.log_softmax(logits, 1).gather(1, targets)[:, 0]
    assert torch.equal(torch.tensor([value for value, *_ in prefilled]), expected)
    scaled = torch.log_softmax(logits / TEMPERATURE, 1).gather(1, targets)[len(PROMPT) - 1 :, 0]
    assert (torch.tensor([value for value, *_ in answer]) - scaled).abs().max() < 2e-5
