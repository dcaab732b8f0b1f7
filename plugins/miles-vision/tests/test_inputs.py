"""What engine and trainer compute with an image: it matters which, and what lies beside it does not."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
import torch
from miles_fsdp.context import ALONE
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.module import CausalModule, read
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.scored import Temperature
from miles_local.engine import LocalEngine
from miles_vision import processor
from miles_vision.images import ImageUnusable, opened
from miles_vision.plugin import Vision, VisionOptions
from pictures import picture

from miles_core.columns import Columns
from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import MilesError
from miles_core.stages.rollout import Request, SamplingParams
from miles_core.types import Drop, Prompt, Sample

FILES = {"red": picture((255, 0, 0)), "blue": picture((0, 0, 255)), "wide": picture((0, 255, 0), (40, 16))}


@pytest.fixture
def vision(checkpoint, tmp_path):
    """kind -> the plugin of a run; both roles in one, as this is about what they compute."""
    def made(kind, templated=True, engine="local", most=None, eval_most=None, evaluated=(), **options):
        config = with_values(
            RunConfig(), "test", checkpoint__hf_checkpoint=str(checkpoint(kind)), checkpoint__run_dir=str(tmp_path),
            rollout__apply_chat_template=templated, rollout__rollout_max_context_len=200, rollout__engine=engine,
            rollout__prompt_data=str(tmp_path / "train.jsonl"), rollout__rollout_max_prompt_len=most,
            eval__eval_max_prompt_len=eval_most, eval__eval_prompt_data=list(evaluated))
        return Vision(VisionOptions(**{"multimodal_keys": {"image": "pictures"}} | options), config)

    return made


def asked(images, text="What is it?", uid=0, **more):
    messages = ({"role": "user", "content": "<image>" * len(images) + text},)
    return Prompt(uid, uid, "", (1, 2, 3), metadata={"pictures": images, "other": 1}, messages=messages, **more)


def sample_of(prompt, answer, index=0):
    size = len(answer)
    return Sample(prompt, index, {
        "tokens": np.array([*prompt.token_ids, *answer], np.int32), "loss_mask": np.ones(size, np.uint8),
        "rollout_log_probs": np.zeros(size, np.float32), "versions": np.zeros(size, np.int32)}, size)


def trainer_log_probs(folder, plugin, samples):
    """[rows] of samples that share one micro-batch."""
    model = read(str(folder), FsdpOptions(), torch.float32, images=True)
    module = CausalModule(model, Temperature(1.0, 64), inputs=plugin.forward_inputs)
    batch = MicroBatch(Columns(), samples, torch.device("cpu"), ALONE)
    with torch.no_grad():
        return module(batch, lambda scored: scored.log_probs()), module.packs


def engine_answers(folder, plugin, prompts, count=6):
    async def work():
        engine = LocalEngine(folder, inputs=plugin.prefill_inputs)
        await engine.start()
        try:
            requests = [Request(str(i), one.token_ids, SamplingParams(max_new_tokens=count, ignore_eos=True), key=7)
                        for i, one in enumerate(prompts)]
            requests = [plugin.generate_request(one, prompt) for one, prompt in zip(requests, prompts, strict=True)]
            return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 60)
        finally:
            await engine.stop()

    return asyncio.run(work())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_another_image_gives_other_log_probs_and_neighbours_do_not(kind, checkpoint, vision):
    """Prompts of the same tokens with other images, one without any, one with two: each answer has the log-probs that
    the trainer gives it alone and in one row with the others, and not those of another image."""
    plugin, folder = vision(kind), checkpoint(kind)
    images = [["red"], ["blue"], ["wide", "red"], []]
    prompts = [plugin.prepare_prompt(asked([FILES[name] for name in names], uid=i)) for i, names in enumerate(images)]
    assert prompts[0].token_ids == prompts[1].token_ids
    answers = engine_answers(folder, plugin, prompts)
    samples = [sample_of(prompt, one.output_ids) for prompt, one in zip(prompts, answers, strict=True)]
    together, packs = trainer_log_probs(folder, plugin, samples)
    assert packs == (kind != "gemma3"), "tokens of Gemma 3's images see those after them: samples are padded"
    alone = torch.cat([trainer_log_probs(folder, plugin, [one])[0] for one in samples])
    drawn = torch.from_numpy(np.concatenate([one.log_probs for one in answers]))
    assert (together - alone).abs().max() <= 1e-4 and (together - drawn).abs().max() <= 1e-4
    swapped, _ = trainer_log_probs(folder, plugin, [sample_of(prompts[1], answers[0].output_ids)])
    first = len(answers[0].output_ids)
    print(kind, float((together - drawn).abs().max()), float((swapped - together[:first]).abs().max()))
    assert (swapped - together[:first]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_tower_has_a_gradient_from_every_micro_batch_and_is_gathered_with_the_whole(kind, checkpoint, vision):
    """Of zero without an image: ranks that have none then send what the others send. With one it is its own."""
    plugin = vision(kind)
    module = CausalModule(read(str(checkpoint(kind)), FsdpOptions(), torch.float32, images=True), Temperature(1.0, 64),
                          inputs=plugin.forward_inputs)
    gathered_alone = {id(one) for layer in module.text_layers() for one in layer.parameters()}
    assert gathered_alone and gathered_alone.isdisjoint(map(id, module.beside_text()))
    for images in ([], [FILES["red"]]):
        module.zero_grad()
        sample = sample_of(plugin.prepare_prompt(asked(images)), [65, 66, 67])
        batch = MicroBatch(Columns(), [sample], torch.device("cpu"), ALONE)
        module(batch, lambda rows: rows.log_probs().sum()).backward()
        gradients = [one.grad for one in module.beside_text()]
        assert gradients and all(one is not None for one in gradients)
        assert any(one.any() for one in gradients) == bool(images)


def test_every_image_has_its_tokens_once_and_preparing_again_changes_nothing(vision):
    plugin = vision("qwen2_5_vl")
    prompt = plugin.prepare_prompt(asked([FILES["red"], FILES["wide"]]))
    assert prompt.token_ids.count(261) == (24 * 16 + 40 * 16) // 64 and prompt.token_ids.count(259) == 2
    assert plugin.prepare_prompt(prompt) is prompt
    assert "pictures" not in prompt.metadata and prompt.metadata["other"] == 1
    request = plugin.generate_request(Request("a", (*prompt.token_ids, 7, 7), SamplingParams(), 0), prompt)
    assert request.images == (FILES["red"], FILES["wide"]) and request.input_ids == (*prompt.token_ids, 7, 7)
    assert request.unexpanded.count(261) == 2 and request.unexpanded[-2:] == (7, 7)
    others = [[token for token in ids if token != 261] for ids in (request.unexpanded, request.input_ids)]
    assert others[0] == others[1]


@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_images_that_touch_are_dropped_where_a_server_would_take_them_for_one(engine, vision):
    plugin = vision("qwen2_5_vl", templated=False, engine=engine)
    touching, apart = (plugin.prepare_prompt(Prompt(0, 3, text, (1,), metadata={"pictures": [FILES["red"]] * 2}))
                       for text in ("<image><image>?", "<image>, <image>?"))
    assert isinstance(touching, Drop) == (engine == "sglang") and not isinstance(apart, Drop)
    assert engine == "local" or touching.reason == "images_touch"


def test_an_answer_ends_with_a_token_that_stands_for_an_image(checkpoint, vision):
    """Engines embed it as text, and modules look for its pixels: nothing may be computed from it."""
    plugin, folder = vision("qwen2_5_vl"), checkpoint("qwen2_5_vl")
    prompt = plugin.prepare_prompt(asked([FILES["red"]]))
    request = plugin.generate_request(Request("a", prompt.token_ids, SamplingParams(stop_token_ids=(5,)), 0), prompt)
    assert request.sampling.stop_token_ids == (5, 261, 262)
    usual, _ = trainer_log_probs(folder, plugin, [sample_of(prompt, [65, 66, 67])])
    ended, _ = trainer_log_probs(folder, plugin, [sample_of(prompt, [65, 66, 261])])
    assert torch.equal(usual[:2], ended[:2]) and torch.isfinite(ended).all()


def test_an_image_is_the_same_in_every_form_and_under_any_key(vision, tmp_path):
    """Paths and addresses of files, base64 in lines, and a column that has the name of ours."""
    (tmp_path / "a b.png").write_bytes(FILES["wide"])
    lines = base64.encodebytes(FILES["wide"]).decode()
    forms = [FILES["wide"], "a b.png", f"file://{tmp_path}/a%20b.png", lines, f"data:image/png;base64,{lines}",
             {"bytes": None, "path": "a b.png"}]
    messages = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},)
    assert "\n" in lines.strip()
    for key in ("pictures", "image_files"):
        seen = [vision("qwen2_5_vl", multimodal_keys={"image": key}).prepare_prompt(
            Prompt(0, 0, "", (1,), metadata={key: [form]}, messages=messages)) for form in forms]
        assert all(isinstance(one, Prompt) and one.metadata == seen[0].metadata for one in seen), seen
        assert {one.token_ids.count(261) for one in seen} == {10}


def test_a_path_is_that_of_a_file_beside_the_prompts_that_name_it(vision, tmp_path):
    """Rows of evaluation call an image as rows of training do, and have others."""
    for folder, name in ((tmp_path, "red"), (tmp_path / "held", "wide")):
        folder.mkdir(exist_ok=True)
        (folder / "0.png").write_bytes(FILES[name])
    (tmp_path / "1.png").write_bytes(FILES["red"])
    plugin = vision("qwen2_5_vl", evaluated=("held", str(tmp_path / "held" / "test.jsonl@[:4]")))
    trained, held = (plugin.prepare_prompt(asked(["0.png"], stream=stream)) for stream in ("train", "eval/held"))
    assert [one.token_ids.count(261) for one in (trained, held)] == [6, 10]
    missing = plugin.prepare_prompt(asked(["1.png"], stream="eval/held"))
    assert isinstance(missing, Drop) and missing.reason == "image_missing"


@pytest.mark.parametrize(("images", "text", "options", "reason"), [
    ([FILES["red"][:60]], "<image>?", {}, "image_damaged"),
    ([b"qoif\0\0\0\4\0\0\0\4\3\0"], "<image>?", {}, "image_damaged"),
    (["pictures/none.png"], "<image>?", {}, "image_missing"),
    (["https://example.com/a.png"], "<image>?", {}, "image_damaged"), ([7], "<image>?", {}, "image_damaged"),
    ([FILES["red"]], "<image>?", {"max_image_pixels": 100}, "image_too_large"),
    ([FILES["red"]], "No mark.", {}, "image_count"), ([], "<image>?", {}, "image_count"),
    ([FILES["red"]] * 40, "<image>" * 40, {}, "prompt_too_long"),
], ids=["cut off", "IndexError", "missing", "address", "number", "huge", "unmarked", "none", "long"])
def test_what_cannot_be_shown_is_dropped_with_its_reason(images, text, options, reason, vision):
    prompt = Prompt(0, 3, "", (), metadata={"pictures": images}, messages=({"role": "user", "content": text},))
    answer = vision("qwen2_5_vl", **options).prepare_prompt(prompt)
    assert isinstance(answer, Drop) and answer.reason == reason and "row 3" in answer.detail


def test_no_program_runs_for_an_image(monkeypatch):
    """Tools and rows bring images, and Pillow has Ghostscript run what is PostScript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_args: pytest.fail("it ran"))
    with pytest.raises(ImageUnusable) as refused:
        opened(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n", 1000)
    assert refused.value.reason == "image_damaged"


@pytest.mark.parametrize(("stream", "eval_most", "fits"), [
    ("train", 199, False), ("eval/held", None, False), ("eval/held", 199, True)])
def test_the_limit_of_prompts_counts_for_evaluation_that_has_none_of_its_own(stream, eval_most, fits, vision):
    answer = vision("qwen2_5_vl", most=8, eval_most=eval_most).prepare_prompt(asked([FILES["red"]], stream=stream))
    assert isinstance(answer, Prompt) if fits else answer.reason == "prompt_too_long"


@pytest.mark.parametrize("between", ["", ", "], ids=["touch", "apart"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_each_of_several_images_has_positions_of_its_own(kind, between, checkpoint, vision):
    """The answer's log-probs are those of transformers' own forward, with positions that it counts for such images.

    It takes tokens of one kind that touch for one image; every second one is a video of one frame there, which has
    the same positions and is told apart."""
    plugin, folder = vision(kind, templated=False), checkpoint(kind)
    names = ["red", "wide", "blue"]
    images, sizes = [FILES[name] for name in names], torch.tensor([6, 10, 6])  # tokens of 8 x 8 pixels
    text = f"<|vision_start|>{between.join(['<image>'] * 3)}<|vision_end|>What?"
    prompt = plugin.prepare_prompt(Prompt(0, 0, text, (1, 2), metadata={"pictures": images}))
    (answer,) = engine_answers(folder, plugin, [prompt])
    sample = sample_of(prompt, answer.output_ids)
    trained, _ = trainer_log_probs(folder, plugin, [sample])

    model = read(str(folder), FsdpOptions(), torch.float32, images=True)
    pixels = processor.load(str(folder)).image_processor(images=list(map(opened, images)), return_tensors="pt")
    tokens, grids = torch.from_numpy(sample.tokens.astype(np.int64))[None], pixels["image_grid_thw"]
    places = (tokens[0] == 261).nonzero()[:, 0]
    assert len(places) == sizes.sum() and (places[-1] - places[0] + 1 == len(places)) == (not between)
    kinds = torch.zeros_like(tokens)
    kinds[0, places] = torch.tensor([1, 2, 1]).repeat_interleave(sizes)
    positions, _ = model.model.get_rope_index(tokens, kinds, image_grid_thw=grids[::2], video_grid_thw=grids[1::2])
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=positions, **pixels).logits[0]
    own = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[len(prompt.token_ids) - 1:, 0]
    drawn = torch.from_numpy(answer.log_probs)
    print(kind, float((trained - own).abs().max()), float((drawn - own).abs().max()))
    assert (trained - own).abs().max() <= 1e-4 and (drawn - own).abs().max() <= 1e-4


def test_images_that_touch_and_have_other_tokens_are_refused(checkpoint, vision):
    """By the error of a generator that changes them."""
    plugin = vision("qwen2_5_vl")
    model = read(str(checkpoint("qwen2_5_vl")), FsdpOptions(), torch.float32, images=True)
    with pytest.raises(MilesError) as caught:
        plugin.prefill_inputs(model, [259, *[261] * 15, 260, 65], [FILES["red"], FILES["wide"]])
    assert caught.value.code == "vision-images-differ" and "[6, 10]" in str(caught.value)
