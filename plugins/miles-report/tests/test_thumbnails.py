"""Images of prompts in the page: small, of the run's own folder alone, and counted with its size."""

import base64
import hashlib
import io
import json
import os

import pytest
from miles_report.page.document import Limits
from miles_report.page.samples import excerpt, list_samples
from miles_report.page.thumbnails import SIDE, thumbnail
from miles_report.report import write_report

from miles_core.record.samples import write_samples

Image = pytest.importorskip("PIL.Image")


def picture(size=(32, 24), kind="PNG", noise=False) -> bytes:
    image = Image.new("RGB", size, (200, 30, 60))
    if noise:
        image = Image.frombytes("RGB", size, os.urandom(size[0] * size[1] * 3))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def stored(folder, data: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(data).hexdigest()
    (folder / name).write_bytes(data)
    return name


def decoded(address: str):
    head, _, text = address.partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.fixture
def with_images(run, make_sample, decode):
    """A run whose newest rollout has two prompts: one with images, the last of which is not there, and one without."""
    import numpy as np

    rng = np.random.default_rng(0)
    seen = stored(run / "images", picture())
    samples = [make_sample(rng, uid, index, 0.5, 1) for uid in (0, 1) for index in (0, 1)]
    for sample in samples[:2]:
        sample.prompt.metadata["image_files"] = [seen, "0" * 64]
    write_samples(run, "rollout", 60, samples, decode)
    return run, seen


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_a_large_image_becomes_a_small_one_of_its_shape(tmp_path, kind):
    name = stored(tmp_path, picture((800, 200), kind))
    assert decoded(thumbnail(tmp_path, name)).size == (SIDE, SIDE // 4)


def test_what_is_no_image_of_the_run_is_not_read(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture())
    (tmp_path / "images").mkdir()
    for name in ("../secret.png", str(secret), "secret.png", "", None, 7, "0" * 64):
        assert thumbnail(tmp_path / "images", name) is None
    assert thumbnail(tmp_path, stored(tmp_path, b"<svg onload='alert(1)'/>")) is None
    assert thumbnail(tmp_path, stored(tmp_path, picture()[:50])) is None
    assert thumbnail(tmp_path, stored(tmp_path, picture((9000, 9000)))) is None, "it says how large it is before"


@pytest.mark.parametrize("data", [
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n",
    b"qoif\0\0\0\4\0\0\0\4\3\0",
], ids=["a program for Ghostscript", "cut off where Pillow raises IndexError"])
def test_a_file_of_another_users_run_neither_runs_nor_ends_the_page(data, tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_args: pytest.fail("it ran"))
    assert thumbnail(tmp_path, stored(tmp_path, data)) is None


def test_the_page_has_each_image_once_and_prompts_name_theirs(with_images):
    run, seen = with_images
    write_report(run)
    page = (run / "report.html").read_text("utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    newest = [file for file in data["samples"] if file["name"] == "rollout"][-1]
    assert [sample["images"] for sample in newest["samples"]] == [[seen, "0" * 64]] * 2 + [[], []]
    assert newest["images"].keys() == {seen, "0" * 64} and newest["images"]["0" * 64] is None
    assert decoded(newest["images"][seen]).size == (32, 24)
    assert "img-src data:;" in page


def test_images_count_with_the_size_of_the_page(tmp_path, make_run, make_sample, decode):
    import numpy as np

    run, rng = make_run(tmp_path / "run", rollouts=0, resumed=None), np.random.default_rng(0)
    samples = [make_sample(rng, uid, 0, 0.5, 1) for uid in range(20)]
    for sample in samples:
        sample.prompt.metadata["image_files"] = [stored(run / "images", picture((160, 160), noise=True))]
    write_samples(run, "rollout", 0, samples, decode)
    (item,) = list_samples(run)
    most = 0.05
    shown = excerpt(item, Limits(megabytes=most))
    largest = max(map(len, shown["images"].values()))
    assert 0 < len(shown["samples"]) < 20 and shown["samples_left"] == 20 - len(shown["samples"])
    assert sum(map(len, shown["images"].values())) < most * 1e6 + largest
    assert len(excerpt(item, Limits())["images"]) == 20
