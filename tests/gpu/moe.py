"""Mixtures of experts through whole runs on one GPU: what routing replay, FP8 and int4 give and cost.

    python tests/gpu/moe.py replay            one GPU: a random model with 32 experts, with and without --plugin r3
    python tests/gpu/moe.py recipe            one: examples/moe.toml as it is with r3 and fp8, engine in bf16 and in FP8
    python tests/gpu/moe.py precision         one: bf16 and FP8 on each side, with r3: speed, memory, difference
    python tests/gpu/moe.py repeat            one: examples/moe.toml, twice with --deterministic-mode, and what it costs
    python tests/gpu/moe.py int4              one: examples/moe.toml with an engine of int4 experts
    python tests/gpu/moe.py replay --tiny     the same code on a CPU: the local engine, a few layers

Weights of replay and precision are random and made here; their reward is a coin. Prints a table; the exit status is 1
where a run fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles_core.record.events import read

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/arithmetic"
MILES = [sys.executable, "-c", "from miles_core.cli import main; main()"]
QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "attention_bias": False, "use_sliding_window": False, "max_position_embeddings": 4096,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256, "dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "replay": QWEN3_MOE | {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "head_dim": 64,
                           "num_key_value_heads": 4, "intermediate_size": 2048, "num_experts": 32, "vocab_size": 264,
                           "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    "precision": QWEN3_MOE | {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "head_dim": 128,
                              "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 64, "vocab_size": 264,
                              "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "tiny": QWEN3_MOE | {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
                         "num_key_value_heads": 2, "intermediate_size": 256, "num_experts": 16, "vocab_size": 264,
                         "num_experts_per_tok": 4, "moe_intermediate_size": 128},
}  # fmt: skip
SGLANG = [
    *(() if importlib.util.find_spec("sglang_router") else ("--router", "none")), "--engine", "sglang",
    "--placement", "ray" if importlib.util.find_spec("ray") else "local", "--colocate", "--bf16",
    "--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none",
    "--sglang-cuda-graph-backend-prefill", "disabled", "--sglang-cuda-graph-max-bs", "64",
]  # fmt: skip
FIGURES = {
    "log-prob difference": "train/train_rollout_logprob_abs_diff",
    "step s": "perf/step_time", "rollout s": "perf/rollout_time", "log-probs s": "perf/log_probs_time",
    "train s": "perf/actor_train_time", "sync s": "perf/update_weights_time",
    "rollout tokens/s": "perf/tokens_per_gpu_per_sec", "scoring tokens/s": "perf/log_probs_tokens_per_gpu_per_sec",
    "training tokens/s": "perf/actor_train_tokens_per_gpu_per_sec", "training TFLOP/s": "perf/actor_train_tflops",
}  # fmt: skip


def checkpoint(shape: dict, folder: Path, std: float) -> float:
    """A Hugging Face directory of random bfloat16 weights, a file a layer; the number of parameters.

    Experts weigh more, and the rows of a router differ little, so that rounding changes routes now and then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "tiny-qwen3-moe" / name, folder)
    hidden, head = shape["hidden_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    ffn = shape["moe_intermediate_size"]
    layer = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_proj": [q, hidden],
             "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden], "self_attn.o_proj": [hidden, q],
             "self_attn.q_norm": [head], "self_attn.k_norm": [head], "mlp.gate": [shape["num_experts"], hidden]}
    for expert in range(shape["num_experts"]):
        layer |= {f"mlp.experts.{expert}.{part}": [ffn, hidden] for part in ("gate_proj", "up_proj")}
        layer[f"mlp.experts.{expert}.down_proj"] = [hidden, ffn]
    ends = {"model.embed_tokens": [shape["vocab_size"], hidden], "model.norm": [hidden],
            "lm_head": [shape["vocab_size"], hidden]}
    files = [ends] + [{f"model.layers.{i}.{name}": size for name, size in layer.items()}
                      for i in range(shape["num_hidden_layers"])]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    index = {}
    with ThreadPoolExecutor(8) as pool:
        jobs = []
        for number, tensors in enumerate(files):
            torch.manual_seed(number)
            file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
            made = {f"{name}.weight": (torch.ones(size, dtype=torch.bfloat16) if len(size) == 1 else
                                       drawn(name, size, device, std)) for name, size in tensors.items()}
            index |= dict.fromkeys(made, file)
            jobs.append(pool.submit(save_file, made, folder / file, {"format": "pt"}))
        for job in jobs:
            job.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(torch.Size(size).numel() for tensors in files for size in tensors.values())


