"""Forward passes as no layer of torch makes them: a hook may see nothing, and never raises."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gomuon import GoMuon

X = torch.linspace(-1, 1, 24).reshape(6, 4).cos()
IMAGE = torch.linspace(-1, 1, 288).reshape(2, 4, 6, 6).cos()


class Tagged(Tensor):
    """A tensor with a name, nothing else."""


class Own(nn.Linear):
    """A linear layer whose forward pass is somebody's own."""

    def __init__(self, body: Callable[..., Any], features: tuple[int, int] = (4, 4)) -> None:
        super().__init__(*features)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


class Flat(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.get_parameter("weight"), layer.get_parameter("bias"))


@dataclass
class Case:
    """A layer, a loss, and whether the layer can be seen in it."""

    layer: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    seen: bool = True


def plain() -> nn.Module:
    return nn.Linear(4, 4)


def own(body: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Own(body)


def called(*args: Any, **kwargs: Any) -> Callable[[Any], Tensor]:
    """The sum of what the layer gives for these arguments."""
    return lambda layer: layer(*args, **kwargs).sum()


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([X[:2], X[2:]], layout=layout)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return X * 2


def in_inference_mode(layer: Any) -> Tensor:
    with torch.inference_mode(), torch.enable_grad():
        layer(X)
    return layer(X).sum()


def under_autocast(x: Tensor) -> Callable[[Any], Tensor]:
    def loss(layer: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).sum()

    return loss


def dual(part: str) -> Callable[[Any], Tensor]:
    def loss(layer: Any) -> Tensor:
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(X, torch.ones_like(X)))
            return getattr(forward_ad.unpack_dual(y), part).sum()

    return loss


def batched_gradients(layer: Any) -> Tensor:
    x = X.clone().requires_grad_()
    y = layer(x)
    many = torch.eye(24).reshape(24, 6, 4)
    (g,) = torch.autograd.grad(y, x, many, is_grads_batched=True, create_graph=True)
    torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(many)
    return g.square().sum() + y.sum()


def jacobians(layer: Any) -> Tensor:
    torch.autograd.functional.jacobian(layer, X)
    torch.autograd.functional.jacobian(layer, X, vectorize=True)
    torch.autograd.functional.jacobian(layer, X, vectorize=True, strategy="forward-mode")
    torch.func.jacrev(layer)(X)
    torch.func.jvp(layer, (X,), (X,))
    torch.vmap(layer)(X)
    return layer(X).sum()


def double_backward(layer: Any) -> Tensor:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)
    return g.square().sum()


