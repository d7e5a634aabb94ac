"""Capture sees what it must, once, and nothing on reuse steps."""

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon
from gomuon.capture.group import GroupCapture
from gomuon.capture.modules import captured_modules
from gomuon.lab.bench.memory import peak_bytes
from gomuon.moments import Statistics
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.side_forms import SideForm
from tests.models import language_loss, mlp, transformer


class Attention(nn.Module):
    """Two layers that read one tensor, one that reads another, an in-place activation between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.relu(self.q(x), inplace=True) * self.k(x))


def watch(*modules: nn.Module) -> GroupCapture:
    capture = GroupCapture()
    for module in modules:
        weight = module.get_parameter("weight")
        watched = captured_modules(module, lambda _: Sampling())[weight]
        m, n = weight.shape
        capture.place(weight, watched, (SideForm(m), SideForm(n)), inputs=True, gradients=True)
    capture.gate(lambda _: True)
    return capture


def seen(capture: GroupCapture, module: nn.Linear) -> tuple[Tensor, float, Tensor, float]:
    statistics = capture.collect()[module.weight]
    assert statistics.inputs is not None
    assert statistics.gradients is not None
    inputs, gradients = statistics.inputs, statistics.gradients
    return inputs.total, float(inputs.count), gradients.total, float(gradients.count)


def expected(model: Attention, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """xᵀx and gᵀg of q and o by hand, without hooks."""
    q = model.q(x)
    hidden = q.relu() * model.k(x)
    y = model.o(hidden)
    g_q, g_o = torch.autograd.grad(y.square().mean(), (q, y))

    def moment(v: Tensor) -> Tensor:
        rows = v.detach().reshape(-1, v.shape[-1])
        return rows.T @ rows

    return {"q": (moment(x), moment(g_q)), "o": (moment(hidden), moment(g_o))}


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, 6, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("shape", [(7,), (4, 3), (2, 3, 2)])
def test_moments_are_sums_over_all_rows(shape: tuple[int, ...]) -> None:
    model, x = Attention(), inputs(*shape)
    capture = watch(model.q, model.k, model.o)
    model(x).square().mean().backward()
    rows = x.numel() // 6
    for name, module in (("q", model.q), ("o", model.o)):
        A, count_A, B, count_B = seen(capture, module)
        by_hand = expected(model, x)[name]
        torch.testing.assert_close(A, by_hand[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(B, by_hand[1], rtol=1e-12, atol=0)
        assert (count_A, count_B) == (rows, rows)


def test_capture_does_not_change_the_gradients() -> None:
    model, x = Attention(), inputs(4, 3)
    capture = watch(model.q, model.k, model.o)
    model(x).square().mean().backward()
    capture.remove()
    other = Attention()
    other(x).square().mean().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_layers_that_read_one_tensor_share_one_moment() -> None:
    model = Attention()
    capture = watch(model.q, model.k, model.o)
    for seed in (1, 2):
        model(inputs(5, seed=seed)).sum().backward()
    statistics = capture.collect()
    q, k, o = (statistics[module.weight].inputs for module in (model.q, model.k, model.o))
    assert q is k
    assert q is not o


def test_readers_under_different_masks_do_not_share() -> None:
    model, x = Attention(), torch.randn(4, 5, 6, dtype=torch.float64)
    optimizer = GoMuon(model, routes={"*.weight": "matrix"})
    masks = [torch.rand(4, 5) < share for share in (0.4, 0.7)]
    outputs = []
    for layer, mask in zip((model.q, model.k), masks, strict=True):
        with optimizer.statistics_mask(mask):
            outputs.append(layer(x))
    sum(y.square().sum() for y in outputs).backward()
    found = optimizer._capture.groups[0].collect()
    for layer, mask in zip((model.q, model.k), masks, strict=True):
        moment = found[layer.weight].inputs
        assert moment is not None
        torch.testing.assert_close(moment.total, x[mask].T @ x[mask])
        assert float(moment.count) == int(mask.sum())


def test_micro_batches_with_and_without_a_mask_add_up() -> None:
    model = Attention()
    optimizer = GoMuon(model, routes={"*.weight": "matrix"})
    rows = []
    for number in range(4):
        x, mask = torch.randn(4, 5, 6, dtype=torch.float64), torch.rand(4, 5) < 0.5
        rows.append(x[mask] if number % 2 else x.flatten(0, 1))
        with optimizer.statistics_mask(mask) if number % 2 else nullcontext():
            model(x).square().sum().backward()
    used = torch.cat(rows)
    found = optimizer._capture.groups[0].collect()
    assert found[model.q.weight].inputs is found[model.k.weight].inputs
    for layer in (model.q, model.k):
        for moment in (found[layer.weight].inputs, found[layer.weight].gradients):
            assert moment is not None
            assert float(moment.count) == float(moment.uses) == len(used)
        inputs = found[layer.weight].inputs
        assert inputs is not None
        torch.testing.assert_close(inputs.total, used.T @ used)


def test_sharing_is_exact_when_the_pattern_changes() -> None:
    """Self-attention (q and k read x) and cross-attention (k reads memory) in one step."""
    model, x, memory = Attention(), inputs(5, seed=1), inputs(4, seed=2)
    capture = watch(model.q, model.k)
    for source in (x, memory):
        (model.q(x).sum() + model.k(source).sum()).backward()
    A_q, count_q, _, _ = seen(capture, model.q)
    A_k, count_k, _, _ = seen(capture, model.k)
    torch.testing.assert_close(A_q, 2 * x.T @ x)
    torch.testing.assert_close(A_k, x.T @ x + memory.T @ memory)
    assert (count_q, count_k) == (10, 9)


def test_an_input_written_to_in_place_is_another_input() -> None:
    model, x = Attention(), inputs(5)
    first = x.clone()
    capture = watch(model.q, model.k)
    out = model.q(first).sum()
    out.backward()
    first.mul_(3)
    model.k(first).sum().backward()
    torch.testing.assert_close(seen(capture, model.q)[0], x.T @ x)
    torch.testing.assert_close(seen(capture, model.k)[0], 9 * x.T @ x)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_micro_batches_and_repeated_calls_add_up(pieces: int) -> None:
    model, x = Attention(), inputs(10)
    capture = watch(model.q, model.k, model.o)
    for piece in x.chunk(pieces):
        (model(piece).square().sum() / 30).backward()
    once = Attention()
    whole = watch(once.q, once.k, once.o)
    (once(x).square().sum() / 30).backward()
    for name in ("q", "k", "o"):
        for got, want in zip(
            seen(capture, getattr(model, name)), seen(whole, getattr(once, name)), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_finished_micro_batches_are_folded() -> None:
    """Memory does not grow with the number of micro-batches."""
    model = Attention()
    capture = watch(model.q, model.k, model.o)
    for seed in range(20):
        model(inputs(3, seed=seed)).sum().backward()
    held = [shared for led in capture.shared._inputs_by_leader.values() for shared in led]
    assert len(held) <= 6
    assert seen(capture, model.q)[1] == 60


def test_a_module_called_twice_in_one_pass_counts_twice() -> None:
    model, x = Attention(), inputs(5)
    capture = watch(model.q)
    (model.q(x).sum() + 2 * model.q(x).sum()).backward()
    A, count_A, B, count_B = seen(capture, model.q)
    torch.testing.assert_close(A, 2 * x.T @ x)
    torch.testing.assert_close(B, torch.full_like(B, 5 * 1 + 5 * 4))
    assert (count_A, count_B) == (10, 10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_once(reentrant: bool) -> None:
    model, x = Attention(), inputs(4, 3).requires_grad_()
    capture = watch(model.q, model.k, model.o)
    y = checkpoint(model, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.square().mean().backward()
    A, count_A, B, count_B = seen(capture, model.q)
    by_hand = expected(model, x.detach())["q"]
    torch.testing.assert_close(A, by_hand[0])
    torch.testing.assert_close(B, by_hand[1])
    assert (count_A, count_B) == (12, 12)


def no_grad(model: Attention, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def eval_without_backward(model: Attention, x: Tensor) -> None:
    model.eval()
    model(x)
    model.train()


def gradients_of_inputs(model: Attention, x: Tensor) -> None:
    x.requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def without_backward(model: Attention, x: Tensor) -> None:
    model(x)


def frozen(model: Attention, x: Tensor) -> None:
    for p in model.parameters():
        p.requires_grad_(False)
    model(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    "passing",
    [no_grad, eval_without_backward, without_backward, gradients_of_inputs, frozen],
)
def test_passes_that_are_not_training_leave_no_trace(
    passing: Callable[[Attention, Tensor], None],
) -> None:
    model = Attention()
    capture = watch(model.q, model.k, model.o)
    passing(model, inputs(5))
    assert set(capture.collect().values()) == {Statistics(None, None)}


def test_a_model_in_evaluation_mode_whose_gradients_arrive_is_captured() -> None:
    """As one from `from_pretrained`, or after a validation without a following `train()`."""
    training, evaluating = Attention(), Attention()
    evaluating.load_state_dict(training.state_dict())
    evaluating.eval()
    answers = []
    for model in (training, evaluating):
        capture = watch(model.q, model.k, model.o)
        x = inputs(5)
        model(x).square().sum().backward()
        with torch.no_grad():
            model(x)
        answers.append([seen(capture, layer) for layer in (model.q, model.k, model.o)])
    for ours, theirs in zip(*answers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_statistics_share_the_gradients_fate() -> None:
    """A batch whose gradients are cleared without a step leaves nothing behind."""
    model = transformer()
    optimizer = GoMuon(model)
    language_loss(model, 0).backward()
    optimizer.zero_grad()
    language_loss(model, 1).backward()
    weight = model.get_parameter("trunk.blocks.0.attention.q.weight")
    statistics = optimizer._capture.groups[0].collect()[weight]
    assert statistics.gradients is not None
    assert float(statistics.gradients.count) == 60


def test_backward_inside_autocast_keeps_float32_moments() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 3)
    x = torch.randn(100, 64)
    capture = watch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().sum().backward()
    A = seen(capture, model)[0]
    assert A.dtype == torch.float32
    torch.testing.assert_close(A, x.T @ x, rtol=1e-5, atol=1e-4)


def test_a_model_converted_later_is_captured_in_its_new_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    capture = watch(model)
    model.double()
    x = torch.randn(9, 4, dtype=torch.float64)
    model(x).sum().backward()
    A = seen(capture, model)[0]
    assert A.dtype == torch.float64
    torch.testing.assert_close(A, x.T @ x, rtol=1e-14, atol=0)


def test_reuse_steps_equal_a_model_without_hooks() -> None:
    """The same graph and the same peak memory over forward and backward."""

    def cost(model: nn.Module) -> tuple[int, int]:
        nodes = graph_size(language_loss(model, 7))
        model.zero_grad()
        peak = peak_bytes(lambda: language_loss(model, 7).backward())
        model.zero_grad()
        return nodes, peak

    model = transformer(dtype=torch.float32)
    without = cost(model)
    optimizer = GoMuon(model)
    refresh = cost(model)
    language_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert refresh[0] > without[0], "a refresh step does plant its taps"
    assert refresh[1] > without[1], "and forms its moments"
    assert cost(model) == without


def test_reuse_steps_keep_no_tensor() -> None:
    model = transformer(dtype=torch.float32)

    def tensors() -> list[Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]

    def made_by_a_forward_pass() -> int:
        older = tensors()  # held, so that no new tensor takes the place of one that dies
        known = {id(tensor) for tensor in older}
        loss = language_loss(model, 1)
        made = [tensor for tensor in tensors() if id(tensor) not in known]
        assert any(tensor is loss for tensor in made)
        return len(made)

    without = made_by_a_forward_pass()
    optimizer = GoMuon(model)
    assert made_by_a_forward_pass() > without, "a refresh step does keep its taps"
    language_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert made_by_a_forward_pass() == without


def no_backward(model: nn.Module, x: Tensor) -> None:
    model(x)


def penalty(model: nn.Module, x: Tensor) -> None:
    """A gradient that is looked at and delivered to nobody."""
    torch.autograd.grad(model(x).square().sum(), x)


def penalty_in_checkpoint(model: nn.Module, x: Tensor) -> None:
    y = checkpoint(model, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    torch.autograd.grad(y.square().sum(), x)


def in_vain(model: nn.Module, x: Tensor) -> None:
    """A step that is not taken: its gradients go, and what was captured with them."""
    model(x).square().sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("passing", [no_backward, penalty, penalty_in_checkpoint, in_vain])
@pytest.mark.parametrize("one_input", [True, False])
def test_what_no_backward_pass_delivers_is_not_kept(
    passing: Callable[[nn.Module, Tensor], None], one_input: bool
) -> None:
    """A metric in training mode, a GAN's other net, a loss that is skipped."""
    model, other = Attention(), Attention()
    capture, untouched = (watch(each.q, each.k, each.o) for each in (model, other))
    batch = inputs(5).requires_grad_()

    def after(passes: int) -> int:
        """Tensors alive, without the help of the garbage collector."""
        for seed in range(passes):
            passing(model, batch if one_input else inputs(5, seed=seed).requires_grad_())
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        once = after(1)
        assert after(50) <= once
    finally:
        gc.enable()

    for seed in (1, 2):  # and what is delivered afterwards is as if nothing had been
        for each in (model, other):
            each.zero_grad() if seed == 1 else None
            each(inputs(4, seed=seed)).square().mean().backward()
    for name in ("q", "k", "o"):
        found = seen(capture, getattr(model, name)), seen(untouched, getattr(other, name))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    assert len(capture.shared._by_id) <= 4, "those of the two passes that delivered"


