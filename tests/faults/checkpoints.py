"""A checkpoint damaged or forged, then loaded: refused without a trace, or trained on.

Refused means a ValueError, and the optimizer's state, groups and weights bit for bit as they were,
and as they would have become in training on. Accepted means settings in range and five steps with
finite weights. Numbers made so large that the training overflows are possible, if not wise: there a
step that says so is right too.
"""

import copy
import io
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.errors import DecompositionError, NonFiniteGradientError
from gomuon.optimizer import MatrixOptimizer
from gomuon.settings import ADAMW_DEFAULTS, check_settings
from tests.methods.table import COMMON, RECIPES, make, saved, wrong_values
from tests.models import train, transformer

CASES = 1000

Maker = Callable[[], nn.Module]


class Mixed(nn.Module):
    """Every kind of parameter: grouped convolution, odd matrices, biases, a single number."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, groups=2)
        self.up = nn.Linear(12, width)
        self.across = nn.Linear(width, width)
        self.down = nn.Linear(width, 3)
        self.head = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        for layer in (self.up, self.across, self.down):
            x = torch.tanh(layer(x))
        return self.gain * self.head(x)


def learn(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> None:
    if not isinstance(model, Mixed):
        train(model, optimizer, steps)
        return
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 2, 5, generator=generator).to(model.gain.dtype)
        y = torch.randn(7, 2, generator=generator).to(model.gain.dtype)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


# ---- damages -------------------------------------------------------------------------------------


def garbage(rng: random.Random) -> Any:
    """Of any type."""
    return rng.choice(
        [
            None, True, False, 0, 1, -1, 3, -3, 7, 2.5, 0.0, -0.5, float("nan"), float("inf"),
            10**30, -(10**400), "", "svdd", "matrx", b"bytes", (), [], {}, {"damping": 0.1},
            {"a": {"b": [1, None]}}, [0.9, 0.95], (0.9, "x"), [[1], [2]], 1 + 2j, object(), set(),
            torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(float("nan")), torch.zeros(0),
            torch.tensor(True), torch.tensor(3), torch.randn(2, 3), torch.randn(1, 4, 4),
            torch.empty(2, 2, device="meta"), torch.eye(2).to_sparse(), torch.Size([2]), range(3),
        ]
    )  # fmt: skip


def damaged_tensor(value: Tensor, rng: random.Random) -> Any:
    if value.layout != torch.strided or value.is_meta:
        return garbage(rng)
    value = value.detach().clone()
    flat = value.reshape(-1)
    place = rng.randrange(max(1, flat.numel()))
    ways: list[Callable[[], Any]] = [
        lambda: value.to(rng.choice([torch.int64, torch.bool, torch.complex64, torch.uint8])),
        lambda: value.to(rng.choice([torch.float16, torch.bfloat16, torch.float64])),
        lambda: value.unsqueeze(rng.choice([0, -1])),
        lambda: value.reshape(-1),
        lambda: value.mT if value.ndim >= 2 else value[None],
        lambda: value[..., :-1] if value.ndim else value,
        lambda: value[1:] if value.ndim else value,
        lambda: torch.cat([value, value]) if value.ndim else value,
        lambda: value.sum(),
        lambda: -value,
        lambda: torch.zeros_like(value),
        lambda: torch.full_like(value, rng.choice([1.0, -1.0])),
        lambda: torch.randn(value.shape).to(value),
        lambda: value.to_sparse() if value.ndim else value,
        lambda: value.to("meta"),
        lambda: value.tolist(),
        lambda: float(value.double().sum()),
        lambda: value.requires_grad_() if value.is_floating_point() else value,
        lambda: flat.new_zeros(()).expand(value.shape),
    ]
    if flat.numel() and value.is_floating_point():
        bad = rng.choice([float("nan"), float("inf"), -float("inf")])
        one = flat.index_fill(0, torch.tensor(place), bad).reshape(value.shape)
        ways += [lambda: one, lambda: torch.full_like(value, bad)]
        other = float(flat[place]) * rng.choice([-1.0, 0.0, 1.5, 1e3])
        ways.append(lambda: flat.index_fill(0, torch.tensor(place), other).reshape(value.shape))
    return rng.choice(ways)()


def places(thing: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key at every depth."""
    found = [path] if path else []
    if isinstance(thing, dict):
        keys = list(thing)
    elif isinstance(thing, list):
        keys = list(range(len(thing)))
    else:
        return found
    return found + [place for key in keys for place in places(thing[key], (*path, key))]


