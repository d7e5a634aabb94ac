"""QK-clip on attention modules of one's own: which rows shrink, and by how much."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gomuon import GoMuon, LayerSpec, QKClip

WIDTH, D, LENGTH = 16, 4, 6
GRAPHS = "aot_eager"  # the backend "eager" runs a graph's functions one by one, which shows them
DOUBLE = torch.float64


def rotated(states: Tensor) -> Tensor:
    """Rotary embeddings: pairs of numbers are rotated by an angle that grows with the position."""
    angle = torch.arange(states.shape[-2], dtype=states.dtype)[:, None]
    angle = angle * torch.tensor([1.0, 0.1], dtype=states.dtype)
    one, other = states.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Separate(nn.Module):
    """Query and key layers with biases, rotary embeddings, `groups` key heads for 4 query heads."""

    def __init__(self, key_heads: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 4 * D, bias=bias)
        self.key = nn.Linear(WIDTH, key_heads * D, bias=bias)
        self.value = nn.Linear(WIDTH, key_heads * D, bias=bias)
        self.out = nn.Linear(4 * D, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = [layer(x).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.query, self.key)]
        value = self.value(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return rotated(both[0]), rotated(both[1]), value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def logits(self, x: Tensor) -> Tensor:
        """[examples, heads, l, l] of pairs that take part; −inf elsewhere."""
        query, key, _ = self.heads(x)
        return causal(query @ key.repeat_interleave(4 // key.shape[1], dim=1).mT / math.sqrt(D))


class Fused(nn.Module):
    """One layer for queries, keys and values; attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * 4 * D)
        self.out = nn.Linear(4 * D, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, D)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        scores = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(D))
        seen = torch.ones(x.shape[1], x.shape[1]).tril()
        weights = F.softmax(scores.masked_fill(seen == 0, float("-inf")), dim=-1)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out

    def logits(self, x: Tensor) -> Tensor:
        query, key, _ = self.heads(x)
        return causal(query @ key.mT / math.sqrt(D))


class Interleaved(Fused):
    """Each head's query, key and value lie beside each other; scores by einsum, in place."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (4, 3, D)).permute(3, 0, 2, 1, 4)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        scores = torch.einsum("bhid,bhjd->bhij", query, key)
        scores /= math.sqrt(D)
        scores += torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype).triu(1)
        out: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return out


class Broadcast(Separate):
    """One key head for all, written out: `matmul` repeats it."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        scores = causal(query @ key.mT / math.sqrt(D))
        out: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return out


class Biased(Fused):
    """A bias of positions is added in the product, as in Bloom; examples and heads are one."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (states.flatten(0, 1) for states in self.heads(x))
        bias = torch.arange(x.shape[1], dtype=x.dtype).expand(len(query), 1, -1)
        scores = bias.baddbmm(batch1=query, batch2=key.mT, beta=1.0, alpha=1 / math.sqrt(D))
        mixed = causal(scores).softmax(-1) @ value
        out: Tensor = self.out(mixed.unflatten(0, (len(x), 4)).transpose(1, 2).flatten(2))
        return out


class Stacked(Fused):
    """The three weights are a stack, used without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(self.qkv.weight.detach().clone().view(3, 4 * D, WIDTH))
        del self.qkv

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            F.linear(x, weight).unflatten(-1, (4, D)).transpose(1, 2) for weight in self.stack
        )
        return query, key, value


class Torchs(nn.Module):
    """nn.MultiheadAttention, whose positions come before examples inside."""

    def __init__(self, *, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return out

    def logits(self, x: Tensor) -> Tensor:
        packed = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)
        query, key, _ = packed.unflatten(-1, (3, 4, D)).permute(2, 0, 3, 1, 4)
        return query @ key.mT / math.sqrt(D)


def causal(logits: Tensor) -> Tensor:
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return logits.masked_fill(~seen, float("-inf"))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "rotary": Separate,
    "rotary, without biases": lambda: Separate(bias=False),
    "grouped": lambda: Separate(2),
    "one key head": lambda: Separate(1),
    "fused": Fused,
    "interleaved": Interleaved,
    "one key head, written out": Broadcast,
    "biased": Biased,
    "stacked": Stacked,
    "torch's": Torchs,
    "torch's, with weights": lambda: Torchs(need_weights=True),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = MODULES[name]().to(DOUBLE)
    for parameter in model.parameters():
        parameter.data *= 3
    return model, torch.randn(3, LENGTH, WIDTH, dtype=DOUBLE)