def test_what_is_awaited_is_kept() -> None:
    """All forward passes first, then the backward passes, in another order."""
    model, other = Attention(), Attention()
    capture, one_by_one = (watch(each.q, each.k, each.o) for each in (model, other))
    batches = [inputs(4, seed=seed) for seed in range(3)]
    losses = [model(x).square().mean() for x in batches]
    no_backward(model, inputs(9))
    gc.collect()
    for loss in losses:
        loss.backward()
    for x in batches:
        other(x).square().mean().backward()
    for name in ("q", "k", "o"):
        found = seen(capture, getattr(model, name)), seen(one_by_one, getattr(other, name))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0)


def graph_size(loss: Tensor) -> int:
    """Nodes of the autograd graph behind a loss."""
    todo, nodes = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [following for following, _ in node.next_functions]
    return len(nodes)


def test_hooks_go_with_the_optimizer_or_when_asked() -> None:
    model = mlp(4, 5, 5, 3)

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    optimizer = GoMuon(model)
    assert hooks() == 2  # the last layer is the output head
    optimizer.remove_hooks()
    assert hooks() == 0
    optimizer.attach(model)
    assert hooks() == 2
    del optimizer
    gc.collect()
    assert hooks() == 0


# ---- who forms the moment, and who forgets it ----------------------------------------------------


