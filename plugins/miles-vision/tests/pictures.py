"""Tiny models that read images, and rows whose images are squares on grey."""

from __future__ import annotations

import base64
import io

TEXT = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=258, pad_token_id=256,
            bos_token_id=257, initializer_range=0.3)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TOWER = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, spatial_merge_size=2,
             temporal_patch_size=2, out_hidden_size=32, in_channels=3, initializer_range=0.3)
TOKENS = dict(vision_start_token_id=259, vision_end_token_id=260, image_token_id=261, video_token_id=262)
MODELS = {
    "qwen2_5_vl": dict(
        text_config=TEXT | dict(rope_parameters=ROPE),
        vision_config=TOWER | dict(window_size=16, fullatt_block_indexes=[1]), **TOKENS),
}
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")


def picture(colour=(255, 0, 0), size=(24, 16), side=8, place=(4, 4)) -> bytes:
    """A PNG with a square on grey."""
    from PIL import Image

    image = Image.new("RGB", size, (128, 128, 128))
    image.paste(colour, (*place, place[0] + side, place[1] + side))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def rows(folder, count=8):
    """Paths, base64 and data URLs by turns; every fourth row has two images."""
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(count):
        data = [picture((40 * number % 256, 255 - 30 * number, 90), (16 + 8 * (number % 3), 16), place=(number % 8, 2))
                for _ in range(1 + (number % 4 == 3))]
        (folder / "pictures" / f"{number}.png").write_bytes(data[0])
        text = base64.b64encode(data[0]).decode()
        images = [[f"pictures/{number}.png"], [text], [f"data:image/png;base64,{text}"], [text] * 2][number % 4]
        yield {"prompt": "<image>" * len(images) + f"What is {number}?", "label": str(number), "pictures": images}
