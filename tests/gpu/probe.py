"""What the GPU stack can do on this host: each check in a process of its own, bounded, passed or failed.

    python tests/gpu/probe.py                  all checks
    python tests/gpu/probe.py packed_te ray    some

packed_te   a Megatron-core model of Transformer Engine layers on packed sequences, against one sequence at a time
ray         a placement group over all GPUs, an NCCL all-reduce between its actors
server      an SGLang server: start, log-probs against transformers, weights by CUDA IPC and by an NCCL group (with two
            GPUs), memory released and taken again

The stack is no dependency of Miles on a CPU, so nothing of it is imported before its check. Figures go to
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

LIMIT = {"packed_te": 150, "ray": 120, "server": 420}
"""Seconds that a check may take."""


def packed_te() -> dict[str, float]:
    """Log-probs and gradients of packed sequences, bf16, Transformer Engine's layers."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=4, hidden_size=1024, num_attention_heads=16, num_query_groups=8, kv_channels=64,
        ffn_hidden_size=3072, gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm",
        add_bias_linear=False, qk_layernorm=True, bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0,
        attention_dropout=0.0, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    model = GPTModel(config, spec, vocab_size=32768, max_sequence_length=8192, position_embedding_type="rope").cuda()
    lengths = [777, 1, 1024, 33, 2048, 213]
    ids = [torch.randint(0, 32768, (n,), device="cuda") for n in lengths]

    def loss(sequences: list[torch.Tensor]) -> torch.Tensor:
        cu = torch.tensor([0] + [len(s) for s in sequences], device="cuda").cumsum(0).int()
        longest = max(map(len, sequences))
        rows = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest,
                               max_seqlen_kv=longest)
        places = torch.cat([torch.arange(len(s), device="cuda") for s in sequences])[None]
        tokens = torch.cat(sequences)[None]
        return model(tokens, places, None, labels=tokens, packed_seq_params=rows)[0].float()

    apart = torch.cat([loss([one]) for one in ids])
    apart.sum().backward()
    expected = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    packed = loss(ids)
    packed.sum().backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    off = sum(float((p.grad.float() - expected[name]).square().sum()) for name, p in model.named_parameters()) ** 0.5
    found = {"mean_abs_loss_difference": float((packed - apart).abs().mean()), "gradient_difference": off / size,
             "tokens_per_s": sum(lengths) / seconds}
    assert found["mean_abs_loss_difference"] < 0.02 and found["gradient_difference"] < 0.02, found
    return found


