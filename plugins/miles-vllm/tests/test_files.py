"""What a stream of weights has to have. test_engine.py has the rest: files that servers load."""

import pytest
from miles_vllm.files import lacking, write

from miles_core.errors import CheckpointError


def test_a_stream_lacks_what_the_checkpoint_has_of_kinds_that_it_sends():
    checkpoint = {"embed", "layers.0.up", "layers.1.up", "layers.0.inv_freq"}
    assert lacking({"embed", "layers.0.up", "layers.1.up"}, checkpoint) == []
    assert lacking({"embed", "layers.1.up"}, checkpoint) == ["layers.0.up"]
    assert lacking(set(), checkpoint) == sorted(checkpoint)


@pytest.mark.parametrize("data", [b"", b"\xff" * 9, (9).to_bytes(8, "little") + b"no JSON !"])
def test_a_checkpoint_whose_headers_cannot_be_read_is_named(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        write(tmp_path / "weights" / "version-1", [], tmp_path, 2**20)
    assert refused.value.code == "vllm-checkpoint-unreadable" and "model.safetensors" in refused.value.who