def maxima(model: nn.Module, x: Tensor) -> Tensor:
    """[heads]: the largest logits, from the weights."""
    with torch.no_grad():
        largest: Tensor = model.logits(x).amax((0, 2, 3))  # type: ignore[operator]
    return largest


def standing(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, so that only the clip does."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def pass_and_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", MODULES)
def test_logits_above_the_threshold_are_at_it_and_all_others_as_they_were(name: str) -> None:
    model, x = made(name)
    optimizer = standing(model)
    before, S = copy.deepcopy(model.state_dict()), maxima(model, x)
    threshold = float(S.sort().values[1:3].mean())  # two heads above, two below
    clip = QKClip(optimizer, model, threshold)
    pass_and_step(model, x, optimizer)
    (found,) = clip.largest_logits().values()
    torch.testing.assert_close(found, S, rtol=1e-12, atol=0)
    above = threshold < S
    assert above.sum() == 2
    torch.testing.assert_close(maxima(model, x), S.clamp(max=threshold), rtol=1e-12, atol=0)
    untouched = model.state_dict()
    for key in before:
        if key.startswith(("value", "out", "attention.out")):
            assert torch.equal(before[key], untouched[key]), key
    with torch.no_grad():  # bit for bit: heads below have the logits they had
        after = model.logits(x)[:, ~above]  # type: ignore[operator]
        model.load_state_dict(before)
        assert torch.equal(after, model.logits(x)[:, ~above])  # type: ignore[operator]


def test_queries_and_keys_share_the_factor_evenly() -> None:
    model, x = made("rotary")
    assert isinstance(model, Separate)
    before, optimizer = copy.deepcopy(model), standing(model)
    S = maxima(model, x)
    QKClip(optimizer, model, float(S.min()) / 2)
    pass_and_step(model, x, optimizer)
    gamma = (float(S.min()) / 2 / S).repeat_interleave(D)
    for layer, old in ((model.query, before.query), (model.key, before.key)):
        wanted = old.weight * gamma.sqrt()[:, None], old.bias * gamma.sqrt()
        torch.testing.assert_close((layer.weight, layer.bias), wanted, rtol=1e-14, atol=0)


