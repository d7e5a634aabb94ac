"""Weights that functions multiply with are captured as linear layers are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from gomuon import KFAC, GeometryWarning, GoMuon, LayerSpec
from gomuon.moments import Statistics
from gomuon.optimizer import MatrixOptimizer

Product = Callable[[Tensor, Tensor], Tensor]
M, N = 5, 7


class Own(nn.Module):
    """A layer of one's own: y = product(x, W)."""

    def __init__(self, shape: tuple[int, ...], product: Product) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator).double())
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def captured(
    model: nn.Module, x: Tensor, spec: LayerSpec | None = None, **settings: Any
) -> tuple[dict[str, Statistics], Tensor, Tensor, GoMuon]:
    """What is captured in one step, with the output and its gradient."""
    specs = None if spec is None else {"weight": spec}
    optimizer = GoMuon(model, routes={"*weight": "matrix"}, specs=specs, **settings)
    y = model(x)
    y.retain_grad()
    y.sin().sum().backward()
    assert y.grad is not None
    found = optimizer._capture.collect(ranks=1)[0]
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {names[p]: s for p, s in found.items()}, y, y.grad, optimizer


def assert_moment(found: Any, rows: Tensor) -> None:
    exact = 1e-12 if rows.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.total, rows.mT @ rows, rtol=exact, atol=exact)
    assert torch.equal(found.count, torch.full_like(found.count, rows.shape[-2]))
    assert torch.equal(found.uses, found.count)


def rows_of(v: Tensor) -> Tensor:
    return v.detach().reshape(-1, v.shape[-1])


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


