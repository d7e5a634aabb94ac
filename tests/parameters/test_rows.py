"""Convolutions and samplings become the rows K-FAC expects."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from curvlinops import KFACLinearOperator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon, LayerSpec
from gomuon.parameters.routing import Routes
from gomuon.parameters.rows import LinearRows, rows_for
from gomuon.parameters.sampling import Sampling, spread_rows

CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    (nn.Conv1d(4, 6, 4, padding="same"), (2, 4, 9)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 4, 7, 6)),
    (nn.Conv2d(4, 6, 3, dilation=2, padding="valid"), (2, 4, 8, 9)),
    (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 5)),
    (nn.Conv3d(4, 6, 2, stride=2), (2, 4, 4, 5, 6)),
]


@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS, ids=str)
def test_patches_times_weight_are_the_convolution(module: Any, shape: tuple[int, ...]) -> None:
    """y = Wx for every row, and the weight's gradient is Σ g xᵀ: the rows are the right ones."""
    x = torch.randn(shape)
    y = module(x)
    g = torch.randn_like(y)
    reader = rows_for(module, Sampling())
    assert reader is not None
    groups = module.groups
    W = module.weight.detach().flatten(1).reshape(groups, -1, module.weight[0].numel())
    rows_x = reader.inputs(x).reshape(groups, -1, W.shape[-1])
    rows_g = reader.gradients(g).reshape(groups, -1, W.shape[-2])
    bias = module.bias.detach().reshape(groups, 1, -1)
    rows_y = reader.gradients(y.detach()).reshape_as(rows_g)
    torch.testing.assert_close(rows_x @ W.mT + bias, rows_y, rtol=1e-4, atol=1e-5)
    (G,) = torch.autograd.grad(y, module.weight, g)
    torch.testing.assert_close(
        rows_g.mT @ rows_x, G.flatten(1).reshape(W.shape), rtol=1e-4, atol=1e-4
    )


def test_unbatched_convolutions_are_read_too() -> None:
    module = nn.Conv2d(3, 5, 3)
    x = torch.randn(3, 6, 6)
    reader = rows_for(module, Sampling())
    assert reader is not None
    assert reader.inputs(x).shape == (16, 27)
    assert reader.gradients(module(x)).shape == (16, 5)


def test_other_paddings_are_not_captured_but_go_to_adamw() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, 4, 3)
    )
    treatments = {r.name: r.treatment for r in GoMuon(model).routing_table()}
    assert treatments["0.weight"] == "adamw"
    assert treatments["1.weight"] == "matrix"


def test_convolution_factors_agree_with_curvlinops() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(75, 4, bias=False),
    ).double()
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randn(6, 4).double()
    operator = KFACLinearOperator(
        model,
        nn.MSELoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    optimizer = GoMuon(model, shrinkage=0.0)
    nn.MSELoss()(model(x), y).backward()
    weight = model.get_parameter("0.weight")
    statistics = optimizer._capture.groups[0].collect()[weight]
    assert statistics.inputs is not None
    assert statistics.gradients is not None

    def normalised(S: Tensor) -> Tensor:
        return S / S.trace()

    torch.testing.assert_close(
        normalised(statistics.inputs.total), normalised(state["input_covariances"]["0"])
    )
    torch.testing.assert_close(
        normalised(statistics.gradients.total), normalised(state["gradient_covariances"]["0"])
    )


def test_a_convolutional_net_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )
    optimizer = GoMuon(model, lr=0.02, adamw={"lr": 1e-2})
    x, y = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    grouped = optimizer.state[model.get_parameter("2.weight")]
    assert grouped["left_map"].shape == (2, 4, 4)
    assert grouped["right_map"].shape == (2, 36, 36)


def test_sampling_takes_every_stride_th_position_after_the_skipped() -> None:
    x = torch.arange(2 * 7 * 3.0).reshape(2, 7, 3)
    rows = LinearRows(Sampling(stride=3, skip=1)).inputs(x)
    torch.testing.assert_close(rows, x[:, [1, 4]].reshape(-1, 3))
    flat = torch.randn(5, 3)
    torch.testing.assert_close(LinearRows(Sampling(stride=3, skip=1)).inputs(flat), flat)


