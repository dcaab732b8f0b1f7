"""Hashes: equal bits give equal hashes in any process; one bit, a dtype, a shape or a boundary gives another."""

import subprocess
import sys

import numpy as np
import torch
from miles_megatron.hashes import DIGITS, column_hashes, tensor_hashes

from miles_core.types import Prompt, Sample

PROMPT = Prompt(0, 0, "1+1=", (1, 2))


def sample(tokens, reward=1.0, **columns):
    found = {"tokens": np.array(tokens, np.int32), **{k: np.array(v, np.float32) for k, v in columns.items()}}
    return Sample(PROMPT, 0, found, reward=reward)


def test_hashes_do_not_depend_on_the_process_or_on_memory_layout():
    code = """
import torch, numpy as np
from miles_megatron.hashes import column_hashes, tensor_hashes
from miles_core.types import Prompt, Sample
print(tensor_hashes([("a", torch.arange(6.).bfloat16().reshape(2, 3)), ("b", torch.tensor(1.0))]))
print(column_hashes([Sample(Prompt(0, 0, "1+1=", (1, 2)), 0, {"tokens": np.array([1, 2, 3], np.int32)}, reward=1.0)]))
"""
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
                           env={"PYTHONHASHSEED": "7"}).stdout]
    strided = torch.arange(6.0).bfloat16().reshape(2, 3).t().contiguous().t()
    here = tensor_hashes([("a", strided), ("b", torch.tensor(1.0))])
    assert said[0].splitlines() == [str(here), str(column_hashes([sample([1, 2, 3])]))]
    assert list(here) == ["a", "b"] and all(len(value) == DIGITS for value in here.values())


def test_every_bit_the_dtype_and_the_shape_count():
    tensor = torch.zeros(2, 3)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[1, 2] = 1
    views = [tensor, one_bit, tensor.int(), tensor.reshape(3, 2), tensor.bfloat16(), -tensor]
    assert len({tensor_hashes([("w", view)])["w"] for view in views}) == len(views)


def test_a_parameter_keeps_its_gradient_and_its_name():
    weight = torch.nn.Parameter(torch.ones(2))
    assert tensor_hashes([("x", weight)]) == {"x": tensor_hashes([("y", weight.data)])["y"]}


def test_columns_are_told_apart_and_only_the_changed_one_differs():
    one = column_hashes([sample([1, 2, 3], log_probs=[0.5]), sample([4, 5], log_probs=[0.25])])
    other = column_hashes([sample([1, 2, 3], log_probs=[0.5]), sample([4, 5], log_probs=[0.26])])
    assert list(one) == ["log_probs", "tokens", "reward"]
    assert {name for name in one if one[name] != other[name]} == {"log_probs"}
    scored = column_hashes([sample([1, 2, 3], log_probs=[0.5]), sample([4, 5], 0.0, log_probs=[0.25])])
    assert {name for name in one if one[name] != scored[name]} == {"reward"}


def test_sample_boundaries_and_gaps_count():
    cut = [column_hashes([sample(a), sample(b)])["tokens"] for a, b in (([1, 2], [3]), ([1], [2, 3]), ([3], [1, 2]))]
    assert len(set(cut)) == 3
    first, second = (column_hashes(two) for two in ([sample([1], extra=[0]), sample([1])],
                                                    [sample([1]), sample([1], extra=[0])]))
    assert first["extra"] != second["extra"] and first["tokens"] == second["tokens"]
