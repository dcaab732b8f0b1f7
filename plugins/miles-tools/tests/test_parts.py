"""Content parts: what counts as an image of a tool, and that its path is the tool's to read and not the driver's."""

import asyncio
import base64
import io
import json

import pytest
from miles_tools.calls import Call
from miles_tools.parts import content, packed
from miles_tools.sandbox import Limits, Sandbox
from miles_tools.toolbox import Tool, Toolbox
from PIL import Image


def png(size=(4, 4)):
    file = io.BytesIO()
    Image.new("RGB", size, (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


def url(data):
    return f"data:;base64,{base64.b64encode(data).decode()}"


DATA, PICTURE = png(), Image.new("RGB", (4, 4), (1, 2, 3))


@pytest.mark.parametrize("source", [
    {"type": "image", "image": DATA}, {"type": "image", "bytes": DATA}, {"type": "image", "image": PICTURE},
    {"type": "image", "image": url(DATA)}, {"type": "image_url", "image_url": {"url": url(DATA)}},
    {"type": "image", "path": "FILE"}, {"type": "image", "image": "FILE"}, PICTURE,
], ids=["bytes", "under bytes", "Pillow's", "data", "OpenAI's", "path", "path as image", "alone"])
def test_every_form_of_an_image_becomes_its_files_bytes(source, tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    if isinstance(source, dict):
        source = {key: str(tmp_path / "a.png") if value == "FILE" else value for key, value in source.items()}
    parts = content(json.loads(json.dumps(packed(["Look:", source]))))
    assert parts == [{"type": "text", "text": "Look:"}, {"type": "image", "image": url(DATA)}]
    assert packed(PICTURE) == [{"type": "image", "image": url(DATA)}]


@pytest.mark.parametrize("value", [
    None, 3, "a", [], ["a", "b"], [1, {"type": "text", "text": "a"}], {"type": "image", "image": "a.png"},
    [{"type": "image"}], [{"type": "video", "video": "a.mp4"}], [{"type": "text", "text": 3}], [["a"]],
], ids=repr)
def test_all_else_is_data_as_before(value):
    assert packed(value) == value


@pytest.mark.parametrize("value", [
    [{"type": "image", "image": {"path": "/etc/passwd"}}], [{"type": "image", "image": "a", "path": "b"}],
    [{"type": "image_url", "image_url": "a"}], [{"type": "image"}], ["a"], "a", []], ids=repr)
def test_the_driver_takes_parts_of_two_forms_alone(value):
    """Every byte that comes out of a tool's process is the tool's."""
    assert content(value) is None


SOURCE = '''
def f(what):
    print("printed")
    if what == "text":
        return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    if what == "written":
        from PIL import Image
        Image.new("RGB", (4, 4), (1, 2, 3)).save("mine.png")
        return ["a", {"type": "image", "path": "mine.png"}, "b"]
    return [{"type": "image", "image": "none.png"}]
'''


def test_a_file_of_the_tools_own_directory_is_read_there_and_text_alone_is_text():
    sandbox = Sandbox(Limits(), workers=1)
    tools = Toolbox({"f": Tool("f", "tool.py", SOURCE, {}, ("what",))}, sandbox)
    try:
        written, text, missing = (asyncio.run(tools.answer(Call("f", what))) for what in ("written", "text", "missing"))
    finally:
        sandbox.close()
    assert [part.get("text") for part in written.parts] == ["printed\n", "a", None, "b"]
    assert written.images == [url(DATA)] and not written.failed
    assert (text.text, text.parts) == ("printed\none\ntwo", ())
    assert missing.images == ["none.png"]  # which a plugin that shows images drops as missing
