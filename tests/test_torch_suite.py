"""What torch's own suite asks of every optimizer's steps, asked of ours with torch's helpers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch_suite import (
    EVERY_METHOD,
    EVERY_WAY,
    assert_equal,
    helpers,
    problem,
    problems,
)

# Made of bare parameters, methods that capture say so once; here that is meant.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*given parameters, not a model.*:gomuon.GeometryWarning"),
]


@EVERY_METHOD
def test_errors(info: Any) -> None:
    if info.name == "MuonQK":
        with pytest.raises(ValueError, match="pass the model"):
            problem(info, bare=True)
        pytest.skip("all of torch's error inputs are bare parameters")
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = error.optimizer_error_input
        params = given.params
        if params is None:
            params = [nn.Parameter(torch.ones(2, 2))]
        kind, message = error.error_type, error.error_regex
        if issubclass(kind, Warning):
            with pytest.warns(kind, match=message):
                info.optim_cls(params, **given.kwargs)
        elif error.error_on == helpers.OptimizerErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(kind, match=message):
                info.optim_cls(params, **given.kwargs)
        else:
            optimizer = info.optim_cls(params, **given.kwargs)
            with pytest.raises(kind, match=message):
                optimizer.step()


@EVERY_WAY
def test_goes_in_the_right_direction(info: Any, bare: bool) -> None:
    for one in problems(info, bare):
        # Shampoo's own rate overshoots here at first, in float64 as well.
        losses = one.train(40 if info.name == "Shampoo" else 20)
        assert losses[-1] < losses[0], one.optimizer.defaults


@EVERY_WAY
def test_gradients_are_not_written_to(info: Any, bare: bool) -> None:
    one = problem(info, bare)
    one.backward()
    before = [p.grad.clone() for p in one.parameters if p.grad is not None]
    one.optimizer.step()
    assert_equal([p.grad for p in one.parameters if p.grad is not None], before)


@EVERY_METHOD
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_groups_have_their_own(info: Any, key: str) -> None:
    """A group's value counts as the constructor's would, and leaves other groups alone."""
    if info.name == "MuonQK":
        pytest.skip("its groups come from the model")
    known = info.optim_cls.recipe.defaults
    if key not in known:
        with pytest.raises(TypeError, match=f"no setting {key!r}"):
            info.optim_cls([nn.Parameter(torch.eye(4))], **{key: 0.05})
        pytest.skip(f"it has no {key}")
    # K-FAC's budget is one for all layers of a group. A constrained Scion decays by its rate,
    # whatever weight_decay is.
    changed = {"kl_clip": None, "constrained": False}
    alone = {name: value for name, value in changed.items() if name in known}

    def moved(groups: Any, **settings: Any) -> list[Tensor]:
        parameters = [nn.Parameter(torch.eye(4) + 0.1) for _ in range(2)]
        for p in parameters:
            p.grad = torch.arange(16.0).reshape(4, 4).sin()
        optimizer = info.optim_cls(groups(*parameters), **alone, **settings)
        for _ in range(2):  # SOAP's first only observes
            optimizer.step()
        return [p.detach() for p in parameters]

    default = moved(lambda a, b: [a, b])
    other = moved(lambda a, b: [a, b], **{key: 0.05})
    mixed = moved(lambda a, b: [{"params": [a], key: 0.05}, {"params": [b]}])
    torch.testing.assert_close(mixed, [other[0], default[1]])
    assert not torch.equal(mixed[0], mixed[1])


@EVERY_METHOD
def test_a_groups_rate_counts_whatever_the_constructors(info: Any) -> None:
    """As torch asks: learning under a constructor's rate of almost nothing, which others keep."""
    if info.name == "MuonQK":
        pytest.skip("its groups come from the model")
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    irrelevant = nn.Parameter(torch.randn(2, 2))
    before, x = irrelevant.detach().clone(), torch.randn(5)
    rate = info.optim_cls.recipe.defaults["lr"]
    optimizer = info.optim_cls(
        [{"params": [weight, bias], "lr": rate}, {"params": [irrelevant]}], lr=1e-28
    )
    losses = []
    for _ in range(20):
        loss = (weight.mv(x) + bias).square().sum()
        optimizer.zero_grad()
        loss.backward()
        irrelevant.grad = torch.rand_like(irrelevant)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(irrelevant.detach(), before)


@EVERY_METHOD
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 4, 2, 2), (5,)])
def test_non_contiguous_parameters_equal_contiguous_ones(info: Any, shape: tuple[int, ...]) -> None:
    """Bit for bit, every second element of a larger tensor, whose other half stays as it was."""
    if info.name == "MuonQK":
        pytest.skip("its groups come from the model")

    def trained(memory: Tensor) -> Tensor:
        parameter = nn.Parameter(memory[..., 0])
        optimizer = info.optim_cls([parameter])
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        return parameter.detach()

    torch.manual_seed(0)
    memory = torch.randn(*shape, 2)
    other_half = memory[..., 1].clone()
    contiguous = trained(memory[..., :1].clone())
    assert torch.equal(trained(memory), contiguous)
    assert torch.equal(memory[..., 1], other_half)


@EVERY_WAY
def test_a_tensor_lr_is_the_same_lr(info: Any, bare: bool) -> None:
    """In place, as schedulers change it, too; and it stays a tensor that nobody writes to."""
    number, tensor = problem(info, bare, lr=0.25), problem(info, bare, lr=torch.tensor(0.25))
    for one in (number, tensor):
        one.train(2)
    lr = tensor.optimizer.param_groups[0]["lr"]
    assert isinstance(lr, Tensor)
    assert lr == 0.25
    lr.fill_(0.125)
    for group in number.optimizer.param_groups:
        if group["treatment"] != "adamw":
            group["lr"] = 0.125
    for one in (number, tensor):
        one.train(2)
    torch.testing.assert_close(tensor.values(), number.values())


@EVERY_WAY
def test_a_step_leaves_state_behind(info: Any, bare: bool) -> None:
    for one in problems(info, bare):
        one.train(1)
        joined = {spec.bias for spec in one.optimizer._layout.specs.values()}
        for p in one.parameters:
            tensors = [v for v in one.optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
            assert p in joined or tensors


@EVERY_METHOD
def test_parameters_of_several_dtypes(info: Any) -> None:
    if info.name == "MuonQK":
        pytest.skip("it refuses bare parameters")
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    parameters = [nn.Parameter(torch.eye(3, 4, dtype=dtype)) for dtype in dtypes]
    optimizer = info.optim_cls(parameters)
    before = [p.detach().clone() for p in parameters]
    for step in range(3):
        for p in parameters:
            p.grad = torch.arange(12.0).add(step).sin().reshape(3, 4).to(p.dtype)
        optimizer.step()
    for p, old in zip(parameters, before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