def test_reduce_averages_inputs_and_sums_gradients() -> None:
    x = torch.randn(4, 6, 5, 3)
    reader = LinearRows(Sampling(reduce=True))
    torch.testing.assert_close(reader.inputs(x), x.mean((1, 2)))
    torch.testing.assert_close(reader.gradients(x), x.sum((1, 2)))


@pytest.mark.parametrize("rows", [1, 4, 13, 100])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize("shape", [(17, 3), (4, 6, 3), (4, 2, 5, 3)])
def test_a_bound_takes_the_same_rows_of_any_layout(
    shape: tuple[int, ...], layout: str, rows: int
) -> None:
    x = torch.randn(shape)
    if layout == "transposed":
        x = x.transpose(0, -2).contiguous().transpose(0, -2)
    elif layout == "expanded":
        x = x[:1].expand(shape)
    every = x.reshape(-1, 3)
    chosen = spread_rows(len(every), rows, x.device) if rows < len(every) else slice(None)
    assert torch.equal(LinearRows(Sampling(rows=rows)).inputs(x), every[chosen])
    assert torch.equal(LinearRows(Sampling(rows=rows)).gradients(x), every[chosen])
    with_ones = LinearRows(Sampling(rows=rows, ones=True)).inputs(x)
    assert torch.equal(with_ones, torch.cat([every[chosen], every[chosen][:, :1] * 0 + 1], 1))


def test_a_bound_takes_rows_of_what_stride_and_skip_leave() -> None:
    x = torch.randn(4, 9, 3)
    left = x[:, 2::3].reshape(-1, 3)
    rows = LinearRows(Sampling(stride=3, skip=2, rows=5)).inputs(x)
    assert torch.equal(rows, left[spread_rows(12, 5, x.device)])


def test_a_bound_takes_examples_before_they_are_reduced() -> None:
    x = torch.randn(9, 6, 3)
    chosen = spread_rows(9, 4, x.device)
    reader = LinearRows(Sampling(reduce=True, rows=4))
    torch.testing.assert_close(reader.inputs(x), x.mean(1)[chosen])
    torch.testing.assert_close(reader.gradients(x), x.sum(1)[chosen])
    convolution = rows_for(nn.Conv1d(3, 5, 2), Sampling(reduce=True, rows=4))
    whole = rows_for(nn.Conv1d(3, 5, 2), Sampling(reduce=True))
    assert convolution is not None
    assert whole is not None
    x = torch.randn(9, 3, 6)
    torch.testing.assert_close(convolution.inputs(x), whole.inputs(x)[chosen])
    torch.testing.assert_close(convolution.gradients(x), whole.gradients(x)[chosen])


def test_sampled_statistics_reach_the_factors() -> None:
    layer = nn.Linear(3, 4, bias=False)
    optimizer = GoMuon(layer, token_stride=2, token_skip=1, shrinkage=0.0)
    x = torch.randn(5, 8, 3)
    layer(x).square().mean().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    used = x[:, 1::2].reshape(-1, 3)
    assert float(moment.count) == len(used)
    torch.testing.assert_close(moment.total, used.T @ used)


def test_bounded_statistics_reach_the_factors() -> None:
    """B is that of the sampled rows, and the number of all rows undoes the loss's mean."""
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer, rows=11, shrinkage=0.0)
    x = torch.randn(5, 8, 3, dtype=torch.float64)
    y = layer(x)
    y.square().sum(-1).mean().backward()
    statistics = optimizer._capture.groups[0].collect()[layer.weight]
    chosen = spread_rows(40, 11, x.device)
    used, delta = x.reshape(-1, 3)[chosen], 2 * y.detach().reshape(-1, 4)[chosen]
    for moment, rows in ((statistics.inputs, used), (statistics.gradients, delta / 40)):
        assert moment is not None
        assert (float(moment.count), float(moment.uses)) == (11, 40)
        torch.testing.assert_close(moment.total, rows.T @ rows)
    optimizer.step()
    factor = optimizer.state[layer.weight]["left_factor"][0]
    torch.testing.assert_close(factor, delta.T @ delta / 11)


