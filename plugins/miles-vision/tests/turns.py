"""Conversations whose tool returns images, and an engine that draws what it is told."""

from __future__ import annotations

import json

import numpy as np
from miles_testing import toy_run

from miles_core.stages.rollout import Response

TOOL = '''
def look(what: str):
    """See pictures.

    Args:
        what: their digits; another letter is a picture that is damaged.
    """
    from PIL import Image, ImageDraw

    pictures = [f"Seen {what}:"]
    for digit in what:
        if not digit.isdigit():
            pictures.append({"type": "image", "image": b"no image"})
            continue
        image = Image.new("RGB", (UNIT * (2 + int(digit) % 3), 2 * UNIT), (128, 128, 128))
        ImageDraw.Draw(image).rectangle((UNIT // 2, UNIT // 2, UNIT, UNIT), fill=(25 * int(digit), 90, 200))
        pictures.append(image)
    return pictures if len(pictures) > 1 else "nothing"
'''
"""UNIT is the side of what one token sees, in pixels."""
CALL, DONE, END = "<look>3</look>", "I see.", "<|im_end|>"


class Hooks:
    """Of a run with this plugin alone."""

    def __init__(self, plugin):
        self.show_images, self.fill_images = plugin.show_images, plugin.fill_images


class Scripted:
    """An engine that draws these turns, one after the other; None is one that was called back."""

    version, path = 1, "scripted"

    def __init__(self, turns):
        self.turns, self.requests = list(turns), []

    async def generate(self, request):
        ids = self.turns.pop(0)
        self.requests.append(request)
        drawn, reason = (np.zeros(0, np.int32), "abort") if ids is None else (np.array(ids, np.int32), "stop")
        return Response(drawn, np.full(len(drawn), -0.25, np.float32), np.ones(len(drawn), np.int32), reason)


def tool(folder, unit=8):
    """The path of its file."""
    path = folder / "look.py"
    path.write_text(TOOL.replace("UNIT", str(unit)))
    return str(path)


def taught(folder, unit=8, steps=70):
    """The folder, whose tiny model has learnt to look at a picture once and then to say that it sees it."""
    import torch
    from miles_vision import processor
    from miles_vision.images import opened, read, sources
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForImageTextToText))
    exec(TOOL.replace("UNIT", str(unit)), scope := {})
    said, picture = scope["look"]("3")
    texts, images, answers = [], [], []
    for row in map(json.loads, (folder / "train.jsonl").read_text().splitlines()):
        talk = processor.with_images([{"role": "user", "content": row["prompt"]}])
        seen = [opened(read(source, [folder], 10**6)) for source in sources(row["pictures"])]
        for answer in (CALL, DONE):
            context = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            texts, images, answers = [*texts, context + answer + END], [*images, seen], [*answers, answer]
            talk += [{"role": "assistant", "content": answer},
                     {"role": "tool", "content": [{"type": "text", "text": said}, {"type": "image"}]}]
            seen = [*seen, picture]
    batch = dict(processor.load(str(folder))(
        text=texts, images=images, padding=True, padding_side="left", return_tensors="pt",
        return_mm_token_type_ids=True))
    labels = torch.full_like(batch["input_ids"], -100)
    for row, answer in enumerate(answers):
        size = len(tokenizer(answer + END, add_special_tokens=False)["input_ids"])
        labels[row, -size:] = batch["input_ids"][row, -size:]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def looking(folder, tmp_path, steps, trainer="fsdp", flags=(), unit=8, timeout=120.0, **options):
    """A run on a model that looks at a picture and then says that it sees it."""
    rows = [json.loads(row) | {"label": "I see."} for row in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy_run(
        ["vision", "tools", *(["fsdp"] if trainer == "fsdp" else [])], steps=steps, checkpoint=folder, timeout=timeout,
        flags=["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "100", "--entropy-coef",
               "0.01", *flags],
        options={"perf.trainer": trainer, "rollout.generate": "tools", "rollout.rollout_max_context_len": 250,
                 "rollout.rm_type": ["f1"], "tools.tools": [tool(tmp_path, unit)], "tools.tool_format": "tag",
                 **options})


def written(run, folder):
    """Its samples on disk, and of these the ones with images of later turns."""
    rows = [json.loads(row) for row in (folder / "train.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for path in sorted((run.folder / "samples").glob("*"))
               for line in path.read_text().splitlines()]
    return samples, [one for one in samples if len(one["images"]) > len(rows[one["row"]]["pictures"])]