def drawn(name: str, size: list[int], device: str, std: float) -> torch.Tensor:
    """One matrix."""
    tensor = torch.randn(size, device=device, dtype=torch.bfloat16).mul_(std * (1.5 if "experts" in name else 1))
    if name.endswith("mlp.gate"):
        tensor = tensor / 30 + std * torch.randn(1, size[1], device=device, dtype=torch.bfloat16)
    return tensor.cpu()


def recipe(args: argparse.Namespace) -> int:
    """Runs of the example on its own checkpoint; rewards have to rise in each."""
    model = DATA / "tiny-qwen3-moe-128"
    held = converted(model, args.folder / "fp8", "hf-to-fp8")
    common = ["--plugin", "r3", "--plugin", "fp8", "--num-rollout", args.rollouts, *backends(args, "0.2"),
              *([] if args.tiny else ["--sglang-fp8-gemm-backend", "triton"]), *args.flags.split()]
    found = {"engine bf16": run(args.folder / "bf16", common, args.seconds, coin=False),
             "engine FP8": run(args.folder / "held", [*common, "--hf-checkpoint", held, "--ref-load", model],
                               args.seconds, coin=False)}
    table(found)
    rewards = {name: [step["rollout/raw_reward"] for step in steps] for name, steps in found.items()}
    print(json.dumps(rewards))
    return int(not all(rising and rising[-1] > rising[0] for rising in rewards.values()))