def at(thing: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        thing = thing[key]
    return thing


def hurt(checkpoint: dict[str, Any], rng: random.Random) -> None:
    """One key somewhere deleted, replaced, renamed or exchanged for another's value."""
    path = rng.choice(places(checkpoint))
    holder, key = at(checkpoint, path[:-1]), path[-1]
    value = holder[key]
    way = rng.random()
    if way < 0.15:
        del holder[key]
    elif way < 0.25 and isinstance(holder, dict):
        holder[rng.choice(["left_eigen", "velocity", "99", 99, None, "step", "lr"])] = value
    elif way < 0.45:
        other = rng.choice(places(checkpoint))
        elsewhere = at(checkpoint, other[:-1])
        holder[key], elsewhere[other[-1]] = elsewhere[other[-1]], holder[key]
    elif way < 0.8 and isinstance(value, Tensor):
        holder[key] = damaged_tensor(value, rng)
    else:
        holder[key] = garbage(rng)


def hurt_tensors(checkpoint: dict[str, Any], rng: random.Random) -> None:
    """A tensor of the state replaced by a wrong one, or two exchanged."""
    entries = [
        (state, key)
        for state in checkpoint["state"].values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]
    state, key = rng.choice(entries)
    other, other_key = rng.choice(entries)
    if rng.random() < 0.2:
        state[key], other[other_key] = other[other_key], state[key]
    else:
        state[key] = damaged_tensor(state[key], rng)


def hurt_numbers(checkpoint: dict[str, Any], rng: random.Random) -> None:
    """A number of the state or a group, also AdamW's own, replaced."""
    groups = checkpoint["param_groups"]
    holders = [*checkpoint["state"].values(), *groups, *(group["adamw"] for group in groups)]
    holder = rng.choice([holder for holder in holders if holder])
    numbers = [key for key, value in holder.items() if isinstance(value, (int, float))]
    if numbers:
        holder[rng.choice(numbers)] = rng.choice(
            [-1, -3, 7, 0, 1.5, float("nan"), float("inf"), 10**30, True, "1", None, garbage(rng)]
        )


def hurt_settings(checkpoint: dict[str, Any], rng: random.Random) -> None:
    """A value that the constructor refuses."""
    method = checkpoint["method"]
    group = rng.choice(checkpoint["param_groups"])
    wrong = {**wrong_values(method), **COMMON, "treatment": ["matrx", None, 3]}
    name = rng.choice([name for name in wrong if name in group])
    group[name] = rng.choice(wrong[name])


def enlarge(checkpoint: dict[str, Any], rng: random.Random) -> None:
    """A tensor or a setting made huge."""
    size = rng.choice([1e4, 1e10, 1e18, 1e30, 1e300])
    if rng.random() < 0.3:
        group = rng.choice(checkpoint["param_groups"])
        names = [key for key, value in group.items() if isinstance(value, float)]
        group[rng.choice(names)] = size
        return
    entries = [e for e in checkpoint["state"].values() if any(map(torch.is_tensor, e.values()))]
    entry = rng.choice(entries)
    key = rng.choice([key for key, value in entry.items() if isinstance(value, Tensor)])
    entry[key] = entry[key] * size


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A file with a few bits changed, or cut short, or with a hole."""
    way, changed = rng.random(), bytearray(data)
    if way < 0.3:
        return data[: rng.randrange(len(data))]
    if way < 0.4:
        begin = rng.randrange(len(data))
        changed[begin : begin + 64] = bytes(len(changed[begin : begin + 64]))
        return bytes(changed)
    for _ in range(rng.choice([1, 1, 3, 20])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# ---- a case --------------------------------------------------------------------------------------


def case(seed: int, folder: Path) -> str | None:
    """Damage a checkpoint of a method at random and load it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        return _case(random.Random(seed), folder)


def _case(rng: random.Random, folder: Path) -> str | None:
    method, settings = rng.choice(RECIPES)
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])

    def new(width: int = 5) -> nn.Module:
        if method == "MuonQK":
            return transformer(dtype=dtype, layers=1, width=16)
        return Mixed(width, dtype)

    kind = rng.choice(["file", "anywhere", "anywhere", "tensors", "tensors", "numbers", *KINDS])
    source = new(6 if kind == "model" and method != "MuonQK" else 5)
    maker = rng.choice(RECIPES) if kind == "method" and method != "MuonQK" else (method, settings)
    if maker[0] == "MuonQK":
        maker = (method, settings)
    optimizer = make(maker[0], source, **maker[1])
    learn(source, optimizer, range(rng.randrange(1, 6)))
    checkpoint = _damaged(optimizer, kind, rng, folder)
    if checkpoint is _UNREADABLE:
        return None

    model = new()
    victim = make(method, model, **settings)
    learn(model, victim, range(rng.randrange(4)))
    return _look(kind, model, victim, checkpoint)


