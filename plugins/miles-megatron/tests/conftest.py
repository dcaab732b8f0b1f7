"""Megatron is initialised once per process; models are tiny and random, made by transformers at test time."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))  # the tests' own modules can be imported by name

import pytest

TINY = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "attn_implementation": "eager",
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}


@pytest.fixture
def config(tmp_path):
    """(the keys of a config.json) -> a run on it."""
    from miles_core.config.load import with_values
    from miles_core.config.tables import RunConfig

    def make(keys):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return with_values(RunConfig(), "test", checkpoint__hf_checkpoint=str(tmp_path))

    return make


@pytest.fixture(scope="session")
def megatron():
    """The process groups of one rank. Imports are in here because some tests of this folder want no torch."""
    import torch
    from miles_megatron import cpu

    torch.set_num_threads(1)
    cpu.initialize()


def with_process_groups():
    """Makes them where a conversion in a test of another package has left all groups."""
    from miles_megatron import cpu

    cpu.install()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        cpu.initialize()


@pytest.fixture(autouse=True)
def process_groups(request):
    """They are there for every test that wants them."""
    if "megatron" in request.fixturenames:
        with_process_groups()


@pytest.fixture(scope="session")
def hf_model(megatron):
    """(moe, tied, **config) -> a transformers model with weights large enough to tell right from wrong."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    def make(moe=False, tied=False, **changes):
        torch.manual_seed(0)
        values = {**TINY, **(MOE if moe else {}), "tie_word_embeddings": tied, **changes}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values)) if moe else Qwen3ForCausalLM(Qwen3Config(**values))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.mul_(4)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def port(megatron, tmp_path_factory):
    """(transformers model, **overrides) -> (Megatron model with the same weights, weight map)."""
    from miles_megatron import families, model, weights

    def make(hf, **overrides):
        with_process_groups()  # fixtures of a module are made before those of a test
        bf16 = overrides.pop("bf16", False)
        family = families.FAMILIES[hf.config.model_type]
        spec, weight_map = family.model_spec(hf.config), family.weight_map(hf.config)
        ours = model.build(model.transformer_config(spec, overrides, bf16=bf16), spec)
        folder = tmp_path_factory.mktemp("hf")
        hf.save_pretrained(folder)
        weights.load_hf(folder, ours, weight_map)
        return ours, weight_map

    return make


@pytest.fixture(scope="session")
def packed_logits(megatron):
    """(Megatron model, sequences) -> [total, V]."""
    import torch
    from miles_megatron import packed_layout

    def run(ours, sequences):
        cu = torch.tensor([0] + [len(s) for s in sequences]).cumsum(0)
        hidden = ours(torch.cat(sequences)[None], None, None, packed_seq_params=packed_layout.packed_rows(cu))
        return hidden[:, 0] @ ours.output_weight.t()

    return run


@pytest.fixture
def sequences():
    """Unequal lengths, several of them in one bucket, not in the order of their buckets."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator) for n in (13, 40, 1, 37, 64, 40, 100, 15)]

KINDS = [
    pytest.param({}, id="dense"),
    pytest.param({"tied": True}, id="dense-tied"),
    pytest.param({"moe": True, "norm_topk_prob": True}, id="moe-normalised"),
    pytest.param({"moe": True, "norm_topk_prob": False, "tied": True}, id="moe-raw-tied"),
    pytest.param({"moe": True, "norm_topk_prob": True, "mlp_only_layers": [1]}, id="moe-mixed"),
]


@pytest.fixture(params=KINDS)
def kind(request):
    """What to give to `hf_model`, each in turn."""
    return request.param


@pytest.fixture(scope="session")
def train(megatron, hf_model, port):
    """A session of training: make(**options) -> run(steps, seed) -> [(loss, grad norm, lr)]; .chunks, .optimizer …"""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from miles_megatron import logprob, optimizer, packed_layout

    hf = hf_model()

    class Session:
        def __init__(self, bf16=False, **options):
            self.model, _ = port(hf, bf16=bf16)
            self.options = optimizer.OptimizerOptions(**{"lr": 1e-3, "train_iters": 10, **options})
            self.chunks = optimizer.wrap([self.model], self.model.config, self.options)
            self.optimizer, self.scheduler = optimizer.make_optimizer(self.chunks, self.options)

        def backward(self, ids):
            optimizer.zero_gradients(self.chunks, self.optimizer)
            rows = packed_layout.packed_rows([0, 20, 64])
            hidden = self.chunks[0](ids[None], None, None, packed_seq_params=rows)[:, 0]
            loss = -logprob.token_log_probs(hidden[:-1], self.model.output_weight, ids[1:])[0].mean()
            loss.backward()
            finalize_model_grads(self.chunks)
            return loss.item()

        def __call__(self, steps, seed=0):
            generator, out = torch.Generator().manual_seed(seed), []
            for _ in range(steps):
                loss = self.backward(torch.randint(0, 97, (64,), generator=generator))
                assert optimizer.non_finite_gradients(self.chunks) == []
                lr = self.optimizer.param_groups[0]["lr"]
                _, norm, _ = self.optimizer.step()
                self.scheduler.step(1)
                out.append((loss, float(norm), lr))
            return out

    return Session