def converted(model: Path, folder: Path, kind: str, *words: str) -> Path:
    """The checkpoint in fewer bits: kind is hf-to-fp8 or hf-to-int4."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*MILES, "convert", kind, model, folder, *words], cwd=ROOT, check=True, timeout=300)
    return folder


def backends(args: argparse.Namespace, share: str) -> list[str]:
    return ["--engine", "local"] if args.tiny else [*SGLANG, "--sglang-mem-fraction-static", share]


def repeat(args: argparse.Namespace) -> int:
    """Two runs have the same weights and batches after every rollout; the price beside a run that may differ.

    The second of them shares the GPU with a second plain one: what else a GPU does must not matter.
    """
    common = ["--num-rollout", args.rollouts, "--debug-determinism", "--skip-eval-before-train",
              "--eval-interval", 1000, *backends(args, "0.2"), *args.flags.split()]
    names = {"plain": [], "one": ["--deterministic-mode"]}
    found = {name: run(args.folder / name, [*common, *words], args.seconds, coin=False)
             for name, words in names.items()}
    with ThreadPoolExecutor(2) as pool:
        beside = {name: pool.submit(run, args.folder / name, [*common, *words], args.seconds, coin=False)
                  for name, words in {"two": ["--deterministic-mode"], "plain again": []}.items()}
    table(found)
    same = {pair: hashes(args.folder / pair[0]) == hashes(args.folder / pair[1]) != []
            for pair in (("one", "two"), ("plain", "plain again"))}
    for pair, equal in same.items():
        print(" and ".join(pair), "are the same" if equal else "differ", f"after {args.rollouts} rollouts", flush=True)
    return int(not (same["one", "two"] and all(job.result() for job in beside.values())))


def hashes(folder: Path) -> list[dict]:
    """Of weights and batch, rollout after rollout."""
    file = folder / "hashes.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [{kind: line[kind] for kind in ("weights", "batch")} for line in lines]


def precision(args: argparse.Namespace) -> int:
    """Trainer and engine in bf16 and in FP8."""
    model = args.folder / "model"
    size = checkpoint(SHAPES["tiny" if args.tiny else "precision"], model, 0.06 if args.tiny else 0.02)
    print(f"{size / 1e9:.2f}e9 parameters", flush=True)
    in_fp8 = ["--hf-checkpoint", converted(model, args.folder / "fp8", "hf-to-fp8"), "--ref-load", model]
    common = ["--plugin", "r3", "--num-rollout", args.rollouts, "--skip-eval-before-train", "--eval-interval", 1000,
              "--lr", "1e-6", "--rollout-ignore-eos", *backends(args, "0.7"), *args.flags.split()]
    common += (["--rollout-max-response-len", 24, "--rollout-batch-size", 4] if args.tiny else
               ["--rollout-max-response-len", 512, "--rollout-batch-size", 32, "--max-tokens-per-gpu", 16384,
                "--sglang-fp8-gemm-backend", "triton", "--sglang-cuda-graph-max-bs", 256,
                "--sglang-max-total-tokens", 160000])  # all servers have to fit beside one another
    sides = {"bf16 / bf16": ["--hf-checkpoint", model], "bf16 / FP8": in_fp8, "FP8 / FP8": [*in_fp8, "--plugin", "fp8"]}
    runs = {name: (args.folder / name.replace(" / ", "-"), [*common, *words]) for name, words in sides.items()}
    found = in_turns(runs, args.seconds)
    for name, (folder, _) in runs.items():
        logs = "".join(log.read_text(errors="replace") for log in (folder / "logs").glob("*engine*.log"))
        print(name, "engine's weights, GB:", re.findall(r"Load weight end.*mem usage=([\d.]+)", logs), flush=True)
    print("trainer / engine")
    table(found)
    return int(not all(found.values()))


def int4(args: argparse.Namespace) -> int:
    """The example with experts in int4 in the engine, and rounded so in the trainer; rewards have to rise."""
    model = DATA / "tiny-qwen3-moe-128"
    held = converted(model, args.folder / "int4", "hf-to-int4")
    common = ["--num-rollout", args.rollouts, "--hf-checkpoint", held, "--ref-load", model, *backends(args, "0.2"),
              *args.flags.split()]
    sides = {"rounded": [], "not rounded": ["--plugin", "int4-qat", "--int4-qat.forward", "false"]}
    found = {name: run(args.folder / name.replace(" ", "-"), [*common, *words], args.seconds, coin=False)
             for name, words in sides.items()}
    table(found)
    rewards = {name: [round(step["rollout/raw_reward"], 3) for step in steps] for name, steps in found.items()}
    print(json.dumps(rewards))
    first, *_, last = rewards["rounded"] or [0, 0]
    return int(not last > first)


def run(folder: Path, words: list[str], seconds: float, coin: bool = True,
        recipe: str = "examples/moe.toml") -> list[dict]:
    """The metrics of each rollout of a run; prints its last lines where it fails."""
    return ended(started(folder, words, coin, recipe), folder, time.monotonic() + seconds)


def printed(folder: Path) -> Path:
    """Where a run prints; names of shapes have dots."""
    return folder.with_name(f"{folder.name}.out")


def started(folder: Path, words: list[str], coin: bool = True, recipe: str = "examples/moe.toml") -> subprocess.Popen:
    """A run in the background, which prints into a file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [*MILES, "run", recipe, "--no-live",
               "--run-dir", folder, *(["--plugin", "tests/gpu/coin.py", "--rm-type", "coin"] if coin else []), *words]
    with printed(folder).open("w") as out:
        return subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)


def in_turns(runs: dict[str, tuple[Path, list]], seconds: float, recipes: dict[str, str] | None = None,
             coin: bool = True, together: bool = False) -> dict[str, list[dict]]:
    """The metrics of runs that start side by side and go on one after another, so that their seconds are their own.

    The GPU has to hold them all, training at once in their first rollouts. Where seconds do not matter they may go on
    together.
    """
    end, begin = time.monotonic() + seconds, time.monotonic()
    processes = {name: started(folder, [*words, "--plugin", "tests/gpu/turns.py"], coin,
                               (recipes or {}).get(name, "examples/moe.toml"))
                 for name, (folder, words) in runs.items()}
    while time.monotonic() < end and not all((folder / "waits").exists() or processes[name].poll() is not None
                                             for name, (folder, _) in runs.items()):
        time.sleep(0.2)
    print(f"all wait after {time.monotonic() - begin:.0f} s", flush=True)
    steps = {}
    for name, (folder, _) in runs.items():
        for other in ([one for one, _ in runs.values()] if together else [folder]):
            if other.is_dir():
                (other / "turn").touch()
        steps[name] = ended(processes[name], folder, end)
    return steps