def test_a_spec_bounds_one_layer_and_readers_of_other_rows_do_not_share() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 4) for name in "qkv"})
    specs = {"v.weight": LayerSpec(rows=5)}
    optimizer = GoMuon(model, rows=7, specs=specs, routes={"*.weight": "matrix"})
    x = torch.randn(6, 3, 3)
    sum(layer(x).square().sum() for layer in model.values()).backward()
    found = optimizer._capture.groups[0].collect()
    q, k, v = (found[layer.get_parameter("weight")].inputs for layer in model.values())
    assert q is not None
    assert v is not None
    assert q is k
    assert [float(moment.count) for moment in (q, v)] == [7, 5]
    for moment, rows in ((q, 7), (v, 5)):
        used = x.reshape(-1, 3)[spread_rows(18, rows, x.device)]
        torch.testing.assert_close(moment.total, used.T @ used)


def test_a_spec_bounds_a_grouped_convolution_and_leaves_its_groups() -> None:
    layer = nn.Conv2d(4, 6, 3, groups=2)
    specs = {"weight": LayerSpec(rows=10)}
    optimizer = GoMuon(layer, specs=specs, routes={"weight": "matrix"})
    layer(torch.randn(3, 4, 6, 6)).square().sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    assert (moment.total.shape, float(moment.count)) == ((2, 18, 18), 10)
    optimizer.step()
    assert optimizer.state[layer.weight]["left_map"].shape == (2, 3, 3)


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, "all"])
def test_a_bound_that_is_no_number_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match='rows must be "auto", None or a whole number >= 1'):
        GoMuon(nn.Linear(3, 4), rows=rows)
    with pytest.raises(ValueError, match="rows of 'weight' must be None or a whole number >= 1"):
        GoMuon(nn.Linear(3, 4), specs={"weight": LayerSpec(rows=rows)})


def counts(optimizer: GoMuon) -> dict[Tensor, int]:
    """How many rows entered the moments of each layer."""
    found = optimizer._capture.groups[0].collect()
    moments = {weight: seen.inputs or seen.gradients for weight, seen in found.items()}
    return {weight: int(moment.count) for weight, moment in moments.items() if moment is not None}


def test_auto_is_two_rows_for_each_input_of_a_block_and_at_least_256() -> None:
    """The side of A counts, not that of B: then readers of one tensor can share its moment."""
    layers = [nn.Linear(n, m) for n, m in ((32, 400), (400, 300), (300, 32))]
    model = nn.Sequential(*layers)
    routes: Routes = {"*.weight": "matrix"}
    blocks = {"block_size": 160}  # 400 as 4×100, 300 as 2×150

    def used(**settings: Any) -> list[int]:
        optimizer = GoMuon(model, routes=routes, **settings)
        model(torch.randn(1000, 32)).square().sum().backward()
        found = counts(optimizer)
        optimizer.remove_hooks()
        return [found[layer.weight] for layer in layers]

    whole: dict[str, Any] = {"rows": "auto", "block_size": None}
    assert used(**whole) == [256, 800, 600]
    assert used(rows="auto", **blocks) == [256, 256, 300]
    assert used(**whole, max_side=350, long_sides="diagonal") == [256, 256, 600]
    assert used(**whole, specs={"1.weight": LayerSpec(rows=7)}) == [256, 7, 600]
    assert used() == used(rows=None) == used(preset="paper") == [1000, 1000, 1000]


def test_auto_uses_small_batches_whole() -> None:
    layer = nn.Linear(8, 4)
    optimizer = GoMuon(layer, routes={"weight": "matrix"}, rows="auto")
    layer(torch.randn(255, 8)).square().sum().backward()
    assert counts(optimizer) == {layer.weight: 255}


