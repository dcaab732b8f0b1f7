"""Any architecture through its transformers module: transformers' own answers, through the engine's contract."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from miles_local.engine import LocalEngine
from miles_local.modules import ModuleDecoder
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from miles_core.errors import CheckpointError, EngineError
from miles_core.stages.rollout import Request, SamplingParams

VOCAB = 96
TINY = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 640, "initializer_range": 0.3,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# A norm of what is all but zero would make more of rounding than the comparisons allow: hence the epsilon.
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-2, "linear_num_key_heads": 2,
          "initializer_range": 0.1, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
KINDS = {
    "granite": {},
    "seed_oss": {"head_dim": 16},  # biases on q, k and v
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
               "query_pre_attn_scalar": 16},  # windows in every second layer, soft caps, tied embeddings
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "sliding_window": 8,
                    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "rms_norm_eps": 1e-2, "initializer_range": 0.1,
                    "hidden_size_per_layer_input": 0},  # heads that differ from layer to layer
    "gemma4_text E2B": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "global_head_dim": 32,
                        "rms_norm_eps": 1e-2, "initializer_range": 0.1, "hidden_size_per_layer_input": 16,
                        "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
                        "use_double_wide_mlp": True},  # layers without keys of their own, a token's embedding in each
    "glm4": {"head_dim": 16},  # norms after attention and MLP, partial rotary embedding
    "starcoder2": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # other names on disk, experts stacked in memory
    "qwen3_next": {**LINEAR, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "shared_expert_intermediate_size": 24},  # states in one layer, keys and values in the other
    "olmo_hybrid": LINEAR,  # the same, with three convolutions in a layer
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 4,
                   "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16, "initializer_range": 0.1,
                   "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "moe_shared_expert_intermediate_size": 24},  # Mamba-2, and layers without a past
}  # fmt: skip
ANEW = {
    "bloom": {},  # positions made from what a mask looks like
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # a past of its own kind
    "deepseek_v32": {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 16,
                     "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_topk": 4,
                     "index_n_heads": 8, "index_head_dim": 16, "first_k_dense_replace": 1, "rms_norm_eps": 1e-2,
                     "initializer_range": 0.1},  # keys that an indexer chooses by keys of its own
}  # fmt: skip


def build(kind, folder, seed=0):
    """Write a random checkpoint; returns its transformers model."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind.partition(" ")[0], **{**TINY, **{**KINDS, **ANEW}.get(kind, {})})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide what is left out
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (folder, transformers model)."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {kind: (folder, build(kind, folder)) for kind, folder in made.items()}


def request(index, length, **sampling):
    ids = np.random.default_rng(index).integers(0, VOCAB, length).tolist()
    return Request(f"r{index}", tuple(ids), SamplingParams(**{"max_new_tokens": 14, **sampling}), key=1000 + index)


def ask(folder, requests, before=None, **options):
    """The engine's answers to all requests at once, after `before(engine)`."""

    async def run():
        engine = LocalEngine(folder, **options)
        async with asyncio.timeout(30):
            await engine.start()
            try:
                if before is not None:
                    await before(engine)
                return await asyncio.gather(*(engine.generate(one) for one in requests))
            finally:
                await engine.stop()

    return asyncio.run(run())


def logits_of(model, asked, answer):
    """[N, V] of the positions that drew, by one full forward."""
    ids = [*asked.input_ids, *answer.output_ids.tolist()]
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, len(asked.input_ids) - 1 : -1]


