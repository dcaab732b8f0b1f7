"""INT4 on a GPU: the trainer's layers compute with rounded weights, and a real SGLang serves the same ones packed.

    python tests/gpu/int4.py                        both models, one GPU
    python tests/gpu/int4.py moe --backend triton   one of them; SGLang's kernel for experts (marlin by default)

layers  Transformer Engine's linear and grouped layers with rounding, against the same layers filled with the rounded
        weights: hidden states and gradients have to have the same bits
served  `miles convert hf-to-int4`, an SGLang server on it, 8 prompts x 64 tokens; the server's log-probs against the
        trainer's with and without rounding
memory  the server's linear layers, packed and plain

What a run gives, with new weights at every sync, is `python tests/gpu/moe.py int4`.

Prints a line of JSON for each; the exit status is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

GROUP, PROMPTS, TOKENS = 32, 8, 64
COMMON = dict(vocab_size=32768, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
              head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False)
SHAPES = {
    "dense": COMMON | {"intermediate_size": 3072},
    "moe": COMMON | {"intermediate_size": 3072, "num_experts": 32, "num_experts_per_tok": 4,
                     "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "wide": COMMON | {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "head_dim": 128,
                      "intermediate_size": 12288},
}
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
         "--skip-server-warmup", "--skip-tokenizer-init", "--disable-cuda-graph", "--mem-fraction-static", "0.3",
         "--disable-radix-cache", "--host", "127.0.0.1"]


def checkpoint(kind: str, folder: Path) -> None:
    """A random bfloat16 model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPES[kind])) if kind == "moe" else
             Qwen3ForCausalLM(Qwen3Config(**SHAPES[kind])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.dim() > 1 else 1)
    model.to(torch.bfloat16).save_pretrained(folder)


def convert(source: Path, out: Path) -> None:
    command = "from miles_core.cli import main; main()"
    subprocess.run([sys.executable, "-c", command, "convert", "hf-to-int4", source, out, "--group-size", str(GROUP)],
                   check=True, timeout=120)


def unpacked(source: Path, packed: Path, out: Path) -> None:
    """A plain checkpoint of the rounded weights."""
    from miles_int4_qat.stream import unpacked as unpack
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    held = {name: tensor for file in sorted(packed.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    save_file(dict(unpack(held.items())), out / "model.safetensors", {"format": "pt"})


def trainer(folder: Path, rounds: bool):
    """A Megatron model of Transformer Engine layers, filled from a checkpoint."""
    from miles_int4_qat.layers import round_weights
    from miles_int4_qat.names import chosen
    from miles_megatron import cpu, model, weights
    from miles_megatron.families import FAMILIES
    from transformers import AutoConfig

    cpu.initialize()
    hf = AutoConfig.from_pretrained(folder)
    family = FAMILIES[hf.model_type]
    spec, weight_map = family.model_spec(hf), family.weight_map(hf)
    config = model.transformer_config(spec, {}, bf16=True)
    made = model.build(config, spec)
    if rounds:
        names = chosen([name for _, _, names in weights.instances(weight_map) for name in names], "auto")
        round_weights(made, weight_map, names, GROUP, torch.bfloat16, lambda: True)
    made = made.to(cpu.device())
    weights.load_hf(folder, made, weight_map)
    return made


def hidden_states(made, sequences: list[list[int]]) -> torch.Tensor:
    """[tokens, H] of packed sequences."""
    from miles_megatron import cpu
    from miles_megatron.packed_layout import packed_rows

    count = sum(map(len, sequences))
    tokens = torch.zeros(1, -(-count // 16) * 16, dtype=torch.int64)
    tokens[0, :count] = torch.tensor([token for one in sequences for token in one])
    bounds = [0, *torch.tensor([len(one) for one in sequences]).cumsum(0).tolist()]
    return made(tokens.to(cpu.device()), None, None, packed_seq_params=packed_rows(bounds))[:count, 0]


def log_probs(made, sequences: list[list[int]], prompt: int) -> torch.Tensor:
    """Of all tokens after the prompts, one after another."""
    from miles_megatron.logprob import token_log_probs

    with torch.no_grad():
        rows = hidden_states(made, sequences).split([len(one) for one in sequences])
        parts = [token_log_probs(row[prompt - 1 : -1], made.output_weight, torch.tensor(one[prompt:]).to(row.device))
                 for row, one in zip(rows, sequences, strict=True)]
    return torch.cat([part for part, _ in parts]).float().cpu()


def layers(plain: Path, rounded: Path) -> dict[str, float]:
    """Rounding in the forward against weights that are rounded."""
    draw = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 32768, (n,), generator=draw).tolist() for n in (37, 1, 64, 200)]
    found = []
    for folder, rounds in ((plain, True), (rounded, False), (plain, False), (rounded, False)):
        made = trainer(folder, rounds)
        hidden = hidden_states(made, sequences).float()
        hidden.square().sum().backward()
        found.append((hidden.detach(), {name: p.grad for name, p in made.named_parameters() if p.grad is not None}))
    (ours, gradients), (expected, wanted), (without, _), (again, _) = found
    assert gradients.keys() == wanted.keys()
    same = all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    figures = {"hidden_difference": float((ours - expected).abs().max()), "gradients_same_bits": same,
               "gradient_difference": max(float((gradients[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(
                   1e-12)) for name in wanted), "rounding_itself": float((ours - without).norm() / without.norm())}
    # Experts' outputs may be summed in another order from call to call, and a route changes by that now and then: the
    # same model twice says how far.
    noise = float((again - expected).abs().max())
    figures["same_model_twice"] = noise
    assert figures["hidden_difference"] <= 2 * noise, figures
    assert noise or figures["gradient_difference"] < 1e-2, figures
    assert figures["rounding_itself"] > 1e-3, figures
    return figures


class Server:
    """An SGLang server on the first GPU."""

    def __init__(self, folder: Path, log: Path, flags: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--model-path", folder, "--port", str(self.port), *flags],
            stdout=log.open("w"), stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"})

    def __enter__(self) -> Server:
        end = time.monotonic() + 400
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                return self
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-4000:])

    def __exit__(self, *_error) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def post(self, path: str, body: dict, seconds: float = 60) -> object:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=seconds).read())

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
        """Whole sequences, and the log-probs of what was drawn."""
        body = {"input_ids": prompts, "return_logprob": True,
                "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}}
        answers = [answer["meta_info"]["output_token_logprobs"] for answer in self.post("generate", body, 120)]
        return ([prompt + [entry[1] for entry in answer] for prompt, answer in zip(prompts, answers, strict=True)],
                torch.tensor([entry[0] for answer in answers for entry in answer]))

    def kernels(self) -> list[str]:
        """What the log says of them."""
        words = ("marlin", "triton", "wna16", "compressed")
        lines = [line for line in self.log.read_text(errors="replace").splitlines()
                 if any(word in line.lower() for word in words) and "server_args" not in line]
        return [line[-160:] for line in lines[:4]]


def served(plain: Path, packed: Path, log: Path, backend: str | None) -> dict[str, object]:
    """The server against the trainer."""
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 32768, (24,), generator=draw).tolist() for _ in range(PROMPTS)]
    begin = time.monotonic()
    with Server(packed, log, [*FLAGS, *(["--moe-runner-backend", backend] if backend else [])]) as server:
        ready = time.monotonic() - begin
        sequences, theirs = server.sample(prompts)
        gaps = {}
        for name, rounds in (("rounding", True), ("plain", False)):
            made = trainer(plain, rounds)
            gaps[name] = (log_probs(made, sequences, len(prompts[0])) - theirs).abs()
            del made
        figures = {"ready_s": round(ready, 1), "kernels": server.kernels(), "tokens": len(theirs),
                   "difference": float(gaps["rounding"].mean()), "difference_max": float(gaps["rounding"].max()),
                   "without_rounding": float(gaps["plain"].mean())}
    assert figures["difference"] < 0.05 and figures["without_rounding"] > 2 * figures["difference"], figures
    return figures


