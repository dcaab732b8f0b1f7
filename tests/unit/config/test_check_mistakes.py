"""What one mistake in the smallest run says, and near it what is none: intervals, rules, rows, files, this machine."""

import json
import shutil
from pathlib import Path

import pytest

from tests.misconfigurations.measure import ACCEPTED, BASE, REFUSED, ROOT, outcome

TINY = ROOT / "examples/arithmetic/tiny-qwen3"
CONFIG = json.loads((TINY / "config.json").read_text())
TOKENIZER = json.loads((TINY / "tokenizer_config.json").read_text())
SGLANG = ["--engine", "sglang"]
EVAL = ["--eval-interval", "5", "--eval-prompt-data"]
FOUR = ["--actor-num-gpus-per-node", "4", "--pipeline-model-parallel-size", "4"]
TWO = ["--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"]
SET = "examples/arithmetic/eval.jsonl"
USER = {"role": "user", "content": "1+1="}

# flags -> a part of what is said
TEACHERS = ["--use-opd", "--rm-type", "math", "on_policy_distillation", "--opd-teacher-urls"]
FLAGS = [
    (["--lr", "1e6"], "lr should lie in [0, 0.1) (got 1000000.0)"),
    (["--lr", "nan"], "optimizer.lr should be float (got 'nan')"),
    (["--adam-beta2", "98"], "adam_beta2 should lie in [0, 1)"),
    (["--adam-eps", "0"], "adam_eps should lie in (0, 0.1]"),
    (["--clip-grad", "-1"], "clip_grad should not be negative"),
    (["--lr", "1e-6", "--min-lr", "1e-5"], "cannot decay to more than it is (got 1e-05)"),
    (["--lr-warmup-iters", "9", "--lr-decay-iters", "5"], "the decay would be over before the warm-up"),
    (["--eps-clip", "20"], "a band that is wider than 1 below clips nothing"),
    (["--eps-clip-high", "28"], "nothing would be clipped"),
    (["--use-kl-loss", "--kl-loss-coef", "-0.1"], "kl_loss_coef should lie in [0, 100]"),
    (["--entropy-coef", "nan"], "algorithm.entropy_coef should be float (got 'nan')"),
    (["--rollout-temperature", "100"], "rollout_temperature should lie in [0, 10]"),
    (["--rollout-top-k", "0"], "a number of tokens, or -1"),
    ([*EVAL, "sums", SET, "--eval-top-k", "-5"], "eval_top_k is a number of tokens"),
    (["--rollout-stop", ""], "an empty string would end every answer"),
    (["--rollout-stop-token-ids", "151645"], "no such token to stop at (got 151645)"),
    (["--start-rollout-id", "20"], "begin after its last rollout"),
    (["--rm-weights", "0"], "all weights are 0"),
    (["--num-rollout", "none", "--num-epoch", "1", "--rollout-batch-size", "99999"], "too few prompts for one rollout"),
    (["--max-weight-staleness", "2"], "nothing is stale in a synchronous run"),
    (["--batch-order", "window"], "nothing overtakes in a synchronous run"),
    (["--recompute-method", "uniform"], "recompute_method is for whole layers"),
    (["--recompute-num-layers", "1"], "recompute_num_layers is for whole layers"),
    (["--recompute-granularity", "full", "--recompute-num-layers", "9"], "fewer layers than would be computed again"),
    (["--recompute-modules", "core_attn"], "no effect without --recompute-granularity selective"),
    (["--optimizer-offload-fraction", "0.5"], "no effect without --optimizer-cpu-offload"),
    (["--num-experts", "8"], "dense and has no experts"),
    (["--moe-router-topk", "2"], "no router chooses experts"),
    ([*FOUR, "--decoder-first-pipeline-num-layers", "2"], "the other 3 stages cannot have 2 layers"),
    (["--decoder-last-pipeline-num-layers", "2"], "no further stages to have the other layers"),
    ([*SGLANG, "--sglang-mem-fraction-static", "85"], "mem_fraction_static should lie in (0, 1)"),
    ([*SGLANG, "--sglang-max-running-requests", "0"], "max_running_requests should be at least 1"),
    ([*SGLANG, "--sglang-router-ip", "10.0.0.7", "--sglang-router-port", "99999"], "should lie in [1, 65535]"),
    ([*SGLANG, "--rollout-external", "--rollout-external-engine-addrs", "10.0.0.7:99999"], "no port that there is"),
    ([*SGLANG, "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--sglang-ep-size", "2"],
     "engines would share out experts"),
    ([*SGLANG, "--sglang-speculative-algorithm", "EAGLE3"], "has a model of its own"),
    (["--placement", "ray", "--ray-address", "http://10.0.0.7:8265"], "the address of Ray's dashboard"),
    ([*EVAL, SET, "examples/arithmetic/train.jsonl"], "each eval dataset has a name of its own"),
    ([*EVAL, "a", SET, "a", "examples/arithmetic/train.jsonl"], "each eval dataset has a name of its own"),
    (["--load-debug-rollout-data", "/nowhere/{rollout_id}.pt"], "there are no rollouts to replay"),
    (["--save", "examples/arithmetic/tiny-qwen3"], "save into the folder that it starts from"),
    (["--save", "{here}/a", "--save-hf", "{here}/a/"], "need folders of their own"),
    (["--use-tis", "--tis-clip-low", "3"], "tis_clip_low should be below tis_clip (got 3.0)"),
    (["--advantage-estimator", "ppo", "--critic-lr", "-1"], "critic_lr should lie in [0, 0.1)"),
    (["--lora-rank", "0"], "adapters of no rank are none"),
    (["--lora-rank", "9999"], "above the width of what it should approximate"),
    (["--loss-type", "sft_loss"], "every answer of the model would be taken for one"),
    (["--rm-type", "remote_rm", "--rm-url", "http://0.0.0.0:9000/score"], "not where it is reached"),
    (["--rm-type", "custom", "--custom-rm-path", "no_such_package.rm.score"], "no module no_such_package"),
    (["--rm-type", "custom", "--custom-rm-path", "{here}/reward.py"], "and none of its functions"),
    (["--lr", "1e-16"], "lost where float32 is rounded"),
    (["--adam-beta1", "0.98", "--adam-beta2", "0.9"], "the two betas are swapped"),
    (["--min-lr", "1e-7"], "min_lr has no effect on a constant learning rate"),
    (["--lr-warmup-iters", "20"], "the run, or its decay, ends before the warm-up does (got 20 of 20 steps)"),
    (["--lr-decay-style", "linear", "--lr-decay-iters", "9"], "once it has decayed (got 9 of 20 steps)"),
    (["--eps-clip", "0.8", "--eps-clip-high", "1.28"], "written as bounds of the ratio"),
    (["--eps-clip", "0", "--eps-clip-high", "0"], "a clip band of no width"),
    (["--rollout-top-p", "1e-6"], "leaves the likeliest token alone"),
    (["--num-rollout", "0"], "there is nothing to do"),
    (["--num-rollout", "0", "--eval-prompt-data", "sums", SET], "there is nothing to do"),
    (["--save", ""], "checkpoint.save is empty"),
    (["--save", "~/x"], "begins with ~"),
    (["--run-dir", "${OUT}/x"], "nothing replaces ${OUT} here"),
    (["--sequence-parallel", "false"], "--sequence-parallel takes no value"),
    (["--train-async", "False"], "--train-async takes no value"),
    (["--learning-rate", "1e-6"], "write --lr"),
    (["--actor_rollout_ref.rollout.n", "8"], "write --n-samples-per-prompt"),
    (["--mem-fraction-static", "0.8"], "did you mean --sglang-mem-fraction-static?"),
    (["--advantage-estimator", "GRPO"], "did you mean 'grpo'?"),
    ([*FOUR, "--pipeline-model-parallel-layout", "Ett|t|tL"], "has 3 stages, and the pipeline 4"),
    ([*FOUR, "--pipeline-model-parallel-layout", "Et|(t|)*1t|L"], "has 3 layers, and the model 4"),
    (["--pipeline-model-parallel-layout", "2,2"], "E, a t for each layer and L"),
    (["--placement", "ray", "--ray-address", "10.0.0.7"], "no address of a Ray cluster"),
    (["--placement", "ray", "--ray-address", "10.0.0.7:8265"], "the port of Ray's dashboard"),
    (["--placement", "ray", "--ray-address", "127.0.0.1:1"], "nothing listens at this address"),
    (["--ray-address", "10.0.0.7:6379"], "--placement local uses none"),
    (["--rollout-external", "--rollout-external-engine-addrs", "10.0.0.7:30000", "http://10.0.0.7:30000"],
     "one address is that of two servers"),
    (["--use-tis", "--tis-clip", "0.5"], "the upper bound of a ratio that is 1"),
    (["--advantage-estimator", "ppo", "--num-critic-only-steps", "20"],
     "the critic would train alone"),
    ([*SGLANG, "--sglang-max-total-tokens", "8"], "no room for a prompt with the longest answer"),
    (["--group-query-attention", "8"], "takes no value"),
    ([*TWO, "--pipeline-model-parallel-layout", "Et|t|t|tL", "--num-virtual-stages-per-pipeline-rank", "1"],
     "has 4 stages, and the pipeline 2"),
    ([*SGLANG, "--sglang-json-model-override-args", "{rope_theta: 1}"], "is a JSON object"),
    (["--num-rollout", "20\r"], "end as on Linux"), (["--rm-type", "math", " "], "nothing after a backslash"),
    (["--rm-type", "math", "-lr", "1e-6"], "write --lr"), (["--rm-type", "math", "\u2013lr", "1"], "write --lr"),
    (["--rollout-stop-token-ids"], "takes a value or more"), (["--use-rs"], "belongs to plugin 'tis'"),
    ([*EVAL, f"sums={SET}"], "NAME PATH pairs"), ([*EVAL, "a", "s3://bucket/a.jsonl"], "this is an address"),
    (["--prompt-data", "https://host/train.jsonl"], "this is an address"),
    (["--rollout-seed", "-1"], "rollout_seed should lie in"),
    (["--seed", "99999999999999999999"], "seed should lie in"),
    (["--save", "examples/../examples/arithmetic/tiny-qwen3"], "save into the folder that it starts from"),
    (["--drop-plugin-state", "ppo"], "nothing is loaded"),
    (["--plugin", "tis", "--tis.rs-level", "sequence"], "has no effect without --use-rs"),
    (["--plugin", "tis", "--tis.tis-mode", "mask"], "has no effect without --use-tis"),
    (["--plugin", "tis", "--tis.rs-veto-threshold", "1"], "rs_veto_threshold is that of a ratio"),
    ([*TEACHERS, "a=http://h:1", "a=http://h:2"], "two teachers have one name"),
    ([*TEACHERS, "http://h:1/v1"], "the address of an OpenAI interface"),
    ([*TEACHERS, "http://h:1,http://h:2"], "begins with http://"),
    (["--advantage-estimator", "ppo", "--critic-lr", "1e-15"], "the critic would not change"),
]  # fmt: skip
FINE = [
    [*SGLANG, "--sglang-max-total-tokens", "64"], ["--group-query-attention"],
    [*TWO, "--pipeline-model-parallel-layout", "Et|t|t|tL", "--num-virtual-stages-per-pipeline-rank", "2"],
    ["--rollout-stop", "\r\n"], ["--rollout-stop-token-ids", "0"], ["--rollout-seed", "0"],
    ["--save", "{here}/a", "--save-hf", "{here}/a/hf/{rollout_id}"], ["--server-command", "python", "-m", "x"],
    ["--plugin", "tis", "--tis.no-use-rs", "--tis.rs-upper-bound", "2", "--tis.rs-veto-threshold", "1e-4"],
    [*TEACHERS, "a=http://h:1", "b=http://h:2/generate", "http://h:3/proxy"],
    ["--lr", "0"], ["--lr", "1e-6", "--min-lr", "1e-7", "--lr-decay-style", "cosine"], ["--eps-clip", "1"],
    ["--advantage-estimator", "cispo", "--eps-clip", "10"], ["--rollout-top-k", "-1"], ["--start-rollout-id", "19"],
    ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "4"],
    ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"], ["--rollout-stop-token-ids", "258"],
    ["--max-lag", "1", "--max-weight-staleness", "2", "--batch-order", "window"], ["--rm-weights", "-1"],
    [*FOUR, "--decoder-first-pipeline-num-layers", "1"],
    [*EVAL, SET], [*EVAL, "a", SET, "b", SET], ["--save", "{here}/a", "--save-hf", "{here}/b"],
    ["--lr-decay-style", "linear", "--lr-decay-iters", "10"], ["--adam-beta1", "0.95", "--adam-beta2", "0.95"],
    ["--sequence-parallel", "true", "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"],
    [*FOUR, "--pipeline-model-parallel-layout", "Et|(t|)*2tL"], [*SGLANG, "--router", "none"],
    [*SGLANG, "--sglang-json-model-override-args", '{"rope_theta": 1}'],
    ["--placement", "ray", "--ray-address", "auto"], ["--lr-decay-iters", "40"],
    ["--num-rollout", "none", "--num-epoch", "1"], ["--use-tis", "--tis-clip-low", "0.5"], ["--lora-rank", "8"],
]  # fmt: skip