PLAIN: dict[str, Product] = {
    "linear": F.linear,
    "matmul": lambda x, W: x @ W.T,
    "torch.matmul": lambda x, W: torch.matmul(x, W.mT),
    "of a copy": lambda x, W: F.linear(x, W.to(torch.float64, copy=True).contiguous()),
    "einsum": lambda x, W: torch.einsum("bti,oi->bto", x, W),
    "implicit einsum": lambda x, W: torch.einsum("abi,ji->abj", x, W),
    "einsum with dots": lambda x, W: torch.einsum("...i,oi->...o", x, W),
    "weight first": lambda x, W: (W @ x.mT).mT,
    "bmm": lambda x, W: torch.bmm(x, W.T.expand(len(x), -1, -1)),
    "addmm": lambda x, W: torch.addmm(x.new_ones(M), x.flatten(0, 1), W.t()).view(*x.shape[:2], M),
    "unsqueezed": lambda x, W: (x @ W.transpose(0, 1).unsqueeze(0)),
    "reshaped": lambda x, W: F.linear(x, W.view(-1).reshape(M, N)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_moments_are_those_of_a_linear_layer(name: str) -> None:
    x = inputs(4, 3, N)
    found, _, g, _ = captured(Own((M, N), PLAIN[name]), x)
    assert_moment(found["weight"].inputs, rows_of(x))
    assert_moment(found["weight"].gradients, rows_of(g))


STORED_TURNED: dict[str, Product] = {
    "matmul": lambda x, W: x @ W,
    "mm": lambda x, W: x.flatten(0, 1).mm(W).unflatten(0, x.shape[:2]),
    "einsum": lambda x, W: torch.einsum("bti,io->bto", x, W),
    "linear": lambda x, W: F.linear(x, W.t()),
}


@pytest.mark.parametrize("name", STORED_TURNED)
def test_a_weight_stored_inputs_by_outputs(name: str) -> None:
    x = inputs(4, 3, N)
    found, _, g, _ = captured(Own((N, M), STORED_TURNED[name]), x, LayerSpec(transposed=True))
    assert_moment(found["weight"].inputs, rows_of(x))
    assert_moment(found["weight"].gradients, rows_of(g))


def test_heads_in_dimensions_of_their_own() -> None:
    """W [inputs, heads, size], as one matrix stored inputs × outputs."""
    x = inputs(4, 3, N)
    layer = Own((N, 2, 3), lambda x, W: torch.einsum("bti,ihd->bthd", x, W))
    found, _, g, _ = captured(layer, x, LayerSpec(stack=False, transposed=True))
    assert_moment(found["weight"].inputs, rows_of(x))
    assert_moment(found["weight"].gradients, rows_of(g.flatten(-2)))
    turned = Own((M, 2, 3), lambda x, W: torch.einsum("bthd,ohd->bto", x.unflatten(-1, (2, 3)), W))
    x = inputs(4, 3, 6)
    found, _, g, _ = captured(turned, x, LayerSpec(stack=False))
    assert_moment(found["weight"].inputs, rows_of(x))
    assert_moment(found["weight"].gradients, rows_of(g))


STACKED: dict[str, Product] = {
    "bmm": lambda x, W: torch.bmm(x, W.mT),
    "matmul": lambda x, W: x @ W.transpose(1, 2),
    "loop": lambda x, W: torch.stack([F.linear(one, w) for one, w in zip(x, W, strict=True)]),
    "indices": lambda x, W: torch.stack([x[e] @ W[e].T for e in range(len(W))]),
    "numbers in tensors": lambda x, W: torch.stack(
        [F.linear(x[e], W[e]) for e in torch.arange(len(W))]
    ),
    "einsum": lambda x, W: torch.einsum("eti,eoi->eto", x, W),
    "halves": lambda x, W: torch.cat(
        [torch.bmm(a, b.mT) for a, b in zip(x.chunk(2), W.chunk(2), strict=True)]
    ),
    "one number for each row": lambda x, W: torch.bmm(
        W[torch.arange(len(W)).repeat_interleave(x.shape[1])], x.flatten(0, 1).unsqueeze(-1)
    ).squeeze(-1).unflatten(0, x.shape[:2]),
    "grouped": lambda x, W: torch._grouped_mm(
        x.flatten(0, 1),
        W.transpose(-2, -1),
        offs=(torch.arange(1, len(W) + 1) * x.shape[1]).to(torch.int32),
    ).unflatten(0, x.shape[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKED)
def test_moments_of_a_stack(name: str) -> None:
    x, model = inputs(4, 3, 8), Own((4, 12, 8), STACKED[name])
    if name == "grouped":  # not in float64
        x, model = x.float(), model.float()
    found, _, g, optimizer = captured(model, x)
    assert_moment(found["weight"].inputs, x)
    assert_moment(found["weight"].gradients, g)
    assert found["weight"].inputs is not None
    assert found["weight"].inputs.count.shape == (4,)
    optimizer.step()
    assert "4 of 12 × 8" in str(optimizer.routing_table())


def test_a_stack_that_reads_one_input() -> None:
    """As modded-nanogpt's 3×d×d: flattened to one product for queries, keys and values."""
    x, d = inputs(4, 3, N), N
    layer = Own((3, d, d), lambda x, W: F.linear(x, W.flatten(end_dim=1).type_as(x)))
    found, _, g, _ = captured(layer, x)
    parts = rows_of(g).unflatten(1, (3, d)).movedim(1, 0)
    assert_moment(found["weight"].inputs, rows_of(x).expand(3, -1, -1))
    assert_moment(found["weight"].gradients, parts)


@pytest.mark.parametrize("spec", [LayerSpec(parts=2, heads=3), LayerSpec(input_heads=2)], ids=str)
def test_a_stack_and_heads(spec: LayerSpec) -> None:
    x = inputs(4, 3, 8)
    found, _, g, optimizer = captured(Own((4, 6, 8), STACKED["bmm"]), x, spec)
    strips = (4 * spec.input_heads, 4 * spec.row_blocks)
    cut_x = x.unflatten(-1, (spec.input_heads, -1)).movedim(2, 1).flatten(0, 1)
    cut_g = g.unflatten(-1, (spec.row_blocks, -1)).movedim(2, 1).flatten(0, 1)
    both = found["weight"].inputs, found["weight"].gradients
    for moment, rows, number in zip(both, (cut_x, cut_g), strips, strict=True):
        assert moment is not None
        assert moment.total.shape[0] == number
        torch.testing.assert_close(moment.total, rows.mT @ rows)
    optimizer.step()


def test_pieces_of_a_weight_are_rows_with_zeros() -> None:
    """Queries read one tensor, keys and values another, as in cross attention."""
    x, z = inputs(3, N), inputs(4, N, seed=2)

    def product(x: Tensor, W: Tensor) -> Tensor:
        return torch.cat([F.linear(x, W[:3]).flatten(), F.linear(z, W[3:]).flatten()])

    layer = Own((9, N), product)
    found, _, _, _ = captured(layer, x)
    of_x, of_g = found["weight"].inputs, found["weight"].gradients
    assert of_x is not None
    assert of_g is not None
    torch.testing.assert_close(of_x.total, x.T @ x + z.T @ z)
    assert float(of_x.count) == 7
    assert not of_g.total[:3, 3:].any()
    assert of_g.total[:3, :3].any()


def test_bilinear_is_a_layer_that_reads_products() -> None:
    x, z = inputs(6, 3), inputs(6, 4, seed=2)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.both = nn.Bilinear(3, 4, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.both(x, z)
            return y

    found, _, g, _ = captured(Two(), x)
    assert_moment(found["both.weight"].inputs, torch.einsum("bi,bj->bij", x, z).flatten(1))
    assert_moment(found["both.weight"].gradients, g)


# ---- experts -------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Experts of two layers, as a list of linear layers or as stacks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(4, 16, 8, generator=generator).double() / 3
        down = torch.randn(4, 8, 16, generator=generator).double() / 3
        self.kind = kind
        if kind == "layers":
            self.up = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in up)
            self.down = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in up)
            self.double()
            for layers, weights in ((self.up, up), (self.down, down)):
                for layer, weight in zip(layers, weights, strict=True):
                    layer.weight.data = weight.clone()
        else:
            self.up_weight, self.down_weight = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=4).cumsum(0)
        rows = x[order]
        if self.kind == "grouped":
            hidden = torch._grouped_mm(rows, self.up_weight.mT, offs=ends.int()).tanh()
            y = torch._grouped_mm(hidden, self.down_weight.mT, offs=ends.int())
        elif self.kind == "gathered":
            numbers = expert[order]
            hidden = torch.bmm(self.up_weight[numbers], rows.unsqueeze(-1)).tanh()
            y = torch.bmm(self.down_weight[numbers], hidden).squeeze(-1)
        else:
            parts = []
            for e, part in enumerate(rows.tensor_split(ends[:-1])):
                if not len(part):
                    continue
                if self.kind == "layers":
                    parts.append(self.down[e](self.up[e](part).tanh()))
                else:
                    hidden = F.linear(part, self.up_weight[e]).tanh()
                    parts.append(F.linear(hidden, self.down_weight[e]))
            y = torch.cat(parts)
        return torch.zeros_like(y).index_copy(0, order, y)


# Uneven; the third expert gets no token in the first step, and in the step after the next refresh.
TOKENS = [(9, 2, 0, 9), (5, 5, 5, 5), (4, 0, 8, 8), (1, 9, 9, 1), (12, 8, 0, 0), (5, 5, 5, 5)]


@pytest.mark.parametrize("kind", ["loop", "grouped", "gathered"])
@pytest.mark.parametrize(
    "settings", [{"refresh_every": 1}, {"refresh_every": 2}, {"input_decay": 0.9}], ids=str
)
def test_factors_of_experts_are_those_of_linear_layers(kind: str, settings: dict[str, Any]) -> None:
    apart, stacked = Mixture("layers"), Mixture(kind)
    rtol, atol = 1e-10, 1e-12
    if kind == "grouped":  # not in float64
        apart, stacked, rtol, atol = apart.float(), stacked.float(), 1e-3, 1e-4
    settings = {"refresh_every": 2, "stagger": False, **settings}
    layers = GoMuon(apart, routes={"*": "matrix"}, **settings)
    whole = GoMuon(stacked, routes={"*": "matrix"}, **settings)
    compared = 0
    for step, tokens in enumerate(TOKENS):
        x = inputs(20, 8, seed=step).to(next(apart.parameters()).dtype)
        expert = torch.arange(4).repeat_interleave(torch.tensor(tokens))
        expert = expert[torch.randperm(20, generator=torch.Generator().manual_seed(step))]
        for model, optimizer in ((apart, layers), (stacked, whole)):
            optimizer.zero_grad()
            model(x, expert).sin().mean().backward()
            optimizer.step()
        for name in ("up", "down"):
            weight = getattr(stacked, f"{name}_weight")
            for e, layer in enumerate(getattr(apart, name)):
                for key in ("left_factor", "right_factor", "left_map", "right_map"):
                    expected = layers.state[layer.weight].get(key)
                    if expected is not None:
                        found = whole.state[weight][key][e]
                        torch.testing.assert_close(found, expected[0], rtol=rtol, atol=atol)
                        compared += 1
            # A layer whose expert got no token does not move at all; a stack has its momentum.
            weight.data = torch.stack([layer.weight.data for layer in getattr(apart, name)])
    assert compared > 100


# ---- when it is captured -------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6).double() / 3)
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(F.linear(x, self.weight).tanh())


class Deep(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            elif self.how == "functions":

                def run(v: Tensor, b: nn.Module = block) -> Tensor:
                    hidden = F.linear(v, b.get_parameter("weight")).tanh()
                    made: Tensor = v + b.get_submodule("layer")(hidden)
                    return made

                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def moments(how: str, batches: list[Tensor]) -> dict[str, Statistics]:
    model = Deep(how)
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    for x in batches:
        model(x.requires_grad_()).square().sum().backward()
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {names[p]: s for p, s in optimizer._capture.collect(ranks=1)[0].items()}


def assert_same(one: dict[str, Statistics], other: dict[str, Statistics]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        for side in ("inputs", "gradients"):
            a, b = getattr(one[name], side), getattr(other[name], side)
            torch.testing.assert_close(a.total, b.total, rtol=1e-11, atol=1e-12)
            assert (float(a.count), float(a.uses)) == (float(b.count), float(b.uses))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointed_modules_are_counted_once(how: str) -> None:
    x = inputs(4, 3, 6)
    assert_same(moments(how, [x.clone()]), moments("plain", [x.clone()]))


def test_micro_batches_add_up() -> None:
    x = inputs(4, 3, 6)
    assert_same(moments("plain", [x[:3].clone(), x[3:].clone()]), moments("plain", [x.clone()]))


def test_a_checkpointed_function_is_left_alone_and_named() -> None:
    """Its recomputation would run without the function mode, and save other tensors."""
    model, plain = Deep("functions"), Deep()
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    x = inputs(4, 3, 6)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    with pytest.warns(GeometryWarning, match=r"'blocks\.0\.weight'.*checkpoint a module instead"):
        optimizer.step()


def test_gradients_do_not_change_and_layers_are_as_before() -> None:
    model, plain = Deep(), Deep()
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    only_layers = GoMuon(plain)
    x = inputs(4, 3, 6)
    for one in (model, plain):
        one(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    found = [o._capture.collect(ranks=1)[0] for o in (optimizer, only_layers)]
    for number in range(2):
        name = f"blocks.{number}.layer.weight"
        for side in ("inputs", "gradients"):
            a = getattr(found[0][model.get_parameter(name)], side).total
            b = getattr(found[1][plain.get_parameter(name)], side).total
            assert torch.equal(a, b)


class Counter(TorchFunctionMode):
    """Counts functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_on_a_reuse_step_the_mode_is_not_entered_and_nothing_more_is_called() -> None:
    model, plain = Deep(), Deep()
    optimizer = GoMuon(model, routes={"*weight": "matrix"}, refresh_every=4, stagger=False)
    watch = optimizer._capture.groups[0].functions
    entered, calls = [], []
    for step in range(8):
        x = inputs(4, 3, 6, seed=step)
        numbers = []
        for one in (model, plain):
            with Counter() as counter:
                before = watch.entered
                one(x).square().sum().backward()
                assert _len_torch_function_stack() == 1
            numbers.append(counter.calls)
            if one is model:
                entered.append(watch.entered - before)
        calls.append(numbers[0] - numbers[1])
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert entered == [1, 0, 0, 0, 1, 0, 0, 0]
    assert [extra > 0 for extra in calls] == [True, False, False, False] * 2
    assert [calls[step] for step in (1, 2, 3, 5, 6, 7)] == [0] * 6
    plain_model = GoMuon(Deep(), routes={"*blocks*.layer.weight": "matrix"})
    model_ = plain_model._capture.model
    assert model_ is not None
    assert not any(module._forward_pre_hooks for module in model_.blocks)  # type: ignore[union-attr]


def test_a_forward_pass_that_raises_leaves_no_mode_behind() -> None:
    model = Deep()
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    with pytest.raises(RuntimeError):
        model(inputs(4, 3, 5))
    assert _len_torch_function_stack() == 0

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(4, 3, 6))
    handle.remove()
    optimizer.zero_grad()
    model(inputs(4, 3, 6)).square().sum().backward()
    found = optimizer._capture.collect(ranks=1)[0]
    optimizer.step()
    assert _len_torch_function_stack() == 0
    assert all(s.inputs is not None for s in found.values())


def test_capture_follows_gradients_and_not_the_mode_of_the_model() -> None:
    model = Deep()
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    x = inputs(4, 3, 6)
    with torch.no_grad():
        model(x)
    found = optimizer._capture.collect(ranks=1)[0]
    assert all(s.inputs is None and s.gradients is None for s in found.values())
    model.eval()
    model(x).sum().backward()
    found = optimizer._capture.collect(ranks=1)[0]
    assert found
    assert all(s.inputs is not None and s.gradients is not None for s in found.values())


def test_a_mask_leaves_rows_out() -> None:
    x, mask = inputs(4, 3, N), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    model = Own((M, N), F.linear)
    optimizer = GoMuon(model, routes={"weight": "matrix"})
    with optimizer.statistics_mask(mask):
        y = model(x)
    y.sum().backward()
    found = optimizer._capture.collect(ranks=1)[0][model.weight]
    assert found.inputs is not None
    torch.testing.assert_close(found.inputs.total, x[mask].T @ x[mask])
    assert float(found.inputs.count) == 6


def test_labels_that_the_model_draws() -> None:
    model = Own((M, N), F.linear)
    optimizer = GoMuon(model, routes={"weight": "matrix"})
    logits = model(inputs(8, N))
    optimizer.sample_labels(logits, torch.Generator().manual_seed(0))
    F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)).backward()
    found = optimizer._capture.collect(ranks=1)[0][model.weight].gradients
    p = logits.detach().softmax(-1)
    labels = torch.multinomial(p.float(), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    delta = (p - F.one_hot(labels, M)) / 8
    assert found is not None
    torch.testing.assert_close(found.total, delta.T @ delta, rtol=1e-6, atol=1e-9)


# ---- what cannot be captured ---------------------------------------------------------------------

NOT_CAPTURED: dict[str, tuple[tuple[int, ...], Product, str]] = {
    "turned": (
        (N, M),
        lambda x, W: x @ W,
        r"used as inputs × outputs; pass specs=\{name: LayerSpec\(transposed=True\)\}",
    ),
    "a slice with gaps": ((2 * M, N), lambda x, W: F.linear(x, W[::2]), "no block"),
    "a sum of weights": ((M, N), lambda x, W: F.linear(x, W + 1), "no product with it was seen"),
    "a convolution": (
        (M, N, 1),
        lambda x, W: F.conv1d(x.mT, W).mT,
        "no product with it was seen",
    ),
}


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_what_is_not_captured_is_named(name: str) -> None:
    shape, product, message = NOT_CAPTURED[name]
    model = Own(shape, product)
    spec = {"weight": LayerSpec(stack=False)} if len(shape) > 2 else None
    optimizer: MatrixOptimizer = GoMuon(model, routes={"weight": "matrix"}, specs=spec)
    model(inputs(4, 3, N)).square().sum().backward()
    with pytest.warns(GeometryWarning, match=rf"nothing was captured for 'weight'.*{message}"):
        optimizer.step()


def test_two_optimizers_and_another_mode() -> None:
    model = Deep()
    routes: Any = {"*weight": "matrix"}
    both = [GoMuon(model, routes=routes), GoMuon(model, routes=routes)]
    with Counter():
        model(inputs(4, 3, 6)).square().sum().backward()
    one, other = (o._capture.collect(ranks=1)[0] for o in both)
    for weight, statistics in one.items():
        assert statistics.inputs is not None
        assert other[weight].inputs is not None
        torch.testing.assert_close(statistics.inputs.total, other[weight].inputs.total)  # type: ignore[union-attr]


# ---- nn.MultiheadAttention -----------------------------------------------------------------------


class Attention(nn.Module):
    """torch's attention, or the same with a linear layer for each projection."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.MultiheadAttention(8, 2, batch_first=True)
        self.plain = plain
        if plain:
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
            self.qkv.weight, self.qkv.bias = whole.in_proj_weight, whole.in_proj_bias
            self.out.weight, self.out.bias = whole.out_proj.weight, whole.out_proj.bias
        else:
            self.whole = whole
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not self.plain:
            y: Tensor = self.whole(x, x, x, need_weights=False)[0]
            return y
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


@pytest.mark.parametrize("method", [GoMuon, KFAC])
def test_multihead_attention_equals_linear_layers(method: type[MatrixOptimizer]) -> None:
    models = [Attention(plain=plain) for plain in (True, False)]
    routes: Any = {"*weight": "matrix"}
    optimizers = [method(model, routes=routes) for model in models]
    # K-FAC joins a bias to its weight if it has that name, so its first weights alone are alike.
    for step in range(3 if method is GoMuon else 1):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs(4, 3, 8, seed=step)).square().sum().backward()
            optimizer.step()
    plain, whole = models
    pairs = (
        (plain.qkv.weight, whole.whole.in_proj_weight),
        (plain.out.weight, whole.whole.out_proj.weight),
    )
    for expected, found in pairs:
        assert isinstance(found, Tensor)
        one, other = (o.state[w] for o, w in zip(optimizers, (expected, found), strict=True))
        if method is GoMuon or found is pairs[1][1]:
            for key in ("left_factor", "left_map", "left_basis", "right_map"):
                if key in one:
                    torch.testing.assert_close(other[key], one[key], rtol=1e-10, atol=1e-12)
        if method is GoMuon:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_attention_to_another_sequence() -> None:
    """Queries read x, keys and values z: rows of both, with zeros for the other outputs."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).double()
    optimizer = GoMuon(model, routes={"*weight": "matrix"})
    x, z = inputs(4, 3, 8), inputs(4, 5, 8, seed=2)
    model(x, z, z, need_weights=False)[0].square().sum().backward()
    found = optimizer._capture.collect(ranks=1)[0][model.in_proj_weight]
    assert found.inputs is not None
    assert found.gradients is not None
    rows = torch.cat([rows_of(x), rows_of(z)])
    torch.testing.assert_close(found.inputs.total, rows.T @ rows)
    assert not found.gradients.total[:8, 8:].any()
    optimizer.step()
