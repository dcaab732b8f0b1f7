import torch

from miles_core.backends.megatron.adam import AdamW


def test_the_fused_update_is_that_of_torch_adamw():
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 40).view(5, 8)) for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = [AdamW([mine], **options), torch.optim.AdamW([theirs], foreach=False, **options)]
    for step in range(5):
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = torch.sin(torch.arange(40.0).view(5, 8) + step)
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_state_and_groups_are_kept_as_torch_keeps_them():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.01)
    parameter.grad = torch.ones(4)
    optimizer.step()
    again = AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.5)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.01 and float(next(iter(again.state.values()))["step"]) == 1
    optimizer.zero_grad()
    assert parameter.grad is None