def test_a_key_that_heads_share_is_left_alone() -> None:
    model, x = made("grouped")
    assert isinstance(model, Separate)
    before, optimizer = copy.deepcopy(model), standing(model)
    S = maxima(model, x)
    QKClip(optimizer, model, float(S.min()) / 2)
    pass_and_step(model, x, optimizer)
    assert torch.equal(model.key.weight, before.key.weight)
    assert torch.equal(model.key.bias, before.key.bias)
    wanted = before.query.weight * (float(S.min()) / 2 / S).repeat_interleave(D)[:, None]
    torch.testing.assert_close(model.query.weight, wanted.detach(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("frozen", "moves"), [("key", "query"), ("query", "key")])
def test_what_is_not_trained_is_not_rescaled(frozen: str, moves: str) -> None:
    model, x = made("rotary")
    getattr(model, frozen).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    S = maxima(model, x)
    threshold = float(S.min()) / 2
    QKClip(optimizer, model, threshold)
    pass_and_step(model, x, optimizer)
    after = model.state_dict()
    assert torch.equal(before[f"{frozen}.weight"], after[f"{frozen}.weight"])
    assert not torch.equal(before[f"{moves}.weight"], after[f"{moves}.weight"])
    wanted = torch.full_like(S, threshold)
    torch.testing.assert_close(maxima(model, x), wanted, rtol=1e-12, atol=0)


def test_micro_batches_count_together_and_evaluation_does_not() -> None:
    model, x = made("rotary")
    optimizer = standing(model)
    clip = QKClip(optimizer, model, 1e6)
    for part in x.split(1):
        model(part).square().mean().backward()
    with torch.no_grad():
        model(100 * x)
    optimizer.step()
    (found,) = clip.largest_logits().values()
    torch.testing.assert_close(found, maxima(model, x), rtol=1e-12, atol=0)
    model(x[:1]).square().mean().backward()  # the next step knows nothing of the last one
    optimizer.step()
    (found,) = clip.largest_logits().values()
    torch.testing.assert_close(found, maxima(model, x[:1]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)
            return out

    model, x = made("rotary")
    plain = copy.deepcopy(model)
    S = maxima(model, x)
    for one in (plain, Checkpointed(model)):
        optimizer = standing(one)
        QKClip(optimizer, one, float(S.min()) / 2)
        for _ in range(2):
            pass_and_step(one, x, optimizer)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_several_attentions_of_one_parent_are_told_apart() -> None:
    class Two(nn.Module):
        """All projections first, then both attentions."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * D) for _ in range(4))

        def heads(self, x: Tensor) -> list[Tensor]:
            return [one(x).unflatten(-1, (2, D)).transpose(1, 2) for one in self.layers]

        def forward(self, x: Tensor) -> Tensor:
            q1, k1, q2, k2 = self.heads(x)
            one = F.scaled_dot_product_attention(q1, k1, q1)
            return one - F.scaled_dot_product_attention(q2, k2, q2)

    torch.manual_seed(0)
    model, x = Two().to(DOUBLE), torch.randn(3, LENGTH, WIDTH, dtype=DOUBLE)
    optimizer = standing(model)
    clip = QKClip(optimizer, model, 1e6)
    for _ in range(2):
        pass_and_step(model, x, optimizer)
        with torch.no_grad():
            q1, k1, q2, k2 = model.heads(x)
        for name, query, key in (("0", q1, k1), ("2", q2, k2)):
            S = (query @ key.mT / math.sqrt(D)).amax((0, 2, 3))
            torch.testing.assert_close(clip.largest_logits()[f"layers.{name}.weight"], S)


# ---- beside Go-MUON ------------------------------------------------------------------------------


class Network(nn.Module):
    """An attention between an embedding and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(29, WIDTH)
        self.attention = attention
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        out: Tensor = self.head(hidden + self.attention(hidden))
        return out


HEADS: dict[str, dict[str, Any]] = {
    "fused": {"specs": {"attention.qkv.weight": LayerSpec(parts=3, heads=4)}},
    "stacked": {
        "routes": {"attention.stack": "matrix"},
        "specs": {"attention.stack": LayerSpec(heads=4)},
    },
    "rotary": {"specs": {"attention.[qk]*.weight": LayerSpec(heads=4)}},
    "torch's": {"specs": {"*.in_proj_weight": LayerSpec(parts=3, heads=4)}},
}


def trained(
    steps: int, threshold: float | None, *, name: str = "fused", resume_at: int | None = None
) -> Network:
    """Go-MUON with a matrix for each head, perhaps saved and loaded on the way."""

    def fresh() -> tuple[Network, GoMuon]:
        torch.manual_seed(0)
        model = Network(MODULES[name]()).to(DOUBLE)
        return model, GoMuon(model, lr=0.3, refresh_every=2, **HEADS[name])

    model, optimizer = fresh()
    clip = None if threshold is None else QKClip(optimizer, model, threshold)
    for step in range(steps):
        if step == resume_at:
            saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
            if clip is not None:
                clip.remove()
            model, optimizer = fresh()
            weights, state = pickle.loads(saved)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            clip = None if threshold is None else QKClip(optimizer, model, threshold)
        x = torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()).backward()
        optimizer.step()
    return model


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    whole, resumed = trained(7, 2.0), trained(7, 2.0, resume_at=3)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", HEADS)
def test_training_with_go_muon_is_clipped(name: str) -> None:
    largest = []
    for threshold in (None, 2.0):
        model = trained(7, threshold, name=name)
        largest.append(maxima(model.attention, model.tokens(torch.arange(29).view(1, -1))).max())
    assert largest[0] > 2 * largest[1]


@pytest.mark.parametrize("name", HEADS)
def test_a_threshold_that_is_never_reached_changes_no_bit(name: str) -> None:
    """Neither weights nor what is captured, also of weights that functions multiply with."""
    plain, watched = trained(5, None, name=name), trained(5, 1e9, name=name)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_momentum_and_maps_are_not_touched() -> None:
    torch.manual_seed(0)
    attention = Fused()
    model = Network(attention).to(DOUBLE)
    optimizer = GoMuon(model, lr=0.3)
    before: list[Any] = []

    def note(*_: Any) -> None:  # after the step, and before the clip
        weight = attention.qkv.weight.detach().clone()
        before.append((weight, copy.deepcopy(optimizer.state_dict()["state"])))

    optimizer.register_step_post_hook(note)
    QKClip(optimizer, model, 1e-3)
    x = torch.randint(0, 29, (4, 8))
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    ((weight, state),) = before
    assert not torch.equal(weight, attention.qkv.weight)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


# ---- what it costs, and how it ends --------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_without_it_there_is_nothing_and_removing_it_leaves_nothing() -> None:
    model, x = made("rotary")
    optimizer = standing(model)
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    clip = QKClip(optimizer, model, 1e-3)
    assert hooks(model) > 0
    assert len(optimizer._optimizer_step_post_hooks) == 1
    clip.remove()
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    before = copy.deepcopy(model.state_dict())
    pass_and_step(model, x, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_no_mode_is_left_behind_even_if_the_forward_pass_raises() -> None:
    model, x = made("rotary")
    QKClip(standing(model), model)
    depth = torch.overrides._len_torch_function_stack()
    model(x)
    assert torch.overrides._len_torch_function_stack() == depth
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(x[..., 1:])
    assert torch.overrides._len_torch_function_stack() == depth


def test_a_copied_model_has_no_hooks_of_the_clip() -> None:
    model, x = made("rotary")
    QKClip(standing(model), model)
    copied = copy.deepcopy(model)
    copied(x)
    assert hooks(copied) == 0


# ---- errors --------------------------------------------------------------------------------------


class Normalised(Separate):
    """Queries and keys are normalised, as in Qwen3."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return F.normalize(query, dim=-1), F.normalize(key, dim=-1), value


class Adapted(Separate):
    """The query's layer has an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, 4 * D)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        added = self.up(self.down(x)).unflatten(-1, (4, D)).transpose(1, 2)
        return query + rotated(added), key, value


class Capped(Fused):
    """Logits go through a tanh."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        scores = 50 * torch.tanh(query @ key.mT / 50)
        out: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return out


class Computed(Fused):
    """The bias is made of others, as in timm's BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4 * D))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = torch.cat([self.bias, torch.zeros_like(self.bias), self.bias])
        packed = F.linear(x, self.qkv.weight, bias)
        query, key, value = packed.unflatten(-1, (3, 4, D)).permute(2, 0, 3, 1, 4)
        return query, key, value


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Normalised, "its queries are not the outputs of one linear layer.*normalised"),
        (Adapted, "its queries are not the outputs of one linear layer.*adapters"),
        (Capped, "logits of the attention of 'qkv.weight': 'tanh' changes them before"),
        (Computed, "'qkv.weight'.*the bias of its layer is computed"),
    ],
)
def test_an_attention_that_cannot_be_rescaled_is_an_error(
    module: Callable[[], nn.Module], said: str
) -> None:
    torch.manual_seed(0)
    model = module()
    QKClip(standing(model), model)
    with pytest.raises(ValueError, match=f"(?s)QK-clip cannot.*{said}"):
        model(torch.randn(3, LENGTH, WIDTH))


