"""What a sequence costs."""

from miles_megatron.estimate import flops


def test_operations_are_six_for_each_parameter_and_each_earlier_token():
    """Against the products of one layer, counted one by one."""
    hidden, heads, dim, ffn, vocab, length = 8, 2, 4, 16, 32, 10
    matrices = [(hidden, heads * dim)] * 3 + [(heads * dim, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden),
                                              (hidden, vocab)]
    forward = sum(2 * length * rows * columns for rows, columns in matrices)
    forward += 2 * 2 * heads * dim * length * length / 2  # scores and weighted values, half of them masked
    parameters = sum(rows * columns for rows, columns in matrices)
    assert flops(length, parameters=parameters, attention=heads * dim) == 3 * forward
