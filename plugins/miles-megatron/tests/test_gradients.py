"""The hook clip_gradients, on one rank; tests/integration/test_layouts.py has it under parallel layouts."""

import math

import pytest
import torch

from miles_core.errors import HookError, NonFiniteError

KINDS = [pytest.param(bf16, sharded, id=f"{'bf16' if bf16 else 'fp32'}-{'distributed' if sharded else 'plain'}")
         for bf16 in (False, True) for sharded in (False, True)]


@pytest.fixture
def step(megatron):
    """(session, clip, name, seed) -> what `update` returns, after one backward pass of the session's model."""
    from miles_megatron.gradients import MegatronGradients, update

    def run(session, clip, name="mine", seed=0):
        session.backward(torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(seed)))
        gradients = MegatronGradients("actor", session.optimizer, [session.model], session.options.clip_grad)
        return update(session.optimizer, gradients, clip, name)["grad_norm"]

    return run


def by_norm(gradients):
    """Megatron's clipping, written with nothing but what the hook is given."""
    squares = sum(piece.grad.double().square().sum() for piece in gradients.pieces if piece.counts)
    norm = math.sqrt(gradients.sums({"norm": squares})["norm"])
    for piece in gradients.pieces:
        piece.grad.mul_(min(1.0, gradients.clip_grad / (norm + 1e-6)))
    return norm


def weights(session):
    return {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}


@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
@pytest.mark.parametrize(("bf16", "sharded"), KINDS)
def test_the_default_is_megatrons_own_step_bit_for_bit(train, step, bf16, sharded, clip_grad):
    options = {"bf16": bf16, "use_distributed_optimizer": sharded, "clip_grad": clip_grad}
    ours, theirs = train(**options), train(**options)
    for seed in range(2):
        norm = step(ours, lambda gradients: gradients.clip_by_norm(), "norm", seed)
        theirs.backward(torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(seed)))
        _, expected, _ = theirs.optimizer.step()
        assert norm > 0.1 and expected in (norm, None if not sharded and not bf16 else 0.0)
    for name, weight in weights(theirs).items():
        assert torch.equal(weights(ours)[name], weight), name


@pytest.mark.parametrize(("bf16", "sharded"), KINDS)
def test_the_global_norm_from_pieces_is_the_built_in_one(train, step, bf16, sharded):
    """Same norm, same weights after a step to 1e-7; every parameter has its pieces, under its own name."""
    options = {"bf16": bf16, "use_distributed_optimizer": sharded, "clip_grad": 0.1}
    ours, theirs = train(**options), train(**options)
    seen = {}

    def clip(gradients):
        seen.update({piece.name: piece for piece in gradients.pieces})
        return by_norm(gradients)

    norm = step(ours, clip)
    assert norm == pytest.approx(step(theirs, lambda gradients: gradients.clip_by_norm(), "norm"), rel=1e-6)
    expected = weights(theirs)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-7, rtol=0)
    assert seen.keys() == expected.keys() and all(piece.counts for piece in seen.values())
    for name, piece in seen.items():
        assert piece.grad.shape == piece.weight.shape and piece.grad.dtype == torch.float32
        assert piece.weight.numel() == expected[name].numel()
        torch.testing.assert_close(piece.weight.view(-1).to(expected[name].dtype),
                                   weights(ours)[name].view(-1), atol=0, rtol=0)


@pytest.mark.parametrize(("bf16", "sharded"), KINDS)
def test_a_clip_group_is_clipped_by_itself(train, bf16, sharded):
    """Each group as if its parameters were the whole model: pieces, norm, scale; then one update of all."""
    from miles_megatron.gradients import MegatronGradients, clip_groups, update

    session = train(bf16=bf16, use_distributed_optimizer=sharded, clip_grad=0.1)
    session.backward(torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(0)))
    apart = {name for name, _ in session.model.named_parameters() if ".mlp." in name}
    for name, parameter in session.model.named_parameters():
        if name in apart:
            parameter.clip_group = "mlps"
    groups = clip_groups([session.model])
    assert groups == ("", "mlps")
    seen, masters = [], {}

    def clip(gradients):
        masters.update({piece.name: piece.weight.clone() for piece in gradients.pieces})
        norm = math.sqrt(sum(float(piece.grad.double().square().sum()) for piece in gradients.pieces))
        found = gradients.clip_by_norm()
        left = math.sqrt(sum(float(piece.grad.double().square().sum()) for piece in gradients.pieces))
        assert found == pytest.approx(norm, rel=1e-5) and norm > 0.1 and left == pytest.approx(0.1, rel=1e-4)
        seen.append(({piece.name for piece in gradients.pieces}, found))
        return found

    gradients = MegatronGradients("actor", session.optimizer, [session.model], 0.1, groups)
    norms = update(session.optimizer, gradients, clip, "mine")
    assert [names for names, _ in seen] == [weights(session).keys() - apart, apart]
    assert norms == {"grad_norm": seen[0][1], "mlps_grad_norm": seen[1][1]}
    assert {piece.name for piece in gradients.pieces} == masters.keys() == weights(session).keys()
    assert not [piece.name for piece in gradients.pieces if torch.equal(piece.weight, masters[piece.name])]


def test_clipping_by_value_changes_the_update_as_torchs_adamw_says(train, step):
    session = train(weight_decay=0.1, use_distributed_optimizer=False)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    parameter = dict(session.model.named_parameters())[name]
    twin = torch.nn.Parameter(parameter.detach().clone())
    adamw, most = torch.optim.AdamW([twin], lr=1e-3, weight_decay=0.1), 1e-3

    def clip(gradients):
        piece = next(piece for piece in gradients.pieces if piece.name == name)
        assert piece.grad.abs().max() > most, "there is something to clip"
        twin.grad = piece.grad.clamp(-most, most)
        for piece in gradients.pieces:
            piece.grad.clamp_(-most, most)
        return 7.5

    for seed in range(3):
        assert step(session, clip, seed=seed) == 7.5
        adamw.step()
        torch.testing.assert_close(parameter, twin, atol=1e-7, rtol=0)


def test_what_is_no_number_is_an_error_and_nothing_is_updated(train, step):
    session = train()
    before = weights(session)
    for answer, kind, text in ((None, HookError, "should return a number"), ("1", HookError, "should return a number"),
                               (math.nan, NonFiniteError, "norm of the gradients is not finite"),
                               (math.inf, NonFiniteError, "norm of the gradients is not finite")):
        with pytest.raises(kind, match=text):
            step(session, lambda gradients, answer=answer: answer)

    def divide(gradients):
        gradients.pieces[3].grad.div_(0.0)
        return 1.0

    with pytest.raises(NonFiniteError, match="clipping left the gradient of .* not finite"):
        step(session, divide)
    assert all(torch.equal(weights(session)[name], weight) for name, weight in before.items())


def test_a_norm_that_overflows_does_not_reach_the_optimizer(train, step):
    """Finite gradients whose squares are not: Megatron would scale them all to 0 and go on."""
    from miles_megatron.gradients import MegatronGradients, update

    session = train()
    before = weights(session)
    session.backward(torch.arange(64))
    session.model.output_weight.main_grad.fill_(3e38)
    gradients = MegatronGradients("actor", session.optimizer, [session.model], 1.0)
    with pytest.raises(NonFiniteError, match="norm of the gradients is not finite"):
        update(session.optimizer, gradients, lambda gradients: gradients.clip_by_norm(), "norm")
    assert all(torch.equal(weights(session)[name], weight) for name, weight in before.items())
