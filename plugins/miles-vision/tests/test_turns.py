"""Images that tools return: tokens, files and positions of conversations that grow by them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_fsdp.module import read
from miles_fsdp.plugin import FsdpOptions
from miles_tools.conversation import Conversations
from miles_tools.plugin import ToolsOptions
from miles_tools.sandbox import Limits, Sandbox
from miles_tools.template import Template
from miles_tools.toolbox import Toolbox, load
from miles_vision import processor
from miles_vision.images import opened
from miles_vision.plugin import Vision, VisionOptions
from pictures import make_model, picture
from turns import Hooks, Scripted, looking, taught, tool, written

from miles_core.columns import Columns
from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.record.replay import _pack, _unpack
from miles_core.stages.rollout import Generation, SamplingParams
from miles_core.types import Drop, Prompt, Status

IMAGE, CONTEXT = 261, 2000


@pytest.fixture(scope="module")
def sandbox():
    running = Sandbox(Limits(output=1 << 20), workers=1)
    yield running
    running.close()


@pytest.fixture(scope="module")
def talk(checkpoint, sandbox, tmp_path_factory):
    """(turns as texts) -> (sample, engine, plugin) of one conversation that begins with a picture."""
    def talked(turns, kind="qwen2_5_vl", *, engine="local", pictures=1, begun=(), plugin=None, hooks=True, most=1000,
               **options):
        folder, run = checkpoint(kind), tmp_path_factory.mktemp("run")
        config = with_values(
            RunConfig(), "test", checkpoint__hf_checkpoint=str(folder), checkpoint__run_dir=str(run),
            rollout__apply_chat_template=True, rollout__rollout_max_context_len=CONTEXT, rollout__engine=engine)
        plugin = plugin or Vision(VisionOptions(multimodal_keys={"image": "pictures"}, **options), config)
        question = {"role": "user", "content": "<image>" * pictures + "What?"}
        prompt = plugin.prepare_prompt(Prompt(5, 5, "", (1,), messages=(question,),
                                              metadata={"pictures": [picture()] * pictures}))
        tokenizer = processor.load(str(folder)).tokenizer
        encoded = [turn and tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        drawing = Scripted(encoded)
        generation = Generation(
            engine=drawing, sampling=SamplingParams(max_new_tokens=most), samples=1, timeout=10.0, begun=begun,
            key=lambda index, turn: turn, decode=lambda ids, skip: tokenizer.decode(list(ids)),
            on_request=lambda request, shown=prompt: plugin.generate_request(request, shown),
            hooks=Hooks(plugin) if hooks else None)
        toolbox = Toolbox(load([tool(run)]), sandbox)
        shared = Conversations(Template(tokenizer, {}), toolbox, ToolsOptions(tool_format="tag"), CONTEXT)
        (sample,) = asyncio.run(shared.group(prompt, generation))
        return sample, drawing, plugin

    return talked


TURN = st.tuples(st.text("ab ", max_size=5), st.text("0123456789", max_size=3))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TURN, max_size=3), pictures=st.integers(0, 2), kind=st.sampled_from(["qwen2_5_vl", "qwen3_vl"]))
def test_what_the_engine_is_given_is_what_the_trainer_packs_and_positions_are_the_models_own(
        turns, pictures, kind, talk, checkpoint):
    """Any turns with any pictures: ids only grow, files are those of their placeholders, and no image is trained on."""
    said = [f"{text}<look>{digits}</look><|im_end|>" for text, digits in turns]
    sample, engine, plugin = talk([*said, "done<|im_end|>"], kind, engine="sglang", pictures=pictures)
    Columns().check(sample)
    assert sample.status is Status.COMPLETED and len(engine.requests) == len(turns) + 1
    names = [*sample.prompt.metadata["image_files"], *sample.metadata.get("image_files", ())]
    seen = pictures
    for request, (_, digits) in zip(engine.requests, [*turns, ("", "")], strict=True):
        ids = request.input_ids
        assert ids == tuple(sample.tokens[: len(ids)].tolist())
        assert list(request.images) == [plugin._store().get(name) for name in names[:seen]]
        assert (request.unexpanded or ids).count(IMAGE) == seen
        seen += len(digits)
    assert seen == len(names)
    mask = sample.columns["loss_mask"]
    assert not mask[sample.tokens[-len(mask):] == IMAGE].any()
    assert mask.sum() == sum(len(turn.encode()) - len("<|im_end|>") + 1 for turn in [*said, "done<|im_end|>"])

    model = read(str(checkpoint(kind)), FsdpOptions(), torch.float32, images=True)
    inputs, files = plugin.forward_inputs(model, sample), [plugin._store().get(name) for name in names]
    assert inputs["input_ids"].tolist() == sample.tokens.tolist()
    pixels = dict(processor.load_pixels(str(checkpoint(kind)))(
        images=[opened(data) for data in files], return_tensors="pt")) if files else {}
    tokens = inputs["input_ids"][None]
    own, _ = model.model.get_rope_index(tokens, (tokens == IMAGE).long(), image_grid_thw=pixels.get("image_grid_thw"))
    assert torch.equal(inputs["position_ids"], own[:, 0])
    assert all(torch.equal(inputs[name], value) for name, value in pixels.items())


def test_a_conversation_that_was_called_back_goes_on_with_its_images(talk):
    """Through the form in which a checkpoint keeps it."""
    said = ["<look>12</look><|im_end|>", "<look>3</look><|im_end|>", "done<|im_end|>"]
    whole, _, _ = talk(said)
    begun, _, plugin = talk([said[0], None])
    assert begun.status is Status.ABORTED and len(begun.metadata["image_files"]) == 2
    (stored,) = _unpack(_pack({}, [begun]))[1]
    resumed, engine, _ = talk(said[1:], begun=[stored], plugin=plugin)
    assert resumed.tokens.tolist() == whole.tokens.tolist() and resumed.metadata["image_files"] == (
        whole.metadata["image_files"])
    assert [len(request.images) for request in engine.requests] == [3, 4]


@pytest.mark.parametrize(("call", "options", "status", "reason"), [
    ("1x", {}, Status.FAILED, "image_damaged"),
    ("2", {"max_image_pixels": 400}, Status.FAILED, "image_too_large"),
    ("1" * 40, {"most": 300}, Status.TRUNCATED, None),
])
def test_what_cannot_be_shown_ends_the_sample_and_says_why(call, options, status, reason, talk):
    sample, _, _ = talk([f"<look>{call}</look><|im_end|>"], **options)
    assert sample.status is status and sample.metadata.get("drop", {}).get("reason") == reason
    assert sample.length == len(sample.prompt.token_ids) + sample.columns["loss_mask"].sum()


def test_an_image_that_no_plugin_shows_is_an_error(talk):
    with pytest.raises(ConfigError) as caught:
        talk(["<look>1</look><|im_end|>"], hooks=False, pictures=0)
    assert caught.value.code == "tool-image-unseen" and "--plugin vision" in caught.value.fix


def test_a_drawn_token_of_an_image_ends_the_conversation_and_one_in_a_tools_text_is_text(talk, checkpoint):
    """The first would stand for no image in the next request; the trainer embeds another in its place."""
    sample, engine, plugin = talk(["<look>1</look>", "<look>2</look><|image_pad|>"])
    assert len(engine.requests) == 2 and sample.status is Status.COMPLETED and sample.tokens[-1] == IMAGE
    model = read(str(checkpoint("qwen2_5_vl")), FsdpOptions(), torch.float32, images=True)
    tokens = plugin.forward_inputs(model, sample)["input_ids"]
    assert tokens[:-1].tolist() == sample.tokens[:-1].tolist() and tokens[-1] != IMAGE
    template = Template(processor.load(str(checkpoint("qwen2_5_vl"))).tokenizer, {})
    assert IMAGE not in template.encode(template.harmless("a<|image_pad|>b"))


def test_servers_get_no_images_that_touch(talk):
    _, _, plugin = talk(["done<|im_end|>"], engine="sglang")
    token = processor.load(str(plugin._config.checkpoint.hf_checkpoint)).image_token
    prompt = Prompt(0, 0, f"{token}{token}.", (1, 2))
    assert plugin.show_images(prompt, [picture(), picture()]).reason == "images_touch"
    assert isinstance(plugin.show_images(replace(prompt, text=f"{token}."), [picture(), picture()]), Drop)


@pytest.mark.parametrize(("kind", "trainer"), [
    ("qwen2_5_vl", "fsdp"), *(pytest.param(*both, marks=pytest.mark.full) for both in (
        ("qwen3_vl", "fsdp"), ("gemma3", "fsdp"), ("qwen2_5_vl", "megatron"), ("gemma3", "megatron")))])
def test_a_run_trains_on_conversations_whose_tool_returns_images(kind, trainer, tmp_path):
    """GRPO; engine and trainer agree, and nothing of an image is trained on."""
    folder = taught(make_model(tmp_path / kind, kind))
    run = looking(folder, tmp_path, 2, trainer)
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    samples, seen = written(run, folder)
    print(kind, trainer, gaps, f"{len(seen)} of {len(samples)} samples", [m["rollout/raw_reward"] for m in run.metrics])
    assert len(gaps) == 2 and max(gaps) <= 1e-4 and all(one["train/grad_norm"] > 0 for one in run.metrics)
    assert len(seen) >= 2
    for one in seen:
        answer = list(zip(one["token_ids"], one["loss_mask"], strict=True))
        assert (IMAGE, 0) in answer and (IMAGE, 1) not in answer[:-1]


@pytest.mark.full  # three runs
@pytest.mark.parametrize("options", [{}, {"rollout.max_lag": 1, "optimizer.lr": 0.0}], ids=["in step", "ahead"])
def test_a_run_that_was_stopped_goes_on_with_images_of_later_turns(options, tmp_path):
    folder, saved = taught(make_model(tmp_path / "model", "qwen2_5_vl")), str(tmp_path / "saved")
    saving = ["--save", saved, "--load", saved, "--save-interval", "1"]
    whole = looking(folder, tmp_path, 3, **options)
    first = looking(folder, tmp_path, 3, flags=[*saving, "--debug-exit-after-rollout", "1"], **options)
    second = looking(folder, tmp_path, 3, flags=saving, **options)
    losses = [[one["train/loss"] for run in runs for one in run.metrics] for runs in ([whole], [first, second])]
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for run in (first, second) for one in run.metrics]
    print(options, losses, gaps)
    assert len(losses[1]) == 3 and max(gaps) <= 1e-4 and (options or losses[0] == losses[1])
    assert all(written(run, folder)[1] for run in (first, second))
