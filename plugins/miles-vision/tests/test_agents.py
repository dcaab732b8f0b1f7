"""Images that agents send: the row's, those of later turns, and what a session does with others."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from base64 import b64decode, b64encode

import pytest
import torch
from miles_fsdp.module import read
from miles_fsdp.plugin import FsdpOptions
from miles_tools.agent import Agents
from miles_tools.plugin import ToolsOptions
from miles_vision import processor
from miles_vision.plugin import Vision, VisionOptions
from pictures import make_model, picture
from turns import Hooks, Scripted, looking, taught, written

from miles_core.columns import Columns
from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.stages.rollout import Generation, SamplingParams
from miles_core.types import Prompt, Status

IMAGE, END = 261, "<|im_end|>"


def part(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"}}


@pytest.fixture
def talk(checkpoint, tmp_path):
    """(an agent's function, what the model draws) -> (sample, engine, plugin) of one conversation about a picture."""
    def talked(agent, *turns, pictures=1, **options):
        folder = checkpoint("qwen2_5_vl")
        config = with_values(
            RunConfig(), "test", checkpoint__hf_checkpoint=str(folder), checkpoint__run_dir=str(tmp_path),
            rollout__apply_chat_template=True, rollout__rollout_max_context_len=2000, rollout__engine="local")
        plugin = Vision(VisionOptions(multimodal_keys={"image": "pictures"}, **options), config)
        question = {"role": "user", "content": "<image>" * pictures + "What?"}
        prompt = plugin.prepare_prompt(Prompt(5, 5, "", (1,), messages=(question,),
                                              metadata={"pictures": [picture()] * pictures}))
        tokenizer = processor.load(str(folder)).tokenizer
        engine = Scripted([tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns])
        generation = Generation(
            engine=engine, sampling=SamplingParams(max_new_tokens=1000), samples=1, timeout=20.0,
            key=lambda index, turn: turn, decode=lambda ids, skip: tokenizer.decode(list(ids)), hooks=Hooks(plugin),
            on_request=lambda request, shown=prompt: plugin.generate_request(request, shown))

        async def call(task, _url):
            return await asyncio.to_thread(agent, lambda *messages: asked(task, messages), task.messages)

        agents = Agents(ToolsOptions(), config, call)
        try:
            (sample,) = asyncio.run(agents.generate(prompt, generation))
        finally:
            agents.stop()
        return sample, engine, plugin

    return talked


def asked(task, messages):
    """The answer's message, or an error's code and sentence."""
    request = urllib.request.Request(
        f"{task.base_url}/chat/completions", json.dumps({"model": "miles", "messages": messages}).encode(),
        {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def test_an_agent_sees_the_rows_image_and_shows_others(talk, checkpoint):
    """The engine gets every file, the trainer packs and places the same ids, and messages name what the run keeps."""
    other, seen = picture(side=32), []

    def agent(ask, messages):
        seen.extend(messages)
        first = ask(*messages)
        more = {"role": "user", "content": [{"type": "text", "text": "<|image_pad|>?"}, part(other), part(other),
                                            {"type": "text", "text": "And?"}]}
        ask(*messages, first, more)

    sample, engine, plugin = talk(agent, f"A square.{END}", f"Two.{END}")
    Columns().check(sample)
    url = seen[0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and b64decode(url.partition(",")[2]) == picture()
    names = [*sample.prompt.metadata["image_files"], *sample.metadata["image_files"]]
    files = [plugin._store().get(name) for name in names]
    assert files == [picture(), other, other] and [list(one.images) for one in engine.requests] == [files[:1], files]
    assert sample.status is Status.COMPLETED
    for request in engine.requests:
        assert request.input_ids == tuple(sample.tokens[: len(request.input_ids)].tolist())
    assert not sample.columns["loss_mask"][sample.tokens[-sample.response_length:] == IMAGE].any()
    kept = sample.metadata["messages"]
    assert kept[2]["content"][1] == {"type": "image", "image": names[1]} and "base64" not in json.dumps(kept)
    model = read(str(checkpoint("qwen2_5_vl")), FsdpOptions(), torch.float32, images=True)
    inputs = plugin.forward_inputs(model, sample)
    assert inputs["input_ids"].tolist() == sample.tokens.tolist() and len(inputs["image_grid_thw"]) == 3


def test_images_of_a_first_request_come_behind_those_of_the_row(talk):
    other = picture(side=32)

    def agent(ask, messages):
        status, sentence = ask({"role": "user", "content": [part(other), {"type": "text", "text": "What?"}]})
        assert status == 400 and "1 images of the prompt" in sentence
        ask({"role": "system", "content": "Look."}, *messages, {"role": "user", "content": [part(other), part(other)]})

    sample, engine, plugin = talk(agent, f"Three.{END}")
    assert [len(request.images) for request in engine.requests] == [3]
    assert [plugin._store().get(name) for name in sample.metadata["image_files"]] == [other, other]
    assert engine.requests[0].unexpanded.count(IMAGE) == 3


def test_an_image_that_cannot_be_shown_ends_the_conversation(talk):
    def agent(ask, messages):
        status, sentence = ask(*messages, {"role": "user", "content": [part(b"no image")]})
        assert status == 409 and "UnidentifiedImageError" in sentence

    sample, engine, _ = talk(agent)
    assert sample.status is Status.FAILED and sample.metadata["drop"]["reason"] == "image_damaged"
    assert not engine.requests


def test_nothing_follows_a_drawn_token_of_an_image(talk):
    def agent(ask, messages):
        status, sentence = ask(*messages, ask(*messages), {"role": "user", "content": "On."})
        assert status == 400 and "nothing may follow" in sentence
        return 1.0

    sample, engine, _ = talk(agent, "A<|image_pad|>")
    assert len(engine.requests) == 1 and sample.status is Status.TRUNCATED and sample.tokens[-1] == IMAGE


AGENT = '''
import base64, io, json, urllib.request

from PIL import Image

def look_twice(base_url, api_key, messages):
    def ask():
        request = urllib.request.Request(
            f"{base_url}/chat/completions", json.dumps({"model": "miles", "messages": messages}).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        return messages[-1]["content"]

    first, file = ask(), io.BytesIO()
    Image.new("RGB", (16, 16), (200, 90, 40)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    messages.append({"role": "user", "content": [{"type": "text", "text": "Seen:"},
                                                 {"type": "image_url", "image_url": {"url": url}}]})
    return float(len(ask()) % 3)
'''


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_a_run_trains_on_what_agents_show(trainer, tmp_path):
    folder, program = taught(make_model(tmp_path / "model", "qwen2_5_vl")), tmp_path / "agent.py"
    program.write_text(AGENT)
    run = looking(folder, tmp_path, 2, trainer, **{
        "rollout.generate": "agent", "rollout.rm_type": [], "tools.agent": f"{program}:look_twice", "tools.tools": []})
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    samples, seen = written(run, folder)
    print(trainer, gaps, f"{len(seen)} of {len(samples)} samples")
    assert len(gaps) == 2 and max(gaps) <= 1e-4 and all(one["train/grad_norm"] > 0 for one in run.metrics)
    assert len(seen) == len(samples)