@pytest.mark.parametrize("reached", ["q", "k"])
def test_a_reader_sees_its_input_though_the_loss_misses_the_other(reached: str) -> None:
    """The first to read a tensor may be a branch the loss does not reach."""
    model = Attention()
    capture = watch(model.q, model.k)
    x = inputs(4)
    outputs = {name: getattr(model, name)(x) for name in ("q", "k")}
    outputs[reached].sum().backward()
    total, count, *_ = seen(capture, getattr(model, reached))
    torch.testing.assert_close(total, x.mT @ x)
    assert count == 4
    missed = model.k if reached == "q" else model.q
    assert capture.collect()[missed.weight] == Statistics(None, None)


def test_two_losses_reach_two_readers_of_one_tensor() -> None:
    model = Attention()
    capture = watch(model.q, model.k)
    x = inputs(4)
    q, k = model.q(x), model.k(x)
    k.sum().backward()
    q.sum().backward()
    for layer in (model.q, model.k):
        total, count, *_ = seen(capture, layer)
        torch.testing.assert_close(total, x.mT @ x)
        assert count == 4
    statistics = capture.collect()
    assert statistics[model.q.weight].inputs is statistics[model.k.weight].inputs


def test_finished_micro_batches_are_folded_under_checkpointing() -> None:
    model = Attention()
    capture = watch(model.q, model.k, model.o)
    for seed in range(20):
        checkpoint(model, inputs(3, seed=seed), use_reentrant=False).sum().backward()
    held = [shared for led in capture.shared._inputs_by_leader.values() for shared in led]
    assert sum(shared.filled for shared in held) <= 4
    assert seen(capture, model.q)[1] == 60


