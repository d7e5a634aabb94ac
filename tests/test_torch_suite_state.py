"""What torch's own suite asks of hooks, checkpoints and copies of every optimizer."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gomuon.optimizer import MatrixOptimizer
from tests.torch_suite import EVERY_METHOD, EVERY_WAY, WAYS, assert_equal, problem, problems

# Made of bare parameters, methods that capture say so once; here that is meant.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*given parameters, not a model.*:gomuon.GeometryWarning"),
]


def assert_equal_states(one: MatrixOptimizer, other: MatrixOptimizer) -> None:
    first, second = one.state_dict(), other.state_dict()
    torch.testing.assert_close(first.pop("state"), second.pop("state"), rtol=0, atol=0)
    assert first == second


@EVERY_METHOD
def test_step_hooks(info: Any) -> None:
    """Global and own, before and after, in torch's order, until they are removed."""
    one, called = problem(info), list[str]()

    def note(word: str) -> Any:
        def hook(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert optimizer is one.optimizer
            called.append(word)

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        one.optimizer.register_step_pre_hook(note("before")),
        one.optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    try:
        one.train(1)
        assert called == ["global before", "before", "after", "global after"]
    finally:
        for handle in handles:
            handle.remove()
    one.train(1)
    assert len(called) == 4


@EVERY_METHOD
def test_state_dict_hooks(info: Any) -> None:
    one, called = problem(info), list[str]()
    one.train(1)

    def rewrite(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        called.append("after")
        return {**state_dict, "note": 1}

    optimizer = one.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))
    optimizer.register_state_dict_pre_hook(lambda _: called.append("first"), prepend=True)
    handle = optimizer.register_state_dict_post_hook(rewrite)
    assert optimizer.state_dict()["note"] == 1
    assert called == ["first", "before", "after"]
    handle.remove()
    assert "note" not in optimizer.state_dict()


@EVERY_METHOD
def test_load_state_dict_hooks(info: Any) -> None:
    """What a hook makes of a checkpoint is what is loaded, precision and all."""
    one, called = problem(info), list[str]()
    one.train(2)
    kept = copy.deepcopy(one.optimizer.state_dict())

    def empty(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        called.append("before")
        return {**state_dict, "state": {}}

    optimizer = one.optimizer
    handle = optimizer.register_load_state_dict_pre_hook(empty)
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after"))
    optimizer.load_state_dict(kept)
    assert called == ["first", "before", "after"]
    assert not optimizer.state
    assert kept["state"], "the caller's stays as it is"
    handle.remove()
    optimizer.load_state_dict(kept)
    assert optimizer.state


@EVERY_WAY
def test_a_loaded_optimizer_is_equal(info: Any, bare: bool) -> None:
    """Through a file of tensors and numbers, and then step for step."""
    for one, other in zip(problems(info, bare), problems(info, bare), strict=True):
        one.train(3)
        file = io.BytesIO()
        torch.save(one.optimizer.state_dict(), file)
        file.seek(0)
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(torch.load(file, weights_only=True))
        assert_equal_states(other.optimizer, one.optimizer)
        one.train(3)
        other.train(3)
        assert_equal(one.values(), other.values())


WAYS_AND_NAMES = [
    pytest.param(*way.values, one, other, id=f"{way.id}-{one}-{other}")
    for way in WAYS
    for one in (False, True)
    for other in (False, True)
    if way.values[1] or (one and other)  # a model's parameters have names
]


@pytest.mark.parametrize(("info", "bare", "first", "second"), WAYS_AND_NAMES)
def test_a_state_dict_is_deterministic(info: Any, bare: bool, first: bool, second: bool) -> None:
    """Two optimizers of equal parameters, named or not, one loaded from the other, then alike."""
    for given in info.optim_inputs_func(device="cpu"):
        one = problem(info, bare, named=first, **copy.deepcopy(given.kwargs))
        one.train(10)
        other = problem(info, bare, named=second, **copy.deepcopy(given.kwargs))
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        for _ in range(10):
            one.train(1)
            other.train(1)
            assert_equal(one.values(), other.values())
        for optimizer in (one.optimizer, other.optimizer):
            for group in optimizer.param_groups:
                group.pop("param_names", None)
        assert_equal_states(one.optimizer, other.optimizer)
        # Parameters in two groups have one number.
        other.optimizer.param_groups.extend(other.optimizer.param_groups)
        assert (
            one.optimizer.state_dict()["param_groups"][-1]
            == other.optimizer.state_dict()["param_groups"][-1]
        )


@EVERY_WAY
@pytest.mark.parametrize("number", [float, int])
def test_a_numeric_step_is_loaded(info: Any, bare: bool, number: type[float]) -> None:
    """As torch's optimizers once counted; training goes on as with a tensor."""
    for one, other in zip(problems(info, bare), problems(info, bare), strict=True):
        one.train(3)
        older = copy.deepcopy(one.optimizer.state_dict())
        steps = [entries for entries in older["state"].values() if "step" in entries]
        assert steps or info.name in ("KFAC", "Scion")  # whose parameters may all be matrices
        for entries in steps:
            entries["step"] = number(entries["step"].item())
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(older)
        assert_equal_states(other.optimizer, one.optimizer)
        one.train(3)
        other.train(3)
        assert_equal(one.values(), other.values())


@EVERY_WAY
def test_deepcopy_copies_all_public_attributes(info: Any, bare: bool) -> None:
    for one in problems(info, bare):
        one.train(2)
        twin = copy.deepcopy(one.optimizer)
        public = {name for name in dir(one.optimizer) if not name.startswith("_")}
        assert {name for name in dir(twin) if not name.startswith("_")} == public
        assert_equal_states(twin, one.optimizer)


@EVERY_WAY
def test_an_older_state_dict_is_loaded(info: Any, bare: bool) -> None:
    """Settings it was written without are the optimizer's own."""
    one, other = problem(info, bare), problem(info, bare)
    one.train(3)
    older = copy.deepcopy(one.optimizer.state_dict())
    for group in older["param_groups"]:
        for flag in info.not_og_supported_flags:
            group.pop(flag, None)
    other.model.load_state_dict(one.model.state_dict())
    other.optimizer.load_state_dict(older)
    one.train(5)
    other.train(5)
    assert_equal(one.values(), other.values())


@EVERY_METHOD
def test_an_older_pickle_is_loaded(info: Any) -> None:
    one = problem(info)
    one.train(3)
    state = copy.deepcopy(one.optimizer.__getstate__())
    for holder in (state["defaults"], *state["param_groups"]):
        for flag in info.not_og_supported_flags:
            holder.pop(flag, None)
    optimizer = info.optim_cls.__new__(info.optim_cls)
    optimizer.__setstate__(pickle.loads(pickle.dumps(state)))
    assert_equal_states(optimizer, one.optimizer)
    assert optimizer.defaults.items() >= one.optimizer.defaults.items()


@EVERY_METHOD
def test_names_are_kept(info: Any) -> None:
    one = problem(info)
    names = [group["param_names"] for group in one.optimizer.state_dict()["param_groups"]]
    assert sorted(name for group in names for name in group) == sorted(
        dict(one.model.named_parameters())
    )
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    assert [group["param_names"] for group in one.optimizer.param_groups] == names