def told(case, words):
    """Refused with these words, and a fix; accepted without words."""
    found = outcome({"id": "one", **case})
    if words is None:
        assert found.verdict == ACCEPTED, found
    else:
        assert found.verdict == REFUSED and words in found.sentence and "Fix:" in found.sentence, found


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_in_flags_is_named(flags, words):
    told({"flags": flags}, words)


@pytest.mark.parametrize("flags", FINE, ids=" ".join)
def test_its_neighbour_is_planned(flags):
    found = outcome({"id": "one", "flags": flags})
    assert found.verdict == ACCEPTED, found


VARIABLES = [
    ("CUDA_VISIBLE_DEVICES", ["0 1", "0-7", "all", "0;1", "cuda:0"], ["0,1", "GPU-7cbb4f1d,MIG-3a9c1c3e", "-1", ""]),
    ("PYTORCH_CUDA_ALLOC_CONF", ["expandable_segments=True", "expandable_segments:true", "max_split_size_mb:8",
                                 "garbage_collection_threshold:80", "a:1;b:2"],
     ["expandable_segments:True", "max_split_size_mb:512,", "roundup_power2_divisions:[256:1,>:4]", ""]),
    ("CUDA_DEVICE_MAX_CONNECTIONS", ["0", "one", "64"], ["1", "32", ""]), ("NCCL_IB_DISABLE", ["true"], ["1", "", "0"]),
    ("RAY_ADDRESS", ["http://127.0.0.1:8265", "10.0.0.7", "0.0.0.0:6379", "10.0.0.7:8265"],
     ["10.0.0.7:6379", "ray://10.0.0.7:10001", "auto", ""]),
]