def test_a_model_whose_attention_is_not_seen_is_an_error() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = standing(model)
    QKClip(optimizer, model)
    with pytest.raises(RuntimeError, match=r"(?s)saw no attention.*torch\.compile"):
        pass_and_step(model, torch.randn(3, WIDTH), optimizer)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_model_that_is_compiled_as_a_whole_is_an_error() -> None:
    torch.manual_seed(0)
    model, x = Separate(), torch.randn(3, LENGTH, WIDTH)
    optimizer = standing(model)
    QKClip(optimizer, model)
    compiled = torch.compile(model, backend=GRAPHS)
    with pytest.raises(RuntimeError, match=r"(?s)saw no attention.*torch\.compile"):
        pass_and_step(compiled, x, optimizer)  # type: ignore[arg-type]


class PlainAttention(Separate):
    """Of operations that go into one graph."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            layer(x).view(*x.shape[:2], 4, D).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return query, key, value


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_parts_with_attention_are_an_error() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(PlainAttention(), PlainAttention()), torch.randn(3, LENGTH, WIDTH)
    for part in model:
        part.compile(backend=GRAPHS, fullgraph=True)
    optimizer = standing(model)
    QKClip(optimizer, model)
    with pytest.raises(RuntimeError, match=r"(?s)saw no attention.*torch\.compile"):
        pass_and_step(model, x, optimizer)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_part_beside_eager_attention_is_named() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(PlainAttention(), PlainAttention()), torch.randn(3, LENGTH, WIDTH)
    model[1].compile(backend=GRAPHS, fullgraph=True)
    optimizer = standing(model)
    clip = QKClip(optimizer, model)
    with pytest.warns(UserWarning, match="saw no attention of '1', so its logits are not clipped"):
        pass_and_step(model, x, optimizer)
    assert list(clip.largest_logits()) == ["0.query.weight"]


@pytest.mark.usefixtures("_fresh_compiler")
def test_projections_in_a_graph_and_attention_outside_are_an_error() -> None:
    torch.manual_seed(0)
    model = PlainAttention()
    model.heads = torch.compile(model.heads, backend=GRAPHS)  # type: ignore[method-assign]
    QKClip(standing(model), model)
    with pytest.raises(ValueError, match=r"(?s)near no linear layer.*graphs of torch\.compile"):
        model(torch.randn(3, LENGTH, WIDTH))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_parts_without_attention_change_nothing() -> None:
    model, x = made("rotary")
    mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)).to(DOUBLE)
    outer = nn.Sequential(nn.Identity(), model, mlp)
    mlp.compile(backend=GRAPHS, fullgraph=True)
    optimizer, S = standing(outer), maxima(model, x)
    clip = QKClip(optimizer, outer, float(S.min()) / 2)
    for wanted in (S, torch.full_like(S, float(S.min()) / 2)):
        pass_and_step(outer, x, optimizer)
        (found,) = clip.largest_logits().values()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_attention_that_is_not_seen_beside_others_is_named() -> None:
    class HiddenAttention(Fused):
        """One operation, as a kernel of FlashAttention."""

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(_Hidden.apply(*self.heads(x)).transpose(1, 2).flatten(2))
            return out

    torch.manual_seed(0)
    model, x = nn.Sequential(Separate(), HiddenAttention()), torch.randn(3, LENGTH, WIDTH)
    optimizer = standing(model)
    clip = QKClip(optimizer, model)
    with pytest.warns(UserWarning, match="saw no attention of '1', so its logits are not clipped"):
        pass_and_step(model, x, optimizer)
    assert list(clip.largest_logits()) == ["0.query.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pass_and_step(model, x, optimizer)  # once


class _Hidden(torch.autograd.Function):
    """An operation that shows nothing of what is inside."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key + value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradient, gradient, gradient


