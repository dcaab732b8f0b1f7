"""Runs in SGLang's Python, which has Triton, under its interpreter: a gated activation by liger-kernel and by torch.

Prints how far the two are apart as JSON; test_liger.py says what has to be found.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/miles-fsdp/src"))
from miles_fsdp.lean import Gated, ligers


def main():
    torch.manual_seed(0)
    gate, up, flowing = torch.randn(3, 2, 5, 48).unbind()
    results = []
    for function in (Gated, ligers()):
        leaves = [one.clone().requires_grad_() for one in (gate, up)]
        activated = function.apply(*(leaf * 1 for leaf in leaves))  # as products are: nothing else keeps them
        results.append([activated.detach(), *torch.autograd.grad(activated, leaves, flowing)])
    apart = [float((one - other).abs().max()) for one, other in zip(*results, strict=True)]
    print(json.dumps(dict(zip(("activated", "gate", "up"), apart, strict=True))))


main()