@pytest.mark.parametrize(("name", "wrong", "right"), VARIABLES, ids=[name for name, *_ in VARIABLES])
def test_a_variable_is_what_its_program_can_read(name, wrong, right):
    for value in (*wrong, *right):
        found = outcome({"id": "one", "flags": ["--placement", "ray"], "env": {name: value}})
        assert (found.verdict == REFUSED) == (value in wrong), (value, found)
        assert name in found.sentence or value not in wrong, found


def test_nobody_else_starts_the_ranks():
    told({"flags": [], "env": {"LOCAL_RANK": "0", "WORLD_SIZE": "8"}}, "would be a run of its own")
    assert outcome({"id": "one", "flags": [], "env": {"RANK": "0", "WORLD_SIZE": "8"}}).verdict == ACCEPTED


ROWS = [
    ({"label": None}, "no row has a ground truth under 'label'"),
    ({"label": ""}, "no row has a ground truth under 'label'"),
    ({"label": {"ground_truth": "2", "style": "rule"}}, "'label' is an object"),
    ({"metadata": "easy"}, "'metadata' should be an object (got str)"),
    ({"prompt": json.dumps([USER])}, "holds chat messages as text"),
    ({"prompt": str([USER])}, "holds chat messages as text"),
    ({"prompt": [{"role": "user"}]}, "has no text (got role)"),
    ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}, "has no text (got image)"),
    ({"prompt": [USER, {"role": "assistant", "content": "2"}]}, "ends with an answer"),
    ({"prompt": [USER | {"content": [{"type": "text", "text": "1+1="}]}]}, "the chat template refuses the messages"),
    ({"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}, USER]}, "has no attribute"),
    ({"label": 2}, None),
]


@pytest.mark.parametrize(("change", "words"), ROWS, ids=str)
def test_rows_can_be_prompts(change, words):
    row = {"prompt": [USER], "label": "2", **change}
    case = {"flags": ["--prompt-data", "{here}/rows.jsonl"], "files": {"rows.jsonl": json.dumps(row) + "\n"}}
    told(case, words)


def test_a_key_of_metadata_is_in_some_row():
    told({"flags": ["--metadata-key", "extra_info"]}, "no row has the key 'extra_info'")


@pytest.mark.parametrize(("labels", "flags", "words"), [
    (("12", "345"), ["--rollout-max-response-len", "1"], "no answer has room for what 'math' compares with (got 2 tok"),
    (("12", "345"), ["--rollout-max-response-len", "2"], None), (("12", 5), ["--rollout-max-response-len", "1"], None),
    (("1 + 2", "345"), ["--rollout-max-response-len", "1"], None),
    (("12", "345"), ["--eval-prompt-data", "sums", "{here}/rows.jsonl", "--eval-max-response-len", "1"], "has room"),
    (("12", "345"), ["--eval-prompt-data", "sums", "{here}/rows.jsonl", "--eval-max-response-len", "2"], None),
])
def test_an_answer_has_room_for_what_it_is_compared_with(labels, flags, words):
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "label": label}) + "\n" for i, label in enumerate(labels))
    case = {"flags": ["--prompt-data", "{here}/rows.jsonl", *flags], "files": {"rows.jsonl": rows}}
    told(case, words)


