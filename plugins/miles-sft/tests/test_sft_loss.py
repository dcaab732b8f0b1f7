"""The loss is -log p on trained tokens, and equals the policy gradient with advantages of 1."""

import subprocess
import sys

import torch
from miles_sft.plugin import Sft, SftOptions

from miles_core.config import RunConfig
from miles_core.stages.loss import LossInputs
from miles_core.types import Batch, Group, Prompt, Sample

torch.set_num_threads(1)


def loss_of(log_probs, mask):
    zeros = torch.zeros_like(log_probs).detach()
    inputs = LossInputs(
        log_probs=log_probs, entropy=None, old_log_probs=zeros, rollout_log_probs=zeros, ref_log_probs=None,
        advantages=zeros + 1, mask=torch.tensor(mask, dtype=log_probs.dtype),
        sample=torch.zeros(len(log_probs), dtype=torch.int64), segment_sum=lambda values: values.sum(0, keepdim=True),
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, rows={},
    )
    return Sft(SftOptions(), RunConfig()).policy_loss(inputs)


def test_negative_log_likelihood():
    log_probs = torch.tensor([-0.5, -2.0, -0.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(log_probs, [1, 1, 1])
    loss.sum().backward()
    assert loss.tolist() == [0.5, 2.0, 0.0]
    assert log_probs.grad.tolist() == [-1.0, -1.0, -1.0]
    assert metrics == {}


def test_masked_tokens_have_no_gradient_whatever_they_hold():
    log_probs = torch.tensor([-0.5, float("nan"), -float("inf")], dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of(log_probs, [1, 0, 0])
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0, 0.0]
    assert log_probs.grad.tolist() == [-1.0, 0.0, 0.0]


def test_it_is_cross_entropy():
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([3, 0, 10, 7, 7])
    log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss_of(log_probs, [1] * 5)[0], expected)


def test_advantages_are_one():
    prompt = Prompt(uid=0, row=0, text="", token_ids=(1,))
    batch = Batch(0, [Group(prompt, [Sample(prompt, 0)]), Group(prompt, [Sample(prompt, 0)])])
    assert Sft(SftOptions(), RunConfig()).advantage(batch) == [1.0, 1.0]


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import miles_sft.plugin;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
