"""A model that is traced, exported or copied while an optimizer's hooks are on it."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gomuon import GoMuon
from gomuon.capture.hooks import LayerHook
from gomuon.moments import Statistics
from tests.models import mlp, train, transformer
from tests.versions import SAYS_THAT_IT_EXPORTS


class Scaled(nn.Linear):
    """A layer of one's own, into which torch.fx looks."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Scaled(8, 8), nn.Tanh(), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 30).reshape(5, 6)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def hooks(model: nn.Module) -> list[int]:
    """How many hooks each module has, where there are any."""
    counts = [len(module._forward_hooks) for module in model.modules()]
    notes = [len(module._forward_hooks_with_kwargs) for module in model.modules()]
    assert counts == notes, "torch keeps a note for each of ours"
    return [count for count in counts if count]


# ---- recorded passes -----------------------------------------------------------------------------

STATES = pytest.mark.parametrize(
    ("training", "is_open"),
    [(False, True), (False, False), (True, True), (True, False)],
    ids=["eval, open", "eval, closed", "training, open", "training, closed"],
)
RECORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "strict export": lambda model: torch.export.export(model, (X,), strict=True).module(),
    "fx": torch.fx.symbolic_trace,
}


def operations(recorded: Any) -> str:
    """The graph, without the numbers torch gives to classes of one name."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(recorded.graph))


@STATES
@pytest.mark.parametrize("how", list(RECORDERS))
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_recorded_model_is_the_model_without_hooks(
    how: str, training: bool, is_open: bool
) -> None:
    if "export" in how and not SAYS_THAT_IT_EXPORTS:
        pytest.skip(f"torch {torch.__version__} does not say that it exports: remove_hooks() first")
    model, plain = net(), net()
    optimizer, other = GoMuon(model), GoMuon(plain)
    for one, its in ((model, optimizer), (plain, other)):
        learn(one, its, 0 if is_open else 1)
        its.zero_grad()
    assert optimizer._capture.groups[0].shared.open is is_open
    other.remove_hooks()
    record = RECORDERS[how]
    recorded = record(model.train(training))
    expected = record(plain.train(training))
    assert operations(recorded) == operations(expected), "nothing of the hooks is in it"
    assert torch.equal(recorded(X), model(X))

    model.train()
    optimizer.zero_grad()
    assert set(optimizer._capture.groups[0].collect().values()) <= {Statistics(None, None)}
    other.attach(plain.train())
    for one, its in ((model, optimizer), (plain, other)):
        learn(one, its, 5)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_script_says_that_the_hooks_must_go_first() -> None:
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    optimizer = GoMuon(model)
    with pytest.raises(AttributeError, match=r"optimizer\.remove_hooks\(\).*optimizer\.attach"):
        torch.jit.script(model)
    optimizer.remove_hooks()
    assert torch.equal(torch.jit.script(model)(X), model(X))
    optimizer.attach(model)
    learn(model, optimizer, 1)
    assert "left_map" in optimizer.state[model.get_parameter("0.weight")]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_script_of_a_copy_works_after_its_first_pass() -> None:
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    optimizer = GoMuon(model)
    twin = copy.deepcopy(model).eval()
    with pytest.raises(AttributeError, match="first forward pass"):
        torch.jit.script(twin)
    y = twin(X)
    assert torch.equal(torch.jit.script(twin)(X), y)
    assert hooks(model) == [1, 1]
    learn(model, optimizer, 1)


def test_a_hook_has_no_name_rather_than_one_that_raises() -> None:
    """Whoever asks with a default, as torch.compile does, is not disturbed."""
    model = mlp(6, 8, 8, 3)
    optimizer = GoMuon(model)
    (hook,) = model[0]._forward_hooks.values()
    assert isinstance(hook, LayerHook)
    assert getattr(hook, "__name__", "none") == "none"
    assert not hasattr(copy.deepcopy(hook), "__name__")
    optimizer.remove_hooks()


# ---- copies --------------------------------------------------------------------------------------


def by_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def test_copies_of_copies_have_one_hook_per_module() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    once = hooks(model)
    assert set(once) == {1}
    for _ in range(10):
        model, optimizer = copy.deepcopy((model, optimizer))
    assert hooks(model) == once
    assert len(model._forward_pre_hooks) == 1  # the one that looks for a wrapper
    train(model, optimizer, range(2))
    assert hooks(model) == once
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
def test_attaching_takes_away_what_was_copied(how: Callable[[Any], Any]) -> None:
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    first = GoMuon(model), GoMuon(model)  # two of them, so two hooks a module
    for _ in range(3):
        model = how(model)
    assert hooks(model) == [2, 2]
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    optimizer = GoMuon(model)
    assert [len(model[i]._forward_hooks) for i in (0, 2)] == [2, 1], "the user's own stays"
    learn(model, optimizer, 1)
    assert len(seen) == 1
    del first


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
def test_a_copy_that_is_run_loses_the_hooks(how: Callable[[Any], Any]) -> None:
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    optimizer = GoMuon(model)
    twin = how(how(model))
    assert hooks(twin) == [1, 1]
    assert torch.equal(twin(X), model(X))
    assert hooks(twin) == []
    assert hooks(model) == [1, 1]
    optimizer.remove_hooks()


def test_a_copy_may_be_compiled_before_it_is_run() -> None:
    torch.compiler.reset()  # of what other tests have compiled
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    optimizer = GoMuon(model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), model(X))
    twin(X)
    assert hooks(twin) == []
    torch.testing.assert_close(compiled(X), model(X))
    optimizer.remove_hooks()
    torch.compiler.reset()


def test_an_unpickled_hook_keeps_its_number_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process torch numbers hooks from zero, and would call one as it called ours."""
    model = mlp(6, 8, 8, 3, dtype=torch.float32)
    optimizer = GoMuon(model)
    data = pickle.dumps(model)
    optimizer.remove_hooks()
    (number,) = pickle.loads(data)[0]._forward_hooks
    monkeypatch.setattr(RemovableHandle, "next_id", number)
    loaded = pickle.loads(data)
    called: list[Tensor] = []
    loaded[0].register_forward_hook(lambda module, args, output: called.append(output))
    loaded(X)
    assert len(called) == 1