def merging(merges):
    """The tokenizer with these merges."""
    raw = (TINY / "tokenizer.json").read_bytes()
    assert raw.count(EMPTY) == 1
    return {"tokenizer.json": raw.replace(EMPTY, b'"merges": [%s]' % merges.encode())}


EMPTY = b'"merges": []'
WEIGHTS = "model.safetensors"
FILES = [
    ({WEIGHTS: None, "model-00001-of-00002.safetensors": TINY / WEIGHTS}, {}, "no index says which is where"),
    ({WEIGHTS: b""}, {}, "it is not whole (got 0 bytes)"),
    ({WEIGHTS: (TINY / WEIGHTS).read_bytes()[:-8]}, {}, "it is cut short"),
    ({WEIGHTS: b"version https://git-lfs.github.com/spec/v1\noid"}, {}, "a pointer of Git LFS"),
    ({"tokenizer.json": b"version https://git-lfs.github.com/spec/v1\noid"}, {}, "a pointer of Git LFS"),
    ({}, {"num_hidden_layers": 3}, "config.json has 3 layers, and the weights are of others (got 4)"),
    ({}, {"num_hidden_layers": 6}, "the weights are of others (got 4)"),
    ({}, {"hidden_size": 256}, "misshapen model.embed_tokens.weight: (264, 128), not (264, 256)"),
    ({}, {"vocab_size": 300}, "the tensors do not fit"),
    ({}, {"intermediate_size": 512}, "misshapen model.layers.0.mlp.gate_proj.weight"),
    ({}, {"tie_word_embeddings": False}, "no lm_head.weight"),
    ({}, {"eos_token_id": 999}, "is none of the model's (got 999"),
    ({WEIGHTS: None}, {"vocab_size": 200, "eos_token_id": 1}, "the token that ends a sequence is none of"),
    ({}, {"pad_token_id": 264}, "the token that pads is none of the model's"),
    (merging(r'"6 4", "6 4  8"'), {}, 'two parts with one space between them (got "6 4 8")'),
    (merging(r'"64"'), {}, "two parts with one space"),
    (merging(r'"6 4", "\" ,",' + "\n" + r'"\\ ]"'), {}, None), (merging('["6", "4  "], [" ", "8"]'), {}, None),
    ({}, {"pad_token_id": -1}, None), ({}, {}, None),
    ({WEIGHTS: None}, {}, "the folder of the model holds no weights"),
]