def test_with_auto_layers_that_read_one_tensor_share_its_moment() -> None:
    model = nn.ModuleDict({name: nn.Linear(32, m) for name, m in (("q", 32), ("up", 400))})
    optimizer = GoMuon(model, routes={"*.weight": "matrix"}, rows="auto")
    x = torch.randn(500, 32)
    sum(layer(x).square().sum() for layer in model.values()).backward()
    found = optimizer._capture.groups[0].collect()
    q, up = (found[layer.get_parameter("weight")].inputs for layer in model.values())
    assert q is up is not None


def test_a_bound_holds_for_each_forward_pass() -> None:
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer, rows=6)
    parts = [torch.randn(size, 3, dtype=torch.float64) for size in (4, 9, 20)]
    for part in parts:
        layer(part).square().sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    assert (float(moment.count), float(moment.uses)) == (4 + 6 + 6, 4 + 9 + 20)
    sampled = [part[spread_rows(len(part), 6, part.device)] for part in parts[1:]]
    used = torch.cat([parts[0], *sampled])
    torch.testing.assert_close(moment.total, used.T @ used)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_bound_under_checkpointing_counts_once(reentrant: bool) -> None:
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer, rows=6)
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).square().mean().backward()
    statistics = optimizer._capture.groups[0].collect()[layer.weight]
    used = x.detach().reshape(-1, 3)[spread_rows(20, 6, x.device)]
    for moment in (statistics.inputs, statistics.gradients):
        assert moment is not None
        assert (float(moment.count), float(moment.uses)) == (6, 20)
    assert statistics.inputs is not None
    torch.testing.assert_close(statistics.inputs.total, used.T @ used)


def test_a_mask_leaves_out_some_of_the_bounded_rows() -> None:
    torch.manual_seed(0)  # a mask could also leave out none of them
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer, rows=9)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    mask = torch.rand(4, 5) < 0.7
    with optimizer.statistics_mask(mask):
        layer(x).square().mean().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    chosen = spread_rows(20, 9, x.device)
    used = x.reshape(-1, 3)[chosen[mask.flatten()[chosen]]]
    assert 0 < len(used) < 9
    assert (float(moment.count), float(moment.uses)) == (len(used), int(mask.sum()))
    torch.testing.assert_close(moment.total, used.T @ used)


