"""New weights into layers that SGLang has repacked for int4: its own schemes, with torch in place of its kernels."""


def test_the_kernels_read_the_new_weights_where_they_read_the_old_ones(found):
    """The bits of a server that starts with them; buckets may end within a layer."""
    assert found["errors"] == [] and found["differs"] == [] and found["moved"] == [] and found["same workspaces"]


def test_a_report_is_about_what_was_sent(found):
    assert found["sums"]
    assert found["names"] == ["norm", "w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale",
                              "weight_packed", "weight_scale"]


def test_what_cannot_be_right_is_an_error(found):
    """A layer whose weights come in two parts; values that repacking has lost."""
    assert len(found["apart"]) == 1 and "layer 0" in found["apart"][0]
    assert found["broken"] and "layers.0.mlp.weight_packed" in found["broken"][0]