@pytest.mark.parametrize(("files", "constants", "words"), FILES, ids=[str(number) for number in range(len(FILES))])
def test_the_checkpoints_files_are_of_one_model(files, constants, words, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "config.json").write_text(json.dumps(CONFIG | constants))
    for name, content in files.items():
        (model / name).unlink(missing_ok=True)
        if content is not None:
            (model / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    case = {"flags": ["--hf-checkpoint", str(model)]}
    told(case, words)


def test_the_reference_is_the_same_model(tmp_path):
    others = {"num_hidden_layers": 8}, {"vocab_size": 512}, {"dtype": "bfloat16"}
    for change, good in zip(others, (False, False, True), strict=True):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
        case = {"flags": ["--use-kl-loss", "--ref-load", str(tmp_path)]}
        if good:
            assert outcome({"id": "one", **case}).verdict == ACCEPTED
        else:
            told(case, "the reference is another model")


def test_a_checkpoints_tracker_names_what_is_there():
    parts = ("metadata.json", ".metadata", "common.pt", "miles.json", "__0_0.distcp")
    files = {"saved/latest_checkpointed_iteration.txt": "40\n"} | {f"saved/iter_0000040/{one}": "{}" for one in parts}
    case = {"flags": ["--load", "{here}/saved"], "files": files}
    told(case, "past the run's last rollout, so nothing would be trained (got 40 of 20)")
    for more in (["--num-rollout", "50"], ["--save", "{here}/saved"]):
        assert outcome({"id": "one", **case, "flags": [*case["flags"], *more]}).verdict == ACCEPTED
    for text in ("7", "release"):
        told({**case, "files": files | {"saved/latest_checkpointed_iteration.txt": text}}, f"names iteration {text}")


EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
TWO = ["--actor-num-gpus-per-node", "2"]


@pytest.mark.parametrize(("flags", "variables", "words"), [
    ([*SGLANG, "--colocate"], EIGHT | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable segments"),
    ([*SGLANG], {"CUDA_VISIBLE_DEVICES": "0,0"}, "a GPU is named twice"),
    (TWO, EIGHT | {"NCCL_SOCKET_IFNAME": "bond77"}, "no such network interface (got NCCL_SOCKET_IFNAME=bond77)"),
    (TWO, {"GLOO_SOCKET_IFNAME": "bond77"}, "no such network interface"),
    ([*SGLANG], EIGHT | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, None),
    (TWO, {"GLOO_SOCKET_IFNAME": "lo"}, None), (TWO, {"NCCL_SOCKET_IFNAME": "^docker0"}, None),
    ([], {"NCCL_SOCKET_IFNAME": "bond77"}, None),
], ids=str)
def test_the_environment_fits(flags, variables, words):
    case = {"flags": flags, "env": variables}
    told(case, words)


@pytest.mark.parametrize(("line", "words"), [
    ("n_samples = 0", "a whole number from 1 on"), ('n_samples = "4"', "a whole number from 1 on"),
    ("top_k = 0", "a whole number from 1 on"), ('temperature = "0.6"', "is a number"), ("label_key = 1", "is a text"),
    ("top_k = -1", None), ("temperature = 0", None), ("max_response_len = 16", None),
])
def test_values_of_an_eval_data_set_are_of_their_kind(tmp_path, line, words):
    text = f"\ufeff[eval]\neval_interval = 5\n[[eval.datasets]]\nname = 'sums'\npath = '{SET}'\n{line}\n"
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    case = {"run_file": f"{tmp_path}/run.toml", "flags": [word for group in BASE for word in group]}
    if words:
        told(case, words)
    else:
        assert outcome({"id": "one", **case}).verdict == ACCEPTED
