import pytest
import torch

from miles_core.errors import ConfigError


@pytest.mark.parametrize("bf16", [False, True])
def test_plain_and_distributed_optimizers_agree(train, bf16):
    plain, sharded = (train(bf16=bf16, use_distributed_optimizer=d)(3) for d in (False, True))
    for a, b in zip(plain, sharded, strict=True):
        assert a == pytest.approx(b, rel=1e-3 if bf16 else 1e-6)


def test_it_is_torchs_adamw(train):
    session = train(weight_decay=0.1, clip_grad=0.0, use_distributed_optimizer=False)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    parameter = dict(session.model.named_parameters())[name]
    twin = torch.nn.Parameter(parameter.detach().clone())
    adamw = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1)
    for seed in range(3):
        session.backward(torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(seed)))
        twin.grad = parameter.main_grad.clone()
        session.optimizer.step()
        session.scheduler.step(1)
        adamw.step()
        torch.testing.assert_close(parameter, twin, atol=1e-7, rtol=0)


@pytest.mark.parametrize(("style", "last"), [("constant", 1e-3), ("linear", 1e-4), ("cosine", 1e-4)])
def test_schedules(train, style, last):
    session = train(lr_decay_style=style, lr_warmup_iters=2, lr_decay_iters=6, min_lr=1e-4)
    lrs = [session.optimizer.param_groups[0]["lr"]]
    for _ in range(7):
        session.scheduler.step(1)
        lrs.append(session.optimizer.param_groups[0]["lr"])
    assert lrs[:3] == pytest.approx([0, 5e-4, 1e-3]) and lrs[-1] == pytest.approx(last)


def test_gradients_are_not_averaged(train):
    """The loss divides; a second micro-batch adds."""
    session = train()
    session.backward(torch.arange(64))
    norm = session.model.output_weight.main_grad.clone()
    assert session.model.config.calculate_per_token_loss and norm.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("distributed", [False, True])
def test_non_finite_gradients_are_named(train, value, distributed):
    from miles_megatron import optimizer

    session = train(use_distributed_optimizer=distributed)
    session.backward(torch.arange(64))
    names = ["decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"]
    for name in names:
        dict(session.model.named_parameters())[name].main_grad.view(-1)[3] = value
    assert sorted(optimizer.non_finite_gradients(session.chunks)) == sorted(names)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr_decay_style": "cosin"}, "unknown learning-rate schedule"),
        ({"lr": -1.0}, "lr cannot be negative"),
        ({"lr": float("nan")}, "lr cannot be negative"),
        ({"lr": 1e-6, "min_lr": 1e-5}, "min_lr is above lr"),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 5, "train_iters": 5}, "warmup leaves no step"),
    ],
)
def test_options_that_cannot_be_meant(megatron, options, text):
    from miles_megatron.optimizer import OptimizerOptions

    with pytest.raises(ConfigError, match=text):
        OptimizerOptions(**options)
