"""What a stream of weights has to have. test_engine.py has the rest: files that servers load."""

from miles_vllm.files import lacking


def test_a_stream_lacks_what_the_checkpoint_has_of_kinds_that_it_sends():
    checkpoint = {"embed", "layers.0.up", "layers.1.up", "layers.0.inv_freq"}
    assert lacking({"embed", "layers.0.up", "layers.1.up"}, checkpoint) == []
    assert lacking({"embed", "layers.1.up"}, checkpoint) == ["layers.0.up"]
    assert lacking(set(), checkpoint) == sorted(checkpoint)