def functional(convert: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    def loss(layer: Any) -> Tensor:
        other = {name: convert(p.detach()).requires_grad_() for name, p in layer.named_parameters()}
        torch.func.functional_call(layer, other, (convert(X),)).sum().backward()
        return layer(X).sum()

    return loss


def with_fakes(layer: Any) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(X))
    for tracing_mode in ("real", "fake", "symbolic"):
        make_fx(layer, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(X)
    return layer(X).sum()


def counted(layer: Any) -> Tensor:
    with FlopCounterMode(display=False):
        return layer(X).sum()


def with_another_weight(layer: Any) -> Tensor:
    weight = layer.weight
    del layer._parameters["weight"]
    layer.weight = 2 * weight
    y = layer(X).sum()
    del layer.weight
    layer.weight = weight
    return y


def without_weight(layer: Any) -> Tensor:
    weight = layer._parameters.pop("weight")
    y = layer(weight)
    layer.weight = weight
    return y.sum()


CASES: dict[str, Case] = {
    # ---- arguments
    "no arguments": Case(own(lambda layer: linear(layer, X)), called(), seen=False),
    "None": Case(own(lambda layer, x: linear(layer, X)), called(None), seen=False),
    "a list": Case(own(lambda layer, x: linear(layer, x[0])), called([X]), seen=False),
    "keyword": Case(own(lambda layer, x: linear(layer, x)), called(x=X)),
    "another keyword first": Case(
        own(lambda layer, scale, x: scale * linear(layer, x)),
        called(scale=torch.tensor(2.0), x=X),
        seen=False,
    ),
    "another tensor first": Case(
        own(lambda layer, rows, x: linear(layer, x[rows])),
        called(torch.tensor([0, 1]), X),
        seen=False,
    ),
    "a packed sequence": Case(
        own(lambda layer, x: linear(layer, x.data)),
        called(nn.utils.rnn.pack_sequence([X[:4], X[4:]])),
        seen=False,
    ),
    # ---- outputs
    "a dictionary": Case(
        own(lambda layer, x: {"y": linear(layer, x)}),
        lambda layer: layer(X)["y"].sum(),
        seen=False,
    ),
    "a number": Case(
        own(lambda layer, x: 3.0), lambda layer: layer(X) * linear(layer, X).sum(), seen=False
    ),
    "a loss": Case(own(lambda layer, x: linear(layer, x).sum()), called(X), seen=False),
    "averaged rows": Case(own(lambda layer, x: linear(layer, x).mean(0)), called(X), seen=False),
    "rows in another shape": Case(
        own(lambda layer, x: linear(layer, x).unflatten(0, (2, 3))), called(X)
    ),
    "another width": Case(
        own(lambda layer, x: linear(layer, x).repeat(1, 2)), called(X), seen=False
    ),
    "complex output": Case(
        own(lambda layer, x: linear(layer, x) + 0j),
        lambda layer: layer(X).abs().sum(),
        seen=False,
    ),
    "sparse output": Case(
        own(lambda layer, x: linear(layer, x).to_sparse()),
        lambda layer: layer(X).to_dense().sum(),
        seen=False,
    ),
    "mkldnn output": Case(
        own(lambda layer, x: linear(layer, x).to_mkldnn()),
        lambda layer: layer(X).to_dense().sum(),
        seen=False,
    ),
    "rounded output": Case(own(lambda layer, x: linear(layer, x).bfloat16()), called(X)),
    "tagged output": Case(own(lambda layer, x: linear(layer, x).as_subclass(Tagged)), called(X)),
    "the weight": Case(own(lambda layer, x: layer.weight), called(X), seen=False),
    "written to": Case(plain, lambda layer: layer(X).mul_(2).view(-1).add_(1).sum()),
    # ---- inputs
    "tagged input": Case(plain, called(X.as_subclass(Tagged))),
    "parameter": Case(plain, lambda layer: layer(nn.Parameter(X.clone())).sum()),
    "whole numbers": Case(
        own(lambda layer, x: linear(layer, x.float())), called(torch.arange(24).reshape(6, 4))
    ),
    "token numbers": Case(
        own(lambda layer, i: linear(layer, X[i])), called(torch.tensor([1, 2, 3])), seen=False
    ),
    "complex input": Case(own(lambda layer, x: linear(layer, x.real)), called(X + 1j), seen=False),
    "quantized input": Case(
        own(lambda layer, x: linear(layer, x.dequantize())),
        called(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)),
        seen=False,
    ),
    "half precision input": Case(own(lambda layer, x: linear(layer, x.float())), called(X.half())),
    "meta input": Case(own(lambda layer, x: linear(layer, X)), called(X.to("meta")), seen=False),
    "inference input": Case(
        own(lambda layer, x: linear(layer, x.clone())), called(inference_tensor()), seen=False
    ),
    "nested input": Case(
        plain,
        lambda layer: layer(nested(torch.strided)).to_padded_tensor(0.0).sum(),
        seen=False,
    ),
    "jagged input": Case(
        plain, lambda layer: layer(nested(torch.jagged)).values().sum(), seen=False
    ),
    "sparse input": Case(plain, called(X.to_sparse()), seen=False),
    "compressed input": Case(
        own(lambda layer, x: x @ layer.weight.mT), called(X.to_sparse_csr()), seen=False
    ),
    "masked input": Case(
        own(lambda layer, x: linear(layer, x.get_data())),
        lambda layer: layer(torch.masked.masked_tensor(X, X > 0)).sum(),
        seen=False,
    ),
    "no rows": Case(plain, called(X[:0]), seen=False),
    "no positions": Case(plain, called(X.unsqueeze(1)[:, :0]), seen=False),
    "one row": Case(plain, called(X[0])),
    "0-dim input": Case(
        own(lambda layer, x: linear(layer, x.expand(4))), called(torch.tensor(2.0)), seen=False
    ),
    "five dimensions": Case(plain, called(X.reshape(1, 2, 1, 3, 4))),
    "expanded": Case(plain, called(X[:1].expand(6, 4))),
    "no features": Case(lambda: nn.Linear(0, 4), called(torch.zeros(6, 0)), seen=False),
    "nothing comes out": Case(lambda: nn.Linear(4, 0), called(X), seen=False),
    # ---- convolutions
    "channels last": Case(
        lambda: nn.Conv2d(4, 4, 3), called(IMAGE.to(memory_format=torch.channels_last))
    ),
    "channels last, weight too": Case(
        lambda: nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        called(IMAGE.to(memory_format=torch.channels_last)),
    ),
    "one image": Case(lambda: nn.Conv2d(4, 4, 3, groups=2), called(IMAGE[0])),
    "no image": Case(lambda: nn.Conv2d(4, 4, 3), called(IMAGE[:0]), seen=False),
    "no image, in groups": Case(
        lambda: nn.Conv2d(4, 4, 3, groups=2), called(IMAGE[:0]), seen=False
    ),
    "flattened images": Case(lambda: Flat(4, 4, 3), called(IMAGE), seen=False),
    # ---- modes
    "autocast": Case(plain, under_autocast(X)),
    "autocast, rounded input": Case(plain, under_autocast(X.bfloat16())),
    "autocast, convolution": Case(lambda: nn.Conv2d(4, 4, 3), under_autocast(IMAGE)),
    "inference mode": Case(plain, in_inference_mode),
    "forward mode, value": Case(plain, dual("primal"), seen=False),
    "forward mode, tangent": Case(plain, dual("tangent"), seen=False),
    "many gradients at once": Case(plain, batched_gradients),
    "jacobians": Case(plain, jacobians),
    "gradient of a gradient": Case(plain, double_backward),
    "other parameters": Case(plain, functional(torch.clone)),
    "other parameters, wider": Case(plain, functional(Tensor.double)),
    "other parameters, meta": Case(plain, functional(lambda p: p.to("meta"))),
    "fake tensors": Case(plain, with_fakes),
    "counting mode": Case(plain, counted),
    "computed weight": Case(plain, with_another_weight),
    "no weight": Case(own(lambda layer, w: F.linear(X, w, layer.bias)), without_weight, False),
}


