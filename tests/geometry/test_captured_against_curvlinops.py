"""Captured factors agree with an independent package's, up to the stated scalar."""

import pytest
import torch
from curvlinops import KFACLinearOperator
from torch import Tensor, nn

from gomuon import GoMuon
from tests.models import mlp


def captured(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Â and B̂ of every hidden layer as the optimizer forms them, before shrinkage."""
    optimizer = GoMuon(model, routes={"*.weight": "matrix"}, shrinkage=0.0)
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    statistics = optimizer._capture.groups[0].collect()
    optimizer.step()
    factors = {}
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            moment = statistics[parameter].inputs
            assert moment is not None
            A = moment.total / moment.count
            factors[name] = (A, optimizer.state[parameter]["left_factor"].squeeze(0))
    return factors


def curvlinops_factors(
    model: nn.Sequential, x: Tensor, y: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    operator = KFACLinearOperator(
        model,
        nn.MSELoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        check_deterministic=False,  # it would form the factors a first time and add them up
    )
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    A, B = state["input_covariances"], state["gradient_covariances"]
    return {f"{name}.weight": (A[name], B[name]) for name in A}


def scalar_multiple(S: Tensor, T: Tensor) -> float:
    """c with S = c·T to 1e-10, or an assertion error."""
    ratio = float((S * T).sum() / T.square().sum())
    torch.testing.assert_close(S, ratio * T, rtol=1e-10, atol=1e-12 * float(S.abs().max()))
    return ratio


@pytest.mark.parametrize("shape", [(12,), (6, 5)], ids=["linear", "sequence"])
def test_agree_with_curvlinops(shape: tuple[int, ...]) -> None:
    model = mlp(4, 6, 5, 3, bias=False)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    ours = captured(mlp(4, 6, 5, 3, bias=False), x, y)
    theirs = curvlinops_factors(model, x, y)
    assert theirs.keys() == ours.keys()
    for name, (A, B) in ours.items():
        assert scalar_multiple(A, theirs[name][0]) == pytest.approx(1, rel=1e-12)
        # MSELoss averages over the outputs too; curvlinops takes that average out again, once.
        assert scalar_multiple(B, theirs[name][1]) == pytest.approx(1 / y.shape[-1], rel=1e-12)