def memory(folder: Path) -> dict[str, float]:
    """GB of a server's linear layers, packed and plain, of a model that consists of little else."""
    plain, packed = folder / "wide", folder / "wide-int4"
    checkpoint("wide", plain)
    convert(plain, packed)
    embeddings = 2 * 2 * SHAPES["wide"]["vocab_size"] * SHAPES["wide"]["hidden_size"] / 2**30
    with Server(plain, folder / "wide.log", FLAGS) as one, Server(packed, folder / "wide-int4.log", FLAGS) as other:
        used = {name: re.findall(r"Load weight end.*mem usage=([\d.]+)", server.log.read_text())[0]
                for name, server in (("bf16", one), ("int4", other))}
    figures = {name: float(gib) - embeddings for name, gib in used.items()}
    return figures | {"ratio": figures["int4"] / figures["bf16"]}


def main() -> int:
    """Both checks of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["dense", "moe"], help="dense or moe")
    parser.add_argument("--memory", action="store_true", help="the memory of a wide dense model alone")
    parser.add_argument("--backend", help="of SGLang's --moe-runner-backend: triton or marlin")
    given, failed = parser.parse_args(), 0
    if given.memory:
        print(json.dumps({"check": "memory"} | memory(Path(tempfile.mkdtemp()))), flush=True)
        return 0
    for kind in given.kinds:
        folder = Path(tempfile.mkdtemp())
        plain, packed, rounded = folder / "plain", folder / "int4", folder / "rounded"
        checkpoint(kind, plain)
        convert(plain, packed)
        unpacked(plain, packed, rounded)
        for name, check in (("layers", lambda: layers(plain, rounded)),  # noqa: B023 - called here
                            ("served", lambda: served(plain, packed, folder / "log",  # noqa: B023
                                                      given.backend if kind == "moe" else None))):  # noqa: B023
            begin = time.monotonic()
            try:
                figures = check()
            except (AssertionError, TimeoutError) as error:
                failed, figures = 1, {"failed": str(error)[-4000:]}
            head = {"check": name, "model": kind, "s": round(time.monotonic() - begin, 1)}
            print(json.dumps(head | figures), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
