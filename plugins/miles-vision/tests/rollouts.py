"""Rollouts of prompts with images that nobody sampled."""

from __future__ import annotations

import numpy as np
from miles_vision.images import ImageStore, opened
from miles_vision.processor import load_pixels
from pictures import picture

from miles_core.types import Batch, Group, Prompt, Sample, Status

RUN_FILE = """
plugins = ["grpo", "vision"]
[vision]
multimodal_keys = { image = "pictures" }
[rollout]
prompt_data = "data/none.jsonl"
rollout_batch_size = 4
n_samples_per_prompt = 1
rollout_max_response_len = 20
rollout_max_context_len = 200
[perf]
bf16 = false
trainer_host = "process"
trainer_timeout = 30
[algorithm]
rewards_normalization = false
[optimizer]
lr = 5e-4
weight_decay = 0.1
adam_eps = 1e-6
lr_decay_style = "constant"
"""
"""What runs on such rollouts have in common; their trainer and its micro-batches are flags."""


def placeholders(process, data):
    """The tokens of an image as the model's processor writes them: here without it, as some want torchvision."""
    pixels = process(images=[opened(data)], return_tensors="pt")
    if "image_grid_thw" in pixels:
        return [259, *[261] * (int(pixels["image_grid_thw"].prod()) // 4), 260]
    if "image_sizes" in pixels:
        high, wide = (int(size) // 8 for size in pixels["image_sizes"][0])
        return [*([*[261] * wide, 259] * high)[:-1], 260]
    tiles = len(pixels["pixel_values"]) - 1  # of a large image, before the whole: Llama 4's
    return [259, *[261, 261, 261, 261, 262] * tiles, *[261] * 4, 260]


def batches(model, folder, images):
    """Rollouts of four prompts with so many images, and an answer to each."""
    store, process, draw = ImageStore(folder), load_pixels(str(model)), np.random.default_rng(0)

    def group(uid, count):
        data = [picture(tuple(int(c) for c in draw.integers(0, 256, 3)), (16 + 8 * n, 16)) for n in range(count)]
        names = [store.put(one) for one in data]
        text = f"What is {uid}?"
        ids = [token for one in data for token in (*placeholders(process, one), ord(","))] + list(text.encode())
        prompt = Prompt(uid, uid, text, tuple(ids), metadata={"image_files": names})
        return Group(prompt, [sample(prompt)])

    def sample(prompt):
        length = int(draw.integers(1, 20))
        columns = {"tokens": np.array([*prompt.token_ids, *draw.integers(0, 256, length)], np.int32),
                   "loss_mask": np.ones(length, np.uint8), "versions": np.ones(length, np.int32),
                   "rollout_log_probs": -draw.random(length).astype(np.float32) * 6}
        return Sample(prompt, 0, columns, length, status=Status.COMPLETED, reward=float(draw.integers(0, 3)))

    return [Batch(i, [group(4 * i + n, count) for n, count in enumerate(rollout)]) for i, rollout in enumerate(images)]
