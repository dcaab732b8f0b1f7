import torch
from miles_megatron.adam import AdamW, step_in_slices


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


class Widening(torch.optim.Optimizer):
    """Adam as fused kernels do it with small moments: a group's are all widened first; groups count the steps."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.widened = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in "mv"}
            wide = [{name: self.state[p][name].float() for name in "mv"} for p in group["params"]]
            self.widened = max(self.widened, sum(p.numel() for p in group["params"]))
            for parameter, state in zip(group["params"], wide, strict=True):
                state["m"].lerp_(parameter.grad, 0.1)
                state["v"].lerp_(parameter.grad.square(), 0.01)
                first, second = state["m"] / (1 - 0.9 ** group["step"]), state["v"] / (1 - 0.99 ** group["step"])
                parameter.sub_(group["lr"] * first / (second.sqrt() + 1e-8))
                for name in "mv":
                    self.state[parameter][name].copy_(state[name])


def test_a_step_in_slices_widens_a_few_tensors_at_a_time_and_changes_no_bit():
    def trained(slices: bool) -> tuple[list[torch.Tensor], Widening]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in (30, 8, 8, 100, 1)]
        groups = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "lr": 0.01},
                  {"params": [], "lr": 1.0}]
        optimizer = Widening(groups, lr=1.0)
        if slices:
            step_in_slices(optimizer, 40)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return parameters, optimizer

    (whole, plain), (cut, sliced) = trained(False), trained(True)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    assert plain.widened == 146 and sliced.widened == 100  # one tensor has more than a slice
    assert [group["step"] for group in sliced.param_groups[:2]] == [3, 3]
    assert [len(group["params"]) for group in sliced.param_groups] == [4, 1, 0]
    assert [group["lr"] for group in sliced.param_groups] == [0.1, 0.01, 1.0]