KINDS = ["settings", "huge", "method", "model", "garbage"]
_UNREADABLE = object()


def _damaged(optimizer: MatrixOptimizer, kind: str, rng: random.Random, folder: Path) -> Any:
    state_dict = optimizer.state_dict()
    if kind == "file":
        file = io.BytesIO()
        torch.save(state_dict, file)
        path = folder / "checkpoint.pt"
        path.write_bytes(flipped(file.getvalue(), rng))
        try:
            return torch.load(path, weights_only=True)
        except Exception:
            return _UNREADABLE  # torch has refused it
    if kind == "garbage":
        return garbage(rng)
    checkpoint: dict[str, Any] = saved(state_dict)
    if kind in ("method", "model") and rng.random() < 0.5:
        del checkpoint["method"]
    hurts = {
        "anywhere": hurt,
        "tensors": hurt_tensors,
        "numbers": hurt_numbers,
        "settings": hurt_settings,
        "huge": enlarge,
    }
    if kind in hurts:
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            with suppress(KeyError, IndexError, TypeError, AttributeError, RuntimeError):
                hurts[kind](checkpoint, rng)  # where no earlier damage is in the way
    return checkpoint


def _look(kind: str, model: nn.Module, victim: MatrixOptimizer, checkpoint: Any) -> str | None:
    twin, other = copy.deepcopy((model, victim))
    before, weights = copy.deepcopy(victim.state_dict()), copy.deepcopy(model.state_dict())
    try:
        victim.load_state_dict(checkpoint)
    except ValueError:
        if not same(victim.state_dict(), before) or not same(model.state_dict(), weights):
            return f"{kind}: refused, but the optimizer has changed"
        learn(model, victim, range(10, 13))
        learn(twin, other, range(10, 13))
        if not same(model.state_dict(), twin.state_dict()):
            return f"{kind}: refused, but training went on otherwise"
        return None
    for group in victim.param_groups:
        check_settings(group, victim.recipe.settings)
        if group["adamw"].keys() != ADAMW_DEFAULTS.keys():
            return f"{kind}: AdamW's settings are {group['adamw']}"
    allowed = any(group["nonfinite"] == "allow" for group in victim.param_groups)
    huge = kind == "huge" or any(map(is_huge, victim.param_groups))
    try:
        learn(model, victim, range(10, 15))
        if huge and not is_finite(model):
            learn(model, victim, range(1))  # sees what the last step did
    except (NonFiniteGradientError, DecompositionError):
        if huge:
            return None
        raise
    if not allowed and not is_finite(model):
        return f"{kind}: accepted, and the weights are not finite"
    return None


def is_huge(group: dict[str, Any]) -> bool:
    values = (*group.values(), *group["adamw"].values())
    return any(isinstance(value, (int, float)) and value > 1e6 for value in values)


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)
