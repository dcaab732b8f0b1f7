"""Tiny models that read images, and rows whose images are squares on grey."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path

from miles_testing import tiny_checkpoint

TEXT = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=258, pad_token_id=256,
            bos_token_id=257, initializer_range=0.3)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TOWER = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, spatial_merge_size=2, temporal_patch_size=2,
             out_hidden_size=32, in_channels=3, initializer_range=0.3)
TOKENS = dict(vision_start_token_id=259, vision_end_token_id=260, image_token_id=261, video_token_id=262)
MODELS = {
    "qwen2_5_vl": dict(
        text_config=TEXT | dict(rope_parameters=ROPE),
        vision_config=TOWER | dict(fullatt_block_indexes=[1]), **TOKENS),
    "qwen3_vl": dict(
        text_config=TEXT | dict(num_hidden_layers=4, rope_parameters=ROPE | {"mrope_interleaved": True}),
        vision_config=TOWER | dict(depth=3, deepstack_visual_indexes=[0, 1, 2], num_position_embeddings=64), **TOKENS),
    "gemma3": dict(
        text_config=TEXT | dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"],
                                query_pre_attn_scalar=8),
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                           patch_size=4, image_size=16, num_channels=3, vision_use_head=False),
        mm_tokens_per_image=4, boi_token_index=259, eoi_token_index=260, image_token_index=261),
    "qwen3_5": dict(
        text_config=TEXT | dict(
            head_dim=32, layer_types=["linear_attention", "full_attention"], rms_norm_eps=1e-2, linear_key_head_dim=16,
            linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, initializer_range=0.1,
            rope_parameters=ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}),
        vision_config=TOWER | dict(num_position_embeddings=64), **TOKENS),
    "llama4": dict(  # transformers does not let its queries grow while it decodes: not before position 8192
        text_config=TEXT | dict(num_local_experts=4, intermediate_size=24, intermediate_size_mlp=48,
                                interleave_moe_layer_step=2, num_hidden_layers=4, attention_chunk_size=24,
                                initializer_range=0.15, no_rope_layers=[1, 1, 0, 1],
                                rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        vision_config=dict(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                           image_size=16, patch_size=4, vision_output_dim=32, projector_input_dim=32,
                           projector_output_dim=32, initializer_range=0.3,
                           rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        boi_token_index=259, eoi_token_index=260, image_token_index=261),
    "mistral3": dict(
        text_config=TEXT | dict(model_type="mistral", sliding_window=None,
                                rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        vision_config=dict(model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=2, head_dim=16, image_size=64, patch_size=4, initializer_range=0.3),
        spatial_merge_size=2, image_token_index=261, tie_word_embeddings=False),
}
MODELS["qwen3_5_moe"] = MODELS["qwen3_5"] | dict(text_config=MODELS["qwen3_5"]["text_config"] | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24))
MODELS["qwen3_vl_moe"] = MODELS["qwen3_vl"] | dict(text_config=MODELS["qwen3_vl"]["text_config"] | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24))
QWEN = dict(image_processor_type="Qwen2VLImageProcessor", merge_size=2, temporal_patch_size=2,
            image_mean=[0.5] * 3, image_std=[0.5] * 3)
PROCESSORS = {
    "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "qwen3_5": QWEN, "qwen3_5_moe": QWEN,
    "gemma3": dict(image_processor_type="Gemma3ImageProcessor", size={"height": 16, "width": 16}, do_pan_and_scan=False,
                   image_mean=[0.5] * 3, image_std=[0.5] * 3),
    "llama4": dict(image_processor_type="Llama4ImageProcessor", size={"height": 16, "width": 16}, max_patches=4,
                   image_mean=[0.5] * 3, image_std=[0.5] * 3),
    "mistral3": dict(image_processor_type="PixtralImageProcessor", size={"longest_edge": 64},
                     patch_size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3),
}
SETTINGS = {"gemma3": {"image_seq_length": 4}, "llama4": {"patch_size": 4},
            "mistral3": {"patch_size": 4, "spatial_merge_size": 2}}
"""processor_config.json, of what has one."""
WORDS = {"llama4": ("<|image_start|>", "<|image_end|>", "<|patch|>", "<|image|>"),
         "mistral3": ("[IMG_BREAK]", "[IMG_END]", "[IMG]", "[VIDEO]")}
"""Spellings of the tokens 259 to 262, where they are others than Qwen's."""
QWENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPELLINGS = {"gemma3": dict(boi_token="<|vision_start|>", eoi_token="<|vision_end|>", image_token="<|image_pad|>",
                            extra_special_tokens={"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>",
                                                  "image_token": "<|image_pad|>"})}
"""What a tokenizer says of its tokens of images, where the processor asks it."""
ALONE = {"gemma3": QWENS[0], "llama4": "<|image|>", "mistral3": "[IMG]"}
"""An image in a template of what expands the token of itself to all that stands around an image."""
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


def make_model(folder: Path, kind: str, patch: int = 4) -> Path:
    """The folder, with a tiny random model, its processor's files and train.jsonl.

    Args:
        patch: pixels of a patch's side. SGLang's Qwen2.5-VL takes other pixels than those of 14 for embeddings.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(tiny_checkpoint(), folder, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*WORDS.get(kind, QWENS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    whole = QWENS[0] + QWENS[2] + QWENS[1]
    said |= {"chat_template": TEMPLATE.replace(whole, ALONE.get(kind, whole)), **SPELLINGS.get(kind, {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    torch.manual_seed(0)
    constants = AutoConfig.for_model(kind, **MODELS[kind])
    constants.vision_config.patch_size = patch
    if kind == "qwen2_5_vl":
        constants.vision_config.window_size = 4 * patch
    model = AutoModelForImageTextToText.from_config(constants)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma 3's way from tower to text begins as zeros
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    _as_released(folder / "model.safetensors", kind)
    sizes = {} if PROCESSORS[kind] is not QWEN else dict(
        patch_size=patch, min_pixels=4 * patch**2, max_pixels=64 * patch**2)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind] | sizes))
    if kind in SETTINGS:
        (folder / "processor_config.json").write_text(json.dumps(SETTINGS[kind]))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(folder, scale=patch / 4)))
    return folder


def _as_released(file: Path, kind: str) -> None:
    """Names and shapes of the releases, where transformers 5 writes others."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if kind == "qwen3_vl_moe":
        tensors = {name: one.mT.contiguous() if "experts." in name else one for name, one in tensors.items()}
    if kind == "gemma3":
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def rows(folder, count=8, scale=1.0):
    """Paths, base64 and data URLs by turns; every fourth row has two images."""
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(count):
        size = (int(scale * (16 + 8 * (number % 3))), int(scale * 16))
        data = [picture((40 * number % 256, 255 - 30 * number, 90), size, int(scale * 8), (number % 8, 2))
                for _ in range(1 + (number % 4 == 3))]
        (folder / "pictures" / f"{number}.png").write_bytes(data[0])
        text = base64.b64encode(data[0]).decode()
        images = [[f"pictures/{number}.png"], [text], [f"data:image/png;base64,{text}"], [text] * 2][number % 4]
        yield {"prompt": "<image>" * len(images) + f"What is {number}?", "label": str(number), "pictures": images}