def drawn(model, asked, answer):
    """[N] log-probs of what was drawn, by one full forward."""
    expected = torch.log_softmax(logits_of(model, asked, answer) / asked.sampling.temperature, -1)
    return expected.gather(1, torch.from_numpy(answer.output_ids).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_as_near_to_float64_as_a_full_forward(models, kind, caplog):
    """Times two, or 1e-5. Unequal lengths in one batch, any temperature and cut, contexts beyond the window."""
    folder, model = models[kind]
    wide = copy.deepcopy(model).double()
    if "num_experts_per_tok" in KINDS[kind]:
        wide.set_experts_implementation("eager")  # the grouped product has no float64
    asked = [request(i, 1 + 5 * i, temperature=0.6 + 0.3 * i, top_k=i or -1, top_p=1 - 0.1 * i) for i in range(5)]
    asked += [Request(f"twin{i}", asked[3].input_ids, SamplingParams(max_new_tokens=30), key=i) for i in range(3)]
    ours = theirs = 0.0
    for one, answer in zip(asked, ask(folder, asked, max_batch=4), strict=True):
        exact = drawn(wide, one, answer)
        ours = max(ours, np.abs(answer.log_probs - exact).max())
        theirs = max(theirs, np.abs(drawn(model, one, answer) - exact).max())
        assert answer.finish_reason == "length"
    assert ours <= max(1e-5, 2 * theirs) < 1e-4
    assert "anew" not in caplog.text, "from a cache"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_generate(models, kind):
    folder, model = models[kind]
    asked = [request(i, length, temperature=0.0) for i, length in enumerate((3, 17, 8))]
    for one, answer in zip(asked, ask(folder, asked), strict=True):
        whole = model.generate(torch.tensor([one.input_ids]), max_new_tokens=14, do_sample=False)
        assert answer.output_ids.tolist() == whole[0, len(one.input_ids) :].tolist()


def test_time_steps_of_mamba_have_no_limit(tmp_path):
    """transformers raises those of whole sequences to time_step_min, and not those of single tokens."""
    build("nemotron_h", tmp_path)
    tensors = {name: torch.full_like(tensor, -7.5) if name.endswith("dt_bias") else tensor
               for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    one = request(1, 40)
    [answer] = ask(tmp_path, [one])
    limited = drawn(model, one, answer)
    model.model.layers[0].mixer.time_step_limit = (0.0, float("inf"))
    assert np.abs(answer.log_probs - drawn(model, one, answer)).max() < 1e-5 < np.abs(answer.log_probs - limited).max()


@pytest.mark.parametrize("kind", ["granite", "gemma2", "mixtral"])
def test_an_update_by_the_names_on_disk_changes_the_answers(models, kind, tmp_path):
    """To those of the new checkpoint, from random weights; a request in flight carries both versions."""
    folder, _ = models[kind]
    build(kind, tmp_path, seed=1)
    stream = load_file(tmp_path / "model.safetensors")
    asked = [request(i, 4 + i) for i in range(3)]
    answers = ask(folder, asked, lambda engine: engine.update_weights(stream.items(), 2), random_init=True)
    for answer, expected in zip(answers, ask(tmp_path, asked), strict=True):
        assert answer.output_ids.tolist() == expected.output_ids.tolist()
        assert set(answer.versions) == {2}
    old = ask(folder, asked)
    assert [one.output_ids.tolist() for one in old] != [one.output_ids.tolist() for one in answers]


def test_the_weights_are_copies(models):
    """What the trainer does to its tensors after a sync is not seen."""
    folder, _ = models["granite"]
    mine = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}

    async def update_then_spoil(engine):
        await engine.update_weights(mine.items(), 1)
        for tensor in mine.values():
            tensor.zero_()

    asked = [request(1, 6)]
    assert ask(folder, asked, update_then_spoil)[0].output_ids.tolist() == ask(folder, asked)[0].output_ids.tolist()


@pytest.mark.parametrize(("kind", "edit", "message"), [
    ("granite", lambda t: t.pop("model.norm.weight"), "incomplete.*model.norm.weight"),
    ("granite", lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "unknown tensor.*model.extra.weight"),
    ("granite", lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "wrong shape.*model.norm.weight"),
    ("granite", lambda t: t.update({"model.norm.weight": torch.full((48,), torch.nan)}), "not finite"),
    ("mixtral", lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight"), "do not fit"),
    ("mixtral", lambda t: [t.pop(f"model.layers.1.block_sparse_moe.experts.3.w{i}.weight") for i in (1, 2, 3)],
     "wrong shape"),
])  # fmt: skip
def test_a_bad_update_changes_nothing(models, capfd, kind, edit, message):
    folder, _ = models[kind]
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)

    async def body(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(tensors.items(), 1)
        assert engine.version == 0

    asked = [request(2, 6)]
    capfd.readouterr()
    assert ask(folder, asked, body)[0].output_ids.tolist() == ask(folder, asked)[0].output_ids.tolist()
    assert capfd.readouterr() == ("", "")  # transformers' own report stays unseen


def test_weights_of_text_need_no_vision_tower(tmp_path):
    """The text model alone is built; of that nothing may be missing."""
    text = {**TINY, "head_dim": 16, "eos_token_id": 1}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=4)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    decoder, tensors = ModuleDecoder(tmp_path, torch.float32), load_file(tmp_path / "model.safetensors")
    sent = {name: 2 * tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    assert len(sent) < len(tensors)
    norm = decoder.stage(sent.items()).model.norm.weight
    assert torch.equal(norm, sent.pop("language_model.model.norm.weight"))
    with pytest.raises(EngineError) as caught:
        decoder.stage(sent.items())
    assert caught.value.code == "weights-names-mismatch" and "norm.weight" in str(caught.value)


def test_experts_under_another_key_and_buffers_of_a_tower(tmp_path):
    """Of Gemma 4: config.json has a word of its own for how many a token passes, and its tower has buffers."""
    text = {**TINY, **KINDS["gemma4_text"], "eos_token_id": 1, "pad_token_id": 0, "enable_moe_block": True,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
             "standardize": True}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=tower, audio_config=None)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    decoder, tensors = ModuleDecoder(tmp_path, torch.float32), load_file(tmp_path / "model.safetensors")
    assert (decoder.shape.topk, decoder.shape.sparse) == (2, {0, 1})
    assert any(name.endswith("std_bias") for name in tensors)
    decoder.stage((name, tensor) for name, tensor in tensors.items() if name.startswith("model.language_model."))
    with pytest.raises(EngineError) as caught:
        decoder.stage((name, tensor) for name, tensor in tensors.items() if "layer_scalar" not in name)
    assert caught.value.code == "weights-names-mismatch" and "layer_scalar" in str(caught.value)


def test_a_text_model_whose_surroundings_no_class_decodes_is_taken_out(tmp_path):
    """Of Mistral 3; queries grow with their position at every step, and what lies beside the text model is left out."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    text = {**TINY, "model_type": "ministral3", "head_dim": 16, "rope_parameters": rope, "initializer_range": 0.1}
    tower = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=tower, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    asked = [request(i, 1 + 9 * i) for i in range(3)]
    for one, answer in zip(asked, ask(tmp_path, asked), strict=True):
        assert np.abs(answer.log_probs - drawn(model, one, answer)).max() <= 1e-5
    decoder, tensors = ModuleDecoder(tmp_path, torch.float32), load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    own = {f"model.{name}" if "lm_head" not in name else "lm_head.weight": 2 * tensor
           for name, tensor in ((name.replace("language_model.model.", "language_model."), tensor)
                                for name, tensor in tensors.items())}
    released = {name: 2 * tensor for name, tensor in tensors.items()}
    for names in (released, own):
        module = decoder.stage(names.items())
        assert torch.equal(module.lm_head.weight, 2 * tensors["language_model.lm_head.weight"])
        assert torch.equal(module.model.norm.weight, 2 * tensors["language_model.model.norm.weight"])


def test_in_bfloat16_log_probs_are_near(models):
    folder, model = models["granite"]
    asked = [request(i, 5 + 4 * i) for i in range(3)]
    for one, answer in zip(asked, ask(folder, asked, dtype=torch.bfloat16), strict=True):
        expected = torch.log_softmax(logits_of(model, one, answer), -1)
        drawn = expected.gather(1, torch.from_numpy(answer.output_ids).long()[:, None])[:, 0].numpy()
        assert np.abs(answer.log_probs - drawn).mean() <= 0.2


@pytest.mark.parametrize("kind", ANEW)
def test_what_no_cache_here_fits_is_computed_anew(kind, tmp_path, caplog):
    """Rows of unequal length, of which two begin alike; the log says that it takes long."""
    model = build(kind, tmp_path)
    asked = [request(i, 1 + 9 * i) for i in range(3)]
    twin = Request("twin", asked[2].input_ids, asked[2].sampling, key=7)
    for one, answer in zip([*asked, twin], ask(tmp_path, [*asked, twin]), strict=True):
        assert np.abs(answer.log_probs - drawn(model, one, answer)).max() <= 1e-5
    assert f"{kind} decodes by computing a sequence anew" in caplog.text


def test_a_table_of_integers_is_not_rounded(tmp_path):
    """DeepSeek-V4's experts by token, whose numbers bfloat16 does not have."""
    if "deepseek_v4" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not know it")
    config = AutoConfig.for_model("deepseek_v4", **{
        **TINY, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
        "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
    model = AutoModelForCausalLM.from_config(config)
    table = model.model.layers[0].mlp.gate.tid2eid
    table[VOCAB - 1] = 257
    config.save_pretrained(tmp_path)
    module = ModuleDecoder(tmp_path, torch.bfloat16).stage(model.state_dict().items())
    assert torch.equal(module.model.layers[0].mlp.gate.tid2eid, table)


def test_a_module_that_looks_ahead_is_refused(tmp_path):
    AutoConfig.for_model("bert", **TINY).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot decode .*logits differ"):
        ask(tmp_path, [], random_init=True)


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "cuneiform"}')
    with pytest.raises(CheckpointError, match="does not support this architecture.*cuneiform"):
        LocalEngine(tmp_path)


def routed(asked):
    return Request(asked.id, asked.input_ids, asked.sampling, asked.key, frozenset(["routed_experts"]))


def test_routed_experts_are_those_of_a_full_forward(models):
    """Of prompt and answer but the last token, in a batch of unequal lengths; `output_router_logits` is the witness."""
    folder, model = models["mixtral"]
    asked = [routed(request(i, 4 + 5 * i)) for i in range(3)] + [request(7, 9)]
    *answers, plain = ask(folder, asked)
    assert plain.extra == {}
    for one, answer in zip(asked, answers, strict=False):
        found = answer.extra["routed_experts"]
        ids = [*one.input_ids, *answer.output_ids.tolist()][:-1]
        assert (found.dtype, found.shape) == (np.int32, (len(ids), 2, 2))
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        expected = torch.stack([each.topk(2).indices.sort(-1).values for each in logits], 1)
        assert np.array_equal(np.sort(found, -1), expected.numpy())


def test_routed_experts_of_a_model_without_any_are_refused(models):
    with pytest.raises(EngineError, match=r"\[routed-experts-unavailable\]"):
        ask(models["granite"][0], [routed(request(1, 5))])