def test_a_reading_that_was_forgotten_takes_no_new_readers() -> None:
    """The same tensor is read again, by the other layer alone, after `zero_grad`."""
    model = Attention()
    capture = watch(model.q, model.k)
    x = inputs(4)
    model.q(x).sum().backward()
    capture.forget_sums()
    model.k(x).sum().backward()
    total, count, *_ = seen(capture, model.k)
    torch.testing.assert_close(total, x.mT @ x)
    assert count == 4


@pytest.mark.parametrize("how", ["model", "hand", "optimizer"])
def test_statistics_go_with_gradients_set_to_none(how: str) -> None:
    """However gradients are set to None, what came with them is gone."""
    model = Attention()
    optimizer = GoMuon(model, routes={"o.weight": "matrix"})
    model(inputs(5, seed=1) * torch.inf).sum().backward()
    if how == "model":
        model.zero_grad()
    elif how == "optimizer":
        optimizer.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = None
    x = inputs(4)
    model(x).sum().backward()
    for layer in (model.q, model.k):
        total, count, *_ = seen(optimizer._capture.groups[0], layer)
        torch.testing.assert_close(total, x.mT @ x)
        assert count == 4
    optimizer.step()
    assert "failures" not in optimizer.state[model.q.weight]


def test_labels_sampled_before_a_second_forward_pass_stay() -> None:
    model = mlp(6, 5, 5, 3)
    optimizer = GoMuon(model)
    weight = model.get_parameter("2.weight")
    logits = [model(inputs(4, seed=seed)) for seed in (0,)]
    optimizer.sample_labels(logits[0])
    (hook,) = optimizer._capture.groups[0]._hooks[weight]
    assert hook.substitute is not None
    logits.append(model(inputs(4, seed=1)))
    assert hook.substitute is not None, "no backward pass has come yet"
    sum(part.sum() for part in logits).backward()
    assert hook.substitute is not None