class Member:
    """A Ray actor on one GPU."""

    def meet(self) -> str:
        import ray
        import torch.distributed as dist

        self.store = dist.TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        return f"{ray.util.get_node_ip_address()}:{self.store.port}"

    def total(self, at: str, rank: int, size: int) -> tuple[float, str]:
        import torch
        import torch.distributed as dist

        host, _, port = at.rpartition(":")
        dist.init_process_group("nccl", store=dist.TCPStore(host, int(port), is_master=False), rank=rank,
                                world_size=size)
        value = torch.full((1 << 20,), float(rank + 1), device="cuda")
        dist.all_reduce(value)
        return float(value[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def in_ray() -> dict[str, float]:
    """Actors in a placement group see one GPU each and reduce over NCCL."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    begin = time.perf_counter()
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    started = time.perf_counter() - begin
    gpus = int(ray.cluster_resources().get("GPU", 0))
    assert gpus, ray.cluster_resources()
    group = placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK")
    ray.get(group.ready(), timeout=60)
    actors = [
        ray.remote(num_gpus=1, num_cpus=1)(Member).options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)).remote()
        for i in range(gpus)
    ]
    at = ray.get(actors[0].meet.remote(), timeout=60)
    answers = ray.get([actor.total.remote(at, i, gpus) for i, actor in enumerate(actors)], timeout=90)
    assert [value for value, _ in answers] == [gpus * (gpus + 1) / 2] * gpus, answers
    assert len({seen for _, seen in answers}) == gpus, answers
    ray.shutdown()
    return {"gpus": gpus, "ray_init_s": started, "to_first_reduction_s": time.perf_counter() - begin}


SERVER = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
          "--skip-server-warmup", "--skip-tokenizer-init", "--cuda-graph-backend-prefill", "disabled",
          "--cuda-graph-max-bs", "8", "--mem-fraction-static", "0.3", "--enable-memory-saver", "--host", "127.0.0.1"]


class Server:
    """A running SGLang server."""

    def __init__(self, model: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(self.port)]
        self.log = log
        self.process = subprocess.Popen([*command, *SERVER], stdout=log.open("w"), stderr=subprocess.STDOUT)

    def wait(self, seconds: float) -> None:
        """Until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def post(self, path: str, body: dict, seconds: float = 60) -> dict:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        text = urllib.request.urlopen(request, timeout=seconds).read()
        return json.loads(text) if text else {}

    def log_probs(self, ids: list[int]) -> list[float]:
        """Of ids[1:] given what is before them."""
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
                "logprob_start_len": 0}
        found = self.post("generate", body)["meta_info"]["input_token_logprobs"]
        return [entry[0] for entry in found[1:]]


def in_server() -> dict[str, float]:
    """A server is brought to new weights in two ways; each time its log-probs are those of transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder, found = Path(tempfile.mkdtemp()), {}
    config = Qwen3Config(vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=4096,
                         tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).cuda()
    model.save_pretrained(folder)
    ids = torch.randint(0, 32768, (200,)).tolist()
    server, begin = Server(folder, folder / "log"), time.monotonic()
    try:
        server.wait(300)
        found["ready_s"] = time.monotonic() - begin
        found["start_difference"] = difference(server, model, ids)
        weights = renew(model)
        begin = time.monotonic()
        by_ipc(server, weights)
        found["ipc_s"] = time.monotonic() - begin
        found["ipc_difference"] = difference(server, model, ids)
        if torch.cuda.device_count() > 1:
            found |= by_nccl(server, renew(model))
            found["nccl_difference"] = difference(server, model, ids)
        before = torch.cuda.mem_get_info(0)[0]
        server.post("release_memory_occupation", {})
        found["released_gib"] = (torch.cuda.mem_get_info(0)[0] - before) / 2**30
        server.post("resume_memory_occupation", {})
        by_ipc(server, renew(model))  # released weights come back empty
        found["resumed_difference"] = difference(server, model, ids)
        assert found["released_gib"] > 1, found
    finally:
        server.process.terminate()
        server.process.wait(30)
    return found


def renew(model) -> list:
    """Other weights in place; (name, tensor) of all."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def difference(server: Server, model, ids: list[int]) -> float:
    """Mean |log-prob of the server - of transformers|; above 0.05 it serves other weights."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
    ours = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0]
    gap = float((torch.tensor(server.log_probs(ids), device="cuda") - ours).abs().mean())
    assert gap < 0.05, gap
    return gap


def by_ipc(server: Server, weights: list) -> None:
    """One flattened bucket, whose handle the server opens."""
    import base64

    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=weights)
    packed = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    data = MultiprocessingSerializer.serialize(packed)
    answer = server.post("update_weights_from_tensor", {
        "serialized_named_tensors": [base64.b64encode(data).decode() if isinstance(data, bytes) else data],
        "load_format": "flattened_bucket", "weight_version": "1"})  # fmt: skip
    assert answer["success"], answer


def by_nccl(server: Server, weights: list) -> dict[str, float]:
    """A group of the server's GPU and the second one, from which the weights are broadcast."""
    import threading

    import torch
    import torch.distributed as dist
    from sglang.srt.utils.common import init_custom_process_group

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
            "group_name": "probe", "backend": "nccl"}
    joined: list[dict] = []
    thread = threading.Thread(target=lambda: joined.append(server.post("init_weights_update_group", body, 90)))
    thread.start()
    torch.cuda.set_device(1)
    group = init_custom_process_group(backend="nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0,
                                      group_name="probe")
    thread.join(90)
    assert joined and joined[0]["success"], joined
    names = {"names": [n for n, _ in weights], "dtypes": [str(w.dtype).removeprefix("torch.") for _, w in weights],
             "shapes": [list(w.shape) for _, w in weights], "group_name": "probe"}
    ours, done, seconds = [tensor.to("cuda:1") for _, tensor in weights], [], []

    def receive() -> None:
        done.append(server.post("update_weights_from_distributed", names, 90))

    for turn in range(3):  # the first call makes the connection
        begin = time.monotonic()
        thread = threading.Thread(target=receive)
        thread.start()
        for tensor in ours:
            dist.broadcast(tensor, 0, group=group)
        torch.cuda.synchronize(1)
        thread.join(90)
        assert len(done) == turn + 1 and done[-1]["success"], done
        seconds.append(time.monotonic() - begin)
    torch.cuda.set_device(0)
    return {"nccl_first_s": seconds[0], "nccl_s": min(seconds)}


CHECKS = {"packed_te": packed_te, "ray": in_ray, "server": in_server}


def main(names: list[str]) -> int:
    """Run the checks, print a line for each; the exit status is the number of those that failed."""
    failed = 0
    for name in names or list(CHECKS):
        environment = {**os.environ, "NCCL_CUMEM_ENABLE": "0", "PYTHONUNBUFFERED": "1"}
        command, begin = [sys.executable, __file__, "--here", name], time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT[name], env=environment)
            passed, text = done.returncode == 0, done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else [
                (done.stdout + done.stderr)[-2500:]]
        except subprocess.TimeoutExpired as late:
            passed, text = False, [f"not done within {LIMIT[name]} s\n{str(late.stderr)[-1500:]}"]
        failed += not passed
        print(f"{'PASS' if passed else 'FAIL'} {name} {time.monotonic() - begin:.0f} s {''.join(text)}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps({key: round(value, 6) for key, value in CHECKS[sys.argv[2]]().items()}))
    else:
        sys.exit(main(sys.argv[1:]))
