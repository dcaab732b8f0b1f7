"""What SGLang and Megatron-core refuse at their start is refused by the plan; near it, what they take is planned."""

import json

import pytest

from miles_core.backends.megatron.surface import surface
from miles_core.backends.sglang.surface import server
from miles_core.config.bounds import stated, within
from miles_core.plugins.plan import prepare
from miles_core.plugins.refusals import _holds
from tests.misconfigurations.measure import ACCEPTED, argv, outcome
from tests.unit.config.test_check_mistakes import EVAL, TINY, USER, told

ENGINE = ["--engine", "sglang"]
HALF = [*ENGINE, "--engine-dtype", "bfloat16"]
WIDE = [*ENGINE, "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4"]
MIXTURE = ["--hf-checkpoint", "examples/arithmetic/tiny-qwen3-moe"]
EAGLE = [*ENGINE, "--sglang-speculative-algorithm", "EAGLE"]
FULL = ["--recompute-granularity", "full"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules"]
FOUR = ["--actor-num-gpus-per-node", "4", "--context-parallel-size", "4", "--cp-comm-type"]

# flags, a part of what is said, and flags near them that are none (None where no value is)
PAIRS = [
    ([*ENGINE, "--sglang-disable-radix-cache", "--sglang-schedule-policy", "lpm"], "SGLang takes fcfs",
     [*ENGINE, "--sglang-schedule-policy", "lpm"]),
    ([*WIDE, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-max-running-requests", "2"],
     "some would have none",
     [*WIDE, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-max-running-requests", "4"]),
    ([*ENGINE, "--sglang-json-model-override-args", '{"a": True}'], "this is Python",
     [*ENGINE, "--sglang-json-model-override-args", '{"a": true, "b": "None, True"}']),
    ([*ENGINE, "--sglang-json-model-override-args", '{"num_hidden_layers": 2}'], "run another model",
     [*ENGINE, "--sglang-json-model-override-args", '{"max_position_embeddings": 2048}']),
    ([*ENGINE, "--sglang-max-queued-requests", "4"], "what its queue has no place for",
     [*ENGINE, "--sglang-max-queued-requests", "4", "--server-concurrency", "4"]),
    ([*ENGINE, "--sglang-enable-lora"], "want to know max_lora_rank", None),
    ([*ENGINE, "--sglang-torchao-config", "int4wo"], "torchao has no such way",
     [*ENGINE, "--sglang-torchao-config", "fp8wo"]),
    ([*ENGINE, "--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-eagle-topk", "4"],
     "drafted from the text itself", None),
    ([*ENGINE, "--sglang-enable-hierarchical-cache", "--sglang-hicache-ratio", "0.5"], "larger than the GPU's", None),
    ([*ENGINE, "--sglang-is-embedding"], "gives no answers", ENGINE),
    ([*ENGINE, "--sglang-page-size", "64", "--sglang-chunked-prefill-size", "100"], "a whole number of pages",
     [*ENGINE, "--sglang-page-size", "64", "--sglang-chunked-prefill-size", "-1"]),
    ([*ENGINE, "--sglang-tokenizer-worker-num", "0"], "tokenizer_worker_num should be at least 1", None),
    ([*HALF, "--sglang-kv-cache-dtype", "fp8_e5m2", "--sglang-attention-backend", "fa3"], "slower triton",
     [*HALF, "--sglang-kv-cache-dtype", "fp8_e4m3", "--sglang-attention-backend", "fa3"]),
    ([*HALF, "--sglang-attention-backend", "flashmla"], "models with latent attention",
     [*HALF, "--sglang-attention-backend", "fa3"]),
    ([*ENGINE, "--sglang-attention-backend", "fa3"], "computes in 16 bits alone", None),
    ([*ENGINE, "--sglang-enable-hierarchical-cache", "--sglang-disable-radix-cache"], "the radix cache, which is off",
     [*ENGINE, "--sglang-enable-hierarchical-cache", "--sglang-hicache-ratio", "3"]),
    ([*ENGINE, "--sglang-hicache-ratio", "3"], "no effect without the hierarchical cache", None),
    ([*ENGINE, "--sglang-enable-deterministic-inference", "--sglang-attention-backend", "torch_native"],
     "not deterministic", [*ENGINE, "--sglang-enable-deterministic-inference", "--sglang-attention-backend", "triton"]),
    ([*WIDE, "--sglang-enable-dp-attention"], "of one copy is none",
     [*WIDE, "--sglang-enable-dp-attention", "--sglang-dp-size", "4"]),
    ([*WIDE, "--sglang-enable-dp-attention", "--sglang-dp-size", "3"], "does not divide an engine's 4",
     [*WIDE, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-enable-dp-lm-head"]),
    ([*WIDE, *MIXTURE, "--sglang-moe-dense-tp-size", "2"], "on one GPU each, or cut over all",
     [*WIDE, *MIXTURE, "--sglang-moe-dense-tp-size", "1"]),
    ([*WIDE, *MIXTURE, "--sglang-enable-eplb"], "there is one share",
     [*WIDE, *MIXTURE, "--sglang-enable-eplb", "--sglang-ep-size", "4"]),
    ([*WIDE, *MIXTURE, "--sglang-moe-a2a-backend", "deepep", "--sglang-ep-size", "2"], "shared out over all",
     [*WIDE, *MIXTURE, "--sglang-moe-a2a-backend", "deepep", "--sglang-ep-size", "4"]),
    ([*WIDE, "--sglang-pp-size", "2", "--sglang-speculative-algorithm", "NGRAM"], "a pipeline and speculative",
     [*WIDE, "--sglang-pp-size", "2"]),
    ([*ENGINE, "--sglang-speculative-algorithm", "MEDUSA"], "no such way of drafting", EAGLE),
    ([*ENGINE, "--sglang-speculative-algorithm", "NGRAM", "--sglang-attention-backend", "torch_native"],
     "cannot verify", [*ENGINE, "--sglang-speculative-algorithm", "NGRAM"]),
    ([*EAGLE, "--sglang-speculative-num-draft-tokens", "4"], "said together with how wide",
     [*EAGLE, "--sglang-speculative-num-draft-tokens", "4", "--sglang-speculative-num-steps", "3",
      "--sglang-speculative-eagle-topk", "1"]),
    ([*EAGLE, "--sglang-speculative-accept-threshold-single", "0.5"], "would not be the policy's", EAGLE),
    ([*ENGINE, "--sglang-max-loaded-loras", "2", "--sglang-max-loras-per-batch", "4"], "more adapters than are loaded",
     [*ENGINE, "--sglang-max-loaded-loras", "4", "--sglang-max-loras-per-batch", "4"]),
    ([*ENGINE, "--sglang-context-length", "4096"], "beyond what the model was made for (got 4096 > 1024)",
     [*ENGINE, "--sglang-context-length", "4096", "--rollout-max-context-len", "4096"]),
    ([*MIXTURE, "--moe-token-dispatcher-type", "allgather"], "sequences of one length",
     [*MIXTURE, "--moe-token-dispatcher-type", "alltoall"]),
    ([*MIXTURE, "--moe-pad-expert-input-to-capacity"], "no capacity to pad to",
     [*MIXTURE, "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor", "1.5"]),
    (["--cpu-offloading-num-layers", "4"], "all but one of the layers", ["--cpu-offloading-num-layers", "3"]),
    (["--cpu-offloading-num-layers", "2", "--no-cpu-offloading-activations"], "neither activations nor weights", None),
    (["--cpu-offloading-num-layers", "2", *FULL], "or computed again, not both", FULL),
    ([*SELECTIVE, "attention"], "computes no such module again", [*SELECTIVE, "core_attn", "layernorm"]),
    ([*SELECTIVE, "moe_act"], "of experts, which", [*MIXTURE, *SELECTIVE, "core_attn", "moe_act"]),
    (["--fine-grained-activation-offloading", "--offload-modules", "attn_proj"], "go to host memory together",
     ["--fine-grained-activation-offloading", "--offload-modules", "attn_proj", "core_attn"]),
    ([*FOUR, "a2a"], "num_key_value_heads 2 does not divide by", [*FOUR, "p2p"]),
    ([*FOUR, "a2a+p2p"], "hierarchical groups of ranks", None),
    ([*FOUR, "ring"], "no such way of context parallelism", None),
    (["--overlap-param-gather"], "overlaps only where reducing", ["--overlap-param-gather", "--overlap-grad-reduce"]),
    (["--exp-avg-dtype", "bf16"], "is the precision-aware optimizer's", None),
    (["--use-torch-optimizer-for-cpu-offload"], "no effect without --optimizer-cpu-offload",
     ["--use-torch-optimizer-for-cpu-offload", "--optimizer-cpu-offload"]),
    (["--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2",
      "--account-for-embedding-in-pipeline-split"], "do not divide by 2 stages",
     ["--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2",
      "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]),
    (["--lr-warmup-iters", "21"], "ends before the warm-up does (got 21 of 20 steps)", ["--lr-warmup-iters", "19"]),
    (["--lr-warmup-iters", "20", "--lr-decay-style", "cosine"], "ends before the warm-up",
     ["--lr-warmup-iters", "19", "--lr-decay-style", "cosine"]),
    (["--save", "{here}/a", "--load", "{here}/a", "--no-save-optim"], "could not go on from what it saves",
     ["--save", "{here}/a", "--no-save-optim"]),
    (["--use-opd", "--opd-teacher-load", "/no/teacher"], "there is no such teacher",
     ["--use-opd", "--opd-teacher-load", "teacher"]),
    (["--use-opd", "--opd-teacher-load", "teacher", "--opd-kl-coef", "-1"], "driven away from its teacher", None),
    (["--advantage-estimator", "ppo", "--critic-load", "/no/critic"], "no such checkpoint of a critic",
     ["--advantage-estimator", "ppo"]),
    (["--lora-rank", "8", "--target-modules", "linear_qkv"], "named as Hugging Face's",
     ["--lora-rank", "8", "--target-modules", "q_proj,v_proj"]),
    (["--lora-adapter-path", "/no/adapter"], "there is no such adapter", None),
    (["--rm-type", "format", "--math.format-pattern", "(a"], "not a regular expression",
     ["--rm-type", "format", "--math.format-pattern", "(a)"]),
    (["--generate", "tools", "--tools.tools", "/no/tools.py"], "no such file of tools",
     ["--generate", "tools", "--tools.tools", "calc"]),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "words"), [(bad, words) for bad, words, _ in PAIRS if words], ids=str)
def test_what_a_program_refuses_is_named(bad, words):
    told({"flags": bad}, words)


@pytest.mark.parametrize("good", [good for *_, good in PAIRS if good], ids=" ".join)
def test_its_neighbour_is_planned(good):
    found = outcome({"id": "one", "flags": good})
    assert found.verdict == ACCEPTED, found


def test_every_rule_can_be_read(tmp_path):
    """Also those that hold of none of these runs: their keys are there, and their tests and intervals are known."""
    plan = prepare(None, argv({"flags": ENGINE}, tmp_path))
    core = next(one for one in plan.selected if one.manifest.name == "core")
    fields = {"megatron": surface(), "server": server().fields}
    for file in stated():
        for rule in file["refuses"]:
            assert set(rule) == {"when", "what", "fix"} and rule["what"] and rule["fix"], rule
            for key, test in rule["when"].items():
                _holds(core, key, test, plan.selected, plan.config)
        keys = [key for rule in file["refuses"] for key in rule["when"]] + [key for k in file["bounds"].values()
                                                                             for key in k]
        unknown = [key for key in keys if (table := key.partition(".")[0]) in fields
                   and key.partition(".")[2].split("/")[0] not in (*fields[table], "tp_size")]
        assert not unknown and all(within(1, interval) in (True, False) for interval in file["bounds"])


ROLES = "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}" \
        "{{- raise_exception('roles must alternate') }}{%- endif %}{{- message.content }}{%- endfor %}"
PARTS = "{%- for message in messages %}{%- if message.content is string %}{{ message.content }}{%- else %}" \
        "{%- for one in message.content or [] %}{{ one.text }}{%- endfor %}{%- endif %}{%- endfor %}"
ANSWER = {"role": "assistant", "content": "2"}
TEMPLATES = [
    (ROLES, [USER], None), (ROLES, [USER, ANSWER, USER], None),
    (ROLES, [USER, USER], "the chat template refuses the messages (got roles must alternate)"),
    (PARTS, [USER | {"content": [{"type": "text", "text": "1+1="}]}], None),
    (ROLES, [USER | {"content": [{"type": "text", "text": "1+1="}]}], "the parts of a message as Python prints them"),
    ("{{- 'a' + messages[0].content }}", [USER | {"content": [{"type": "text", "text": "1"}]}], "can only concatenate"),
    ("{% if %}", [USER], "the chat template is no Jinja (got line 1: Expected an expression"),
    ("{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}{{ strftime_now('%Y') }}", [USER], None),
    ("{% for one in messages %}{{ one.content }}{% break %}{% endfor %}{{ eos_token + tone }}", [USER], None),
]


@pytest.mark.parametrize(("template", "messages", "words"), TEMPLATES, ids=str)
def test_the_template_takes_the_rows(template, messages, words):
    rows = [{"prompt": [USER], "label": "2"}] * (40 if words is None or "Jinja" in words else 0)
    rows.append({"prompt": messages, "label": "2"})  # also beyond the first rows, where its messages are unlike theirs
    flags = ["--prompt-data", "{here}/rows.jsonl", "--chat-template-path", "{here}/chat.jinja",
             "--apply-chat-template-kwargs", '{"tone": "calm"}']
    case = {"flags": flags, "files": {"chat.jinja": template, "rows.jsonl": "\n".join(map(json.dumps, rows))}}
    told(case, words)


def test_a_row_far_down_is_named():
    rows = [{"prompt": [USER], "label": "2"}] * 40 + [{"prompt": [USER, USER], "label": "2"}]
    case = {"flags": ["--prompt-data", "{here}/rows.jsonl", "--chat-template-path", "{here}/chat.jinja"],
            "files": {"chat.jinja": ROLES, "rows.jsonl": "\n".join(map(json.dumps, rows))}}
    told(case, "rows.jsonl, line 41: the chat template refuses the messages")


EPOCH = ["--num-rollout", "none", "--num-epoch", "1", "--rollout-batch-size", "4"]
LENGTHS = [
    (["--rollout-max-context-len", "60"], [20, 60], "line 2: the prompt has"),
    (["--rollout-max-context-len", "60", "--rollout-max-prompt-len", "50"], [10, 60], None),
    (["--rollout-max-prompt-len", "50"], [60, 70], "too few prompts are left for one rollout (got 0 of 2"),
    ([*EPOCH, "--rollout-max-prompt-len", "50"], [9, 9, 9, 60], "(got 3 of 4 rows have at most 50 tokens, 4 are"),
    ([*EPOCH, "--rollout-max-prompt-len", "50"], [9, 9, 9, 9, 60], None),
    ([*EVAL, "{here}/rows.jsonl", "--prompt-data", "examples/arithmetic/train.jsonl", "--eval-max-prompt-len", "50"],
     [60, 70], "eval.eval_prompt_data"),
]


@pytest.mark.parametrize(("flags", "sizes", "words"), LENGTHS, ids=str)
def test_prompts_leave_room_and_are_enough(flags, sizes, words):
    rows = [json.dumps({"prompt": [{"role": "user", "content": "1" * size}], "label": "2"}) for size in sizes]
    given = flags if "--prompt-data" in flags else ["--prompt-data", "{here}/rows.jsonl", *flags]
    case = {"flags": given, "files": {"rows.jsonl": "\n".join(rows)}}
    told(case, words)


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": None}, "config.json has no model_type"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "the checkpoint is no language model"), ({}, None),
])
def test_config_json_is_a_language_models(change, words):
    said = {**json.loads((TINY / "config.json").read_text()), **change}
    text = json.dumps({key: value for key, value in said.items() if value is not None})
    copies = {f"model/{name}": f"examples/arithmetic/tiny-qwen3/{name}"
              for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors")}
    case = {"flags": ["--hf-checkpoint", "{here}/model"], "files": {"model/config.json": text}, "copies": copies}
    told(case, words)


def test_an_iteration_that_is_not_whole_is_named():
    files = {"a/latest_checkpointed_iteration.txt": "3", "a/iter_0000003/__0_0.distcp": "x"}
    told({"flags": ["--load", "{here}/a"], "files": files}, "iteration 3 is incomplete (got no metadata.json")


@pytest.mark.parametrize("parts", [["metadata.json"], ["metadata.json", ".metadata", "common.pt", "miles.json"]])
def test_an_iteration_without_a_shard_is_not_whole(parts):
    files = {"a/latest_checkpointed_iteration.txt": "3", **{f"a/iter_0000003/{name}": "{}" for name in parts}}
    told({"flags": ["--load", "{here}/a"], "files": files}, "iteration 3 is incomplete (got no ")


@pytest.mark.parametrize(("positions", "flags", "words"), [
    (64, [], "made for a shorter context than the servers have (got 64 < 1024). Fix: --sglang-context-length 64"),
    (64, ["--sglang-context-length", "64"], None), (1024, [], None), (2048, [], None),
])
def test_a_draft_reads_as_many_tokens_as_the_servers_may_have(positions, flags, words):
    said = {**json.loads((TINY / "config.json").read_text()), "max_position_embeddings": positions}
    copies = {f"draft/{name}": str(TINY / name) for name in ("tokenizer.json", "model.safetensors")}
    case = {"flags": [*ENGINE, "--sglang-speculative-algorithm", "STANDALONE", "--sglang-speculative-draft-model-path",
                      "{here}/draft", "--sglang-speculative-num-steps", "3", "--sglang-speculative-eagle-topk", "1",
                      "--sglang-speculative-num-draft-tokens", "4", *flags],
            "files": {"draft/config.json": json.dumps(said)}, "copies": copies}
    told(case, words)


@pytest.mark.parametrize(("pattern", "opening", "words"), [
    (r"^\s*<think>.*</think>.*", "<think>\\n", "a tag that the chat template writes itself"),
    ("<think>.*", "<think>", "a tag that the chat template writes itself"),
    ("<think>.*", "", None), ("<answer>.*", "<think>\\n", None), (".*</think>.*", "<think>\\n", None),
])
def test_answers_do_not_hold_the_tag_that_opens_them(pattern, opening, words):
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n" + opening + "' }}{% endif %}")
    flags = ["--rm-type", "format", "--math.format-pattern", pattern, "--chat-template-path", "{here}/t.jinja"]
    case = {"flags": flags, "files": {"t.jinja": template}}
    told(case, words)


@pytest.mark.parametrize(("name", "words"), [
    ("data.jsonl", "there is no such prompt file"), ("none/data.jsonl", None), ("prompts", None),
])
def test_a_file_of_this_folder_is_here(name, words):
    told({"flags": ["--prompt-data", name]}, words)