def ended(process: subprocess.Popen, folder: Path, end: float) -> list[dict]:
    """The metrics of a run that is waited for; prints its last lines where it fails."""
    begin = time.monotonic()
    try:
        process.wait(max(1.0, end - begin))
    except subprocess.TimeoutExpired:
        print(stacks(process.pid), flush=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"{folder.name}: waited for {time.monotonic() - begin:.0f} s, exit {process.poll()}", flush=True)
    if process.poll():
        logs = "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}"
                       for log in (folder / "logs").glob("*.log"))
        print(printed(folder).read_text(errors="replace")[-5000:], logs, flush=True)
    events = list(read(folder / "events.jsonl")) if (folder / "events.jsonl").is_file() else []
    return [event["metrics"] for event in events if event["event"] == "metrics"]


def stacks(pid: int) -> str:
    """What the Python threads of a process and of its children do, where py-spy is installed."""
    if not shutil.which("py-spy"):
        return "not done in time"
    done = subprocess.run(["py-spy", "dump", "--subprocesses", "--pid", str(pid)], capture_output=True, text=True)
    return (done.stdout + done.stderr)[-6000:]


def table(found: dict[str, list[dict]]) -> None:
    """Means over the rollouts after the first three, and all figures of replay, per run."""
    late = {name: steps[3:] or steps for name, steps in found.items()}
    names = dict(FIGURES)
    names |= {key: key for steps in found.values() for step in steps for key in sorted(step)
              if "/r3/" in key and not key.startswith("perf/hook") or key.startswith("memory/")}
    print(f"{'':<44}" + "".join(f"{name:>16}" for name in found))
    for title, key in names.items():
        cells = []
        for steps in (found if "r3" in key else late).values():
            values = [step[key] for step in steps if key in step]
            cells.append(f"{sum(values) / len(values):>16.5f}" if values else f"{'-':>16}")
        print(f"{title:<44}" + "".join(cells))
    if not all(late.values()):
        return
    first, *others = late.values()
    for name, steps in zip(list(found)[1:], others, strict=False):
        ratio = sum(s["perf/step_time"] for s in steps) / len(steps) / (
            sum(s["perf/step_time"] for s in first) / len(first))
        print(f"seconds of a step, {name} over {next(iter(found))}: {ratio:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = {"recipe": recipe, "precision": precision, "repeat": repeat, "int4": int4}
    parser.add_argument("what", choices=["replay", *others])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/miles-moe"))
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--flags", default="", help="further flags of every run")
    args = parser.parse_args()
    if args.what in others:
        return others[args.what](args)
    shape = SHAPES["tiny" if args.tiny else args.what]
    begin = time.perf_counter()
    size = checkpoint(shape, args.folder / "model", 0.06)
    print(f"{size / 1e9:.2f}e9 parameters, made in {time.perf_counter() - begin:.0f} s", flush=True)
    common = ["--hf-checkpoint", args.folder / "model", "--num-rollout", args.rollouts, "--skip-eval-before-train",
              "--eval-interval", 1000, "--lr", "1e-6", "--rollout-ignore-eos"]
    if args.tiny:
        common += ["--engine", "local", "--engine-dtype", "bfloat16", "--rollout-max-response-len", 24,
                   "--rollout-batch-size", 4]
    else:
        common += [*SGLANG, "--rollout-max-response-len", 256, "--rollout-batch-size", 32,
                   "--max-tokens-per-gpu", 16384]
    common += args.flags.split()
    found = {}
    for name, words in {"without": [], "with r3": ["--plugin", "r3", "--r3.compare-every", "100"]}.items():
        found[name] = run(args.folder / name.replace(" ", "-"), [*map(str, common), *words], args.seconds)
    if not all(found.values()):
        return 1
    table(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