def test_sampled_labels_give_the_models_fisher() -> None:
    """E[δδᵀ] of labels drawn from the model tends to Diag(p) − ppᵀ, whatever the true labels."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 3, bias=False).double()
    x = torch.ones(40_000, 2, dtype=torch.float64)
    optimizer = GoMuon(layer, shrinkage=0.0)
    logits = layer(x)
    wrong = torch.zeros(len(x), dtype=torch.long)
    loss = nn.functional.cross_entropy(logits, wrong)
    optimizer.sample_labels(logits, torch.Generator().manual_seed(1))
    assert layer.weight.grad is None
    loss.backward()
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(layer(x), wrong), layer.weight)
    torch.testing.assert_close(layer.weight.grad, expected)
    optimizer.step()
    p = logits[0].detach().softmax(-1)
    fisher = torch.diag(p) - torch.outer(p, p)
    found = optimizer.state[layer.weight]["left_factor"][0]
    torch.testing.assert_close(found, fisher, rtol=0.05, atol=0.003)


def test_sampling_labels_on_a_reuse_step_does_nothing() -> None:
    layer = nn.Linear(2, 3)
    optimizer = GoMuon(layer)
    for step in range(2):
        optimizer.zero_grad()
        logits = layer(torch.randn(7, 2))
        optimizer.sample_labels(logits)
        logits.square().mean().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == step + 1
    assert not optimizer._capture.groups[0].collect()


@pytest.mark.parametrize("flat", [False, True])
def test_a_mask_leaves_padding_out_of_the_statistics(flat: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=False)
    optimizer = GoMuon(layer)
    x = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    with optimizer.statistics_mask(mask):
        y = layer(x.flatten(0, 1) if flat else x)
    y.square().mean().backward()
    statistics = optimizer._capture.groups[0].collect()[layer.weight]
    assert statistics.inputs is not None
    assert statistics.gradients is not None
    seen = x[mask.bool()]
    delta = (2 * layer(seen) / y.numel()).detach()
    torch.testing.assert_close(statistics.inputs.total, seen.T @ seen)
    torch.testing.assert_close(statistics.gradients.total, delta.T @ delta)
    for moment in (statistics.inputs, statistics.gradients):
        assert (float(moment.count), float(moment.uses)) == (7, 7)
    assert optimizer._capture.groups[0].shared.mask_now() is None


def test_a_mask_with_reduce_is_refused() -> None:
    optimizer = GoMuon(nn.Linear(3, 4), reduce=True)
    with (
        pytest.raises(ValueError, match="reduce=True"),
        optimizer.statistics_mask(torch.ones(2, 5)),
    ):
        pass


def test_a_layer_called_with_no_rows_was_not_seen() -> None:
    layer = nn.Linear(3, 4, bias=False)
    optimizer = GoMuon(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (6, 0, 6):
            optimizer.param_groups[0]["step"] = 0  # a refresh every time
            optimizer._gate()
            optimizer.zero_grad()
            layer(torch.randn(rows, 3)).square().sum().backward()
            optimizer.step()
    assert "failures" not in optimizer.state[layer.weight]
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("skip", [0, 9])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 4), (2, 0, 3)), (nn.Linear(3, 4), (2, 5, 3)), (nn.Conv1d(3, 4, 2), (2, 3, 5))],
    ids=["no positions", "linear", "convolution"],
)
def test_an_average_over_no_positions_is_not_a_row(
    layer: nn.Module, shape: tuple[int, ...], skip: int
) -> None:
    """Sequences shorter than what is skipped, or empty ones, under K-FAC-reduce."""
    optimizer = GoMuon(layer, reduce=True, token_skip=skip, routes={"weight": "matrix"})
    layer(torch.randn(shape)).square().sum().backward()
    statistics = optimizer._capture.groups[0].collect()[layer.get_parameter("weight")]
    rows = 0 if skip or 0 in shape else 2
    assert statistics.gradients is not None
    assert float(statistics.gradients.count) == rows
    assert (statistics.inputs is not None) == bool(rows)
    optimizer.step()
    assert "failures" not in optimizer.state[layer.get_parameter("weight")]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mask_is_kept_for_recomputed_passes(reentrant: bool) -> None:
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer)
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 5)
    mask[:, 3:] = 0
    with optimizer.statistics_mask(mask):
        y = checkpoint(layer, x, use_reentrant=reentrant)
    y.square().mean().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    rows = x.detach()[:, :3].flatten(0, 1)
    torch.testing.assert_close(moment.total, rows.mT @ rows)
    optimizer.step()
    assert optimizer._capture.groups[0].shared._last_mask is None, "it does not outlive the step"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mask_does_not_reach_a_later_pass_without_one(reentrant: bool) -> None:
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer)
    x = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    with optimizer.statistics_mask(torch.zeros(3, 3)):
        layer(x).sum().backward()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    assert float(moment.count) == 9


@pytest.mark.parametrize("masked_first", [True, False])
def test_a_checkpointed_pass_keeps_the_mask_it_was_made_under(masked_first: bool) -> None:
    """Two forward passes of other shapes, one under a mask, then their backward passes."""
    layer = nn.Linear(3, 4, bias=False).double()
    optimizer = GoMuon(layer, routes={"weight": "matrix"})
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rows, outputs = [], []
    for masked in (masked_first, not masked_first):
        x = torch.randn(2, 3 if masked else 5, 3, dtype=torch.float64)
        rows.append(x[mask.bool()] if masked else x.flatten(0, 1))
        with optimizer.statistics_mask(mask) if masked else nullcontext():
            outputs.append(checkpoint(layer, x, use_reentrant=False))
    mask.zero_()  # it is the user's
    for y in outputs:
        y.sum().backward()
    moment = optimizer._capture.groups[0].collect()[layer.weight].inputs
    assert moment is not None
    assert float(moment.count) == 13
    seen = torch.cat(rows)
    torch.testing.assert_close(moment.total, seen.mT @ seen)