# ---- modules that are called in other ways -------------------------------------------------------


class Pair(nn.Linear):
    """Returns a tuple, as some adapters do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x), None  # type: ignore[return-value]


class Renamed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_layer_that_returns_a_tuple_is_not_captured() -> None:
    layer = Pair(3, 4)
    capture = watch(layer)
    output, _ = layer(torch.randn(5, 3))
    output.sum().backward()
    assert capture.collect()[layer.weight] == Statistics(None, None)


def test_a_layer_called_by_keyword_is_captured() -> None:
    layer = Renamed(3, 4)
    capture = watch(layer)
    x = torch.randn(5, 3)
    layer(x=x).sum().backward()
    torch.testing.assert_close(seen(capture, layer)[0], x.mT @ x)


def test_functional_gradients_pass_by() -> None:
    model = mlp(6, 5, 3)
    capture = watch(*[m for m in model.modules() if isinstance(m, nn.Linear)])
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters, inputs(4))
    assert found.keys() == parameters.keys()
    assert set(capture.collect().values()) == {Statistics(None, None)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_called_several_times_in_checkpointed_parts(reentrant: bool) -> None:
    """Its gradient comes when the last part is done; its statistics, part by part."""
    layer = nn.Linear(6, 6).double()
    capture = watch(layer)
    x = inputs(15).requires_grad_()
    parts = [checkpoint(layer, part, use_reentrant=reentrant) for part in x.chunk(3)]
    torch.cat(parts).sum().backward()
    statistics = seen(capture, layer)
    torch.testing.assert_close(statistics[0], x.detach().mT @ x.detach())
    assert (statistics[1], statistics[3]) == (15, 15)


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_go_with_gradients_under_checkpointing(reentrant: bool) -> None:
    layer = nn.Linear(6, 6).double()
    capture = watch(layer)
    for rows in (5, 3):
        x = inputs(rows).requires_grad_()
        layer.zero_grad()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert seen(capture, layer)[1] == 3


def test_a_gradient_taken_elsewhere_settles_nothing() -> None:
    """`torch.autograd.grad` passes over the readers and fills none of their sums."""
    model = Attention()
    capture = watch(model.q, model.k)
    x = inputs(4).requires_grad_()
    k, q = model.k(x), model.q(x)
    torch.autograd.grad(q.square().sum(), x, retain_graph=True)
    k.square().sum().backward()
    torch.testing.assert_close(seen(capture, model.k)[0], x.detach().mT @ x.detach())
