"""A folder that is replaced under its own name: at any instant one of the two is there, whole, and can be found."""

import random
import shutil
import subprocess
import sys

import pytest
from miles_megatron import checkpoint
from miles_megatron.checkpoint import latest

from miles_core.record import publish
from tests.integration.powercut import Disk

SAVES_TWICE = """
import sys
from pathlib import Path
from miles_core.record import publish
from tests.integration.powercut import Recorder, _Recording

root, log, swaps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
if not swaps:
    publish.exchange = lambda one, other: False
_Recording(Recorder(root, log)).install()
for content in ("old", "new"):
    with publish.publish(root / "iter_0000003") as target:
        for name in ("metadata.json", ".metadata", "common.pt", "miles.json"):
            (target / name).write_text(content)
    publish.write_text(root / "latest_checkpointed_iteration.txt", "3\\n")
"""


@pytest.mark.parametrize("swaps", [True, False])
def test_a_power_cut_while_a_checkpoint_is_saved_again(tmp_path, swaps):
    """Wherever it comes, the iteration that the tracker names can be read, and is there after the next save."""
    root, log = tmp_path / "checkpoints", tmp_path / "log"
    root.mkdir()
    subprocess.run([sys.executable, "-c", SAVES_TWICE, root, log, str(swaps)], check=True)
    disk, draw, seen = Disk(root, log), random.Random(0), set()
    assert ("exchange" in {step[0] for step in disk.steps}) == swaps
    for number in range(len(disk.steps)):
        disk.step(number)
        for _ in range(6):
            place = tmp_path / "cut"
            disk.lay_out(place, draw)
            if (place / "latest_checkpointed_iteration.txt").exists():
                assert latest(place) == 3
                found = checkpoint.iteration_folder(place, 3)
                seen.add((found.name, contents := {path.read_text() for path in found.iterdir()} == {"old"}))
                assert contents or {path.read_text() for path in found.iterdir()} == {"new"}
                publish.clear(place)
                assert [path.name for path in place.glob("*iter_*")] == ["iter_0000003"]
            shutil.rmtree(place)
    assert {("iter_0000003", True), ("iter_0000003", False)} <= seen
    assert (publish.aside(root / "iter_0000003").name in dict(seen)) != swaps


def test_a_folder_that_cannot_be_swapped_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="one"):
        publish.exchange(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_folder_behind_it_is_written(tmp_path, there):
    """A folder on a larger disk, say, or one that a link only announces."""
    behind, link = tmp_path / "disk" / "folder", tmp_path / "link"
    (behind if there else behind.parent).mkdir(parents=True)
    link.symlink_to(behind)
    with publish.publish(link) as target:
        (target / "file").write_text("new")
    assert link.readlink() == behind and (behind / "file").read_text() == "new"
    assert sorted(path.name for folder in (tmp_path, behind.parent) for path in folder.iterdir()) == [
        "disk", "folder", "link"]