def test_queries_of_zeros_are_told_later() -> None:
    model, x = made("rotary")
    assert isinstance(model, Separate)
    saved = copy.deepcopy(model.state_dict())
    nn.init.zeros_(model.query.weight)
    nn.init.zeros_(model.query.bias)
    optimizer = standing(model)
    clip = QKClip(optimizer, model, 1e-3)
    pass_and_step(model, x, optimizer)
    assert clip.largest_logits() == {}
    model.load_state_dict(saved)
    S = maxima(model, x)
    pass_and_step(model, x, optimizer)
    torch.testing.assert_close(clip.largest_logits()["query.weight"], S, rtol=1e-12, atol=0)


def test_wrong_arguments_are_named() -> None:
    model = Separate()
    optimizer = standing(model)
    with pytest.raises(TypeError, match="takes an optimizer and its model, got Separate and SGD"):
        QKClip(model, optimizer)  # type: ignore[arg-type]
    for threshold in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="threshold must be a finite number > 0"):
            QKClip(optimizer, model, threshold)
    with pytest.raises(TypeError, match="threshold must be a number > 0, got '100'"):
        QKClip(optimizer, model, "100")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter of this model"):
        QKClip(optimizer, Separate())
    with pytest.raises(ValueError, match="process_group must be"):
        QKClip(optimizer, model, process_group=2)
    assert hooks(model) == 0
