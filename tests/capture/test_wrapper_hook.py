"""The hook that looks for a wrapper: it comes and goes with its optimizer and harms no copy."""

import copy
import gc
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gomuon import GoMuon, Muon
from gomuon.capture.hooks import WrapperHook
from gomuon.optimizer import MatrixOptimizer
from tests.models import mlp, train, transformer


def hooks(model: nn.Module) -> list[WrapperHook]:
    return [
        hook
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WrapperHook)
    ]


def found(optimizer: MatrixOptimizer) -> bool:
    return optimizer._teams.wrapper.found


def test_one_hook_that_goes_with_its_optimizer() -> None:
    model = mlp(4, 4, 4)
    optimizer = GoMuon(model)
    assert len(hooks(model)) == 1
    optimizer.attach(model)
    assert len(hooks(model)) == 1
    optimizer.remove_hooks()
    assert hooks(model) == []
    optimizer = GoMuon(model)
    del optimizer
    gc.collect()
    assert hooks(model) == []


def test_a_method_that_captures_nothing_leaves_a_single_process_without_a_hook() -> None:
    model = mlp(4, 4, 4)
    optimizer = Muon(model)
    assert optimizer._teams.wrapper not in hooks(model)


def test_what_only_holds_parts_is_watched_at_its_parts() -> None:
    model = nn.ModuleDict({"one": mlp(4, 4, 4), "two": nn.ModuleList([mlp(4, 4)])})
    optimizer = GoMuon(model)
    assert len(hooks(model)) == 2
    assert hooks(model["one"]) == hooks(model["two"]) == [optimizer._teams.wrapper]


def test_copies_and_pickles_of_the_model_find_nothing_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    train(model, optimizer, range(1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    vars(wrapper)["process_group"] = None
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", wrapper)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        train(copied, Muon(copied), range(1))
        assert found(optimizer) is False
        assert optimizer._teams.wrapper not in hooks(copied)
    train(model, optimizer, range(1))
    assert found(optimizer) is True
    assert found(copy.deepcopy(optimizer)) is True


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_the_compiler_leaves_it_out_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(4, 4, 4)
    optimizer = GoMuon(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(2, 4, dtype=torch.float64)
    compiled(x)
    assert found(optimizer) is False
    torch._dynamo.reset()
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    vars(wrapper)["process_group"] = None
    no_buckets = torch._dynamo.config.patch(optimize_ddp=False)  # this wrapper has none
    with monkeypatch.context() as inside, no_buckets:
        inside.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", wrapper)
        compiled(x)
    assert found(optimizer) is True
    graphs = counters["stats"]["unique_graphs"]
    compiled(x)
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again once it was found"


def test_an_optimizer_pickled_before_one_could_say_how_to_work_shares() -> None:
    model = mlp(4, 4, 4)
    optimizer = Muon(model)
    assert optimizer.defaults["work"] == "auto"
    state = optimizer.__getstate__()
    for holder in (state["defaults"], *state["param_groups"]):
        del holder["work"]
    older = Muon.__new__(Muon)
    older.__setstate__(state)
    assert older.defaults["work"] == "shared"
    older = pickle.loads(pickle.dumps(Muon(model, work="shared")))
    assert older.defaults["work"] == "shared"


def test_a_checkpoint_of_shared_work_is_loaded() -> None:
    model = mlp(4, 4, 4)
    saved = Muon(model, work="shared").state_dict()
    optimizer = Muon(model)
    optimizer.load_state_dict(saved)
    assert optimizer.defaults["work"] == "auto"  # how to work is this run's affair
    for group in saved["param_groups"]:
        del group["work"]
    optimizer.load_state_dict(saved)
