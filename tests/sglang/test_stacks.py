"""Stacked experts in SGLang's own layers of every rank: what its own loader puts there, expert by expert."""


def test_every_rank_takes_its_experts_and_its_part_of_them(found):
    """Up to four ranks of expert parallelism by three of tensor parallelism; stacks come whole and in parts."""
    assert found["ranks"] == 42 and found["wrong"] == []


def test_layers_with_another_layout_take_experts_one_by_one_and_say_why(found):
    said = ["Fp8MoEMethod", "another order", "w2_weight has a loader of its own", "another order", "--enable-eplb"]
    assert len(found["hindrances"]) == len(said)
    for one, words in zip(found["hindrances"], said, strict=True):
        assert one.startswith("mlp.experts: ") and words in one