@pytest.mark.parametrize("name", list(CASES))
def test_an_odd_pass_goes_through(name: str) -> None:
    """Loss and gradients as without hooks, and then a step."""
    case = CASES[name]

    def learn(*, hooked: bool) -> tuple[Tensor, Mapping[str, Tensor | None], bool]:
        torch.manual_seed(0)
        layer = case.layer()
        optimizer = GoMuon(layer, routes={"weight": "matrix"})
        if not hooked:
            optimizer.remove_hooks()
        loss = case.loss(layer)
        loss.backward()
        gradients = {
            key: None if p.grad is None else p.grad.clone() for key, p in layer.named_parameters()
        }
        optimizer.step()
        assert all(p.isfinite().all() for p in layer.parameters())
        state = optimizer.state[layer.get_parameter("weight")]
        assert "failures" not in state
        return loss.detach(), gradients, "left_map" in state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's on prototypes, ours on layers not seen
        loss, gradients, _ = learn(hooked=False)
        hooked_loss, hooked_gradients, seen = learn(hooked=True)
    assert torch.equal(loss, hooked_loss)
    for key, g in gradients.items():
        other = hooked_gradients[key]
        assert (g is None) == (other is None)
        assert g is None or other is None or torch.equal(g, other), key
    assert seen is case.seen


# ---- masks over convolutions ---------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batched", [True, False])
def test_a_mask_over_positions_reaches_a_convolution(groups: int, batched: bool) -> None:
    """[batch, positions] as for a linear layer, where the convolution keeps the positions."""
    torch.manual_seed(0)
    layer = nn.Conv1d(4, 4, 1, groups=groups, bias=False)
    optimizer = GoMuon(layer, routes={"weight": "matrix"})
    x = torch.randn(2, 4, 5) if batched else torch.randn(4, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]]) if batched else torch.ones(5)
    mask[..., -1] = 0
    with optimizer.statistics_mask(mask):
        layer(x).square().sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    rows = x.movedim(-2, -1)[mask.bool()]
    expected = [part.mT @ part for part in rows.chunk(groups, dim=-1)]
    torch.testing.assert_close(moment.total.reshape(groups, -1, 4 // groups), torch.stack(expected))
    assert float(moment.count) == float(moment.uses) == mask.sum()


def test_a_mask_that_fits_channels_by_chance_is_not_theirs() -> None:
    layer = nn.Conv1d(4, 4, 1)
    optimizer = GoMuon(layer, routes={"weight": "matrix"})
    x = torch.randn(2, 4, 5)
    with optimizer.statistics_mask(torch.zeros(2, 4)):
        layer(x).sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    assert float(moment.count) == 10
