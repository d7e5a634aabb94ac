"""What the weights of a model read in one forward pass, as the capture would find it.

On the meta device a forward pass costs no memory. Values are not known there, so which expert reads
which row is not either. It does not matter: all experts together read a known number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.functions import FunctionWatch
from gomuon.capture.modules import captured_modules
from gomuon.capture.shared_inputs import SharedInputs
from gomuon.capture.uses import WeightUse
from gomuon.capture.watched import WatchedCut, WatchedWeight
from gomuon.parameters.divided_rows import CapturedRows, DividedRows
from gomuon.parameters.experts import expert_weights
from gomuon.parameters.routing import RECURRENT
from gomuon.parameters.rows import LinearRows, Rows
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.specs import DEFAULT_SPEC, matrix_sides, module_specs, stored_sides


@dataclass(frozen=True)
class InputUse:
    """What a weight read in one forward pass.

    Of a stack of matrices, what all of them read together.

    Attributes:
        what: equal for layers that read the same tensors.
        rows: how many it read.
        examples: how many examples these belong to.
        calls: how often it was called; of a stack, each of its matrices counts.
        copies: how many of these calls read the very same rows, so that their sum is formed once.
        in_sequences: whether examples have positions; otherwise there are rows only, of which
            `token_stride` leaves none out.
    """

    what: Hashable
    rows: int = 1
    examples: int = 1
    calls: int = 1
    copies: int = 1
    in_sequences: bool = True

    def added(self, other: InputUse) -> InputUse:
        """Another product in the same forward pass."""
        return replace(
            self,
            what=(self.what, other.what),
            rows=self.rows + other.rows,
            examples=self.examples + other.examples,
            calls=self.calls + other.calls,
            copies=min(self.copies, other.copies),
            in_sequences=self.in_sequences and other.in_sequences,
        )


InputUses = Mapping[Tensor, InputUse]


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass found.

    Attributes:
        uses: what each weight read; a weight that was never used is left out.
        uncounted: FLOPs of modules that could not run without values, by name.
    """

    uses: dict[Tensor, InputUse]
    uncounted: dict[str, int] = field(default_factory=dict)


def find_input_uses(model: nn.Module, *inputs: Tensor) -> dict[Tensor, InputUse]:
    """Weights and what they read in one forward pass, by identity."""
    return run_forward(model, *inputs).uses


def run_forward(model: nn.Module, *inputs: Tensor) -> ForwardPass:
    """One forward pass, without gradients unless functions multiply with weights."""
    modules, products = _ModuleUses(), _ProductUses(model)
    experts = _ExpertUses(products.found)
    with ExitStack() as stack:
        stack.enter_context(modules.noted(model))
        stack.enter_context(experts.standing_in(model))
        # The capture sees products only where gradients are.
        stack.enter_context(torch.set_grad_enabled(bool(products.watch.weights)))
        stack.enter_context(products.noted(model))
        model(*inputs)
    return ForwardPass({**products.found, **modules.found}, experts.flops)


# ---- layers --------------------------------------------------------------------------------------


class _ModuleUses:
    """What weights of layers read."""

    def __init__(self) -> None:
        self._alive: list[Tensor] = []  # a dead tensor's id may come again
        self._calls: dict[Tensor, list[tuple[int, int]]] = {}
        self._uses: dict[Tensor, tuple[int, int]] = {}
        self._in_rows: set[Tensor] = set()  # weights whose inputs have no positions

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for weight, modules in captured_modules(model, lambda weight: Sampling()).items():
            for watched in modules:
                note = partial(self._note, weight, whole_rows(watched.rows))
                handles.append(watched.module.register_forward_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(
        self,
        weight: Tensor,
        reader: Rows,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        self._alive.append(x)
        self._calls.setdefault(weight, []).append((id(x), x._version))
        rows, examples = self._uses.get(weight, (0, 0))
        reduced = replace(reader, sampling=Sampling(reduce=True))
        self._uses[weight] = rows + reader.uses(output), examples + reduced.uses(output)
        if isinstance(reader, LinearRows) and output.ndim < 3:
            self._in_rows.add(weight)

    @property
    def found(self) -> dict[Tensor, InputUse]:
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        return {
            weight: InputUse(
                numbers.setdefault(tuple(seen), len(numbers)),
                *self._uses[weight],
                len(seen),
                in_sequences=weight not in self._in_rows,
            )
            for weight, seen in self._calls.items()
        }


def whole_rows(rows: CapturedRows) -> Rows:
    """The rows of a layer of a planned model, whose activations are whole."""
    assert not isinstance(rows, DividedRows)
    return rows


# ---- products of functions -----------------------------------------------------------------------


class _ProductUses:
    """What weights read that functions multiply with, such as those of experts."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[Tensor, InputUse] = {}
        alive: list[Tensor] = []  # a dead tensor's id may come again
        self.watch = FunctionWatch(SharedInputs())
        known = captured_modules(model, lambda weight: Sampling())
        specs = module_specs(model, set(), captured=True)
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag, *RECURRENT)):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter in known or parameter.ndim < 2 or not parameter.numel():
                    continue
                spec = specs.get(parameter, DEFAULT_SPEC)
                stored = stored_sides(tuple(parameter.shape), spec)
                sides = matrix_sides(parameter, spec)
                cut = WatchedCut(
                    stored,
                    spec.transposed,
                    spec.tiling(*sides, stored[0]),
                    spec.forms(*sides),
                    Sampling(),
                )
                self.watch.weights[parameter] = _SeenWeight(
                    parameter, cut, True, True, found=self.found, alive=alive
                )

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        self.watch.place(model)
        self.watch.gate(lambda weight: True)
        try:
            yield
        finally:
            self.watch.remove()


@dataclass(eq=False)
class _SeenWeight(WatchedWeight):
    """A weight whose products are noted, not captured."""

    found: dict[Tensor, InputUse] = field(kw_only=True)
    alive: list[Tensor] = field(kw_only=True)

    def begin_pass(self, shared: SharedInputs) -> None:
        pass  # no sums to drop

    def tapped(self, use: WeightUse, result: Tensor, shared: SharedInputs) -> Tensor:
        own, known = self._use(use, result), self.found.get(self.weight)
        self.found[self.weight] = own if known is None else known.added(own)
        return result

    def _use(self, use: WeightUse, result: Tensor) -> InputUse:
        what: Hashable = ("product", id(self.weight))
        number = use.rows.matrices
        if self.stack == 1 and use.rows.segments is None:  # other weights may read it as well
            self.alive.append(use.x)
            what = ("input", id(use.x), use.x._version, use.rows.of_inputs)
        if use.rows.segments is not None:
            # Each row has one of the matrices. Which one is not read: there may be no values.
            rows = len(use.rows.arrange_gradients(result))
            return InputUse(what, rows, rows, number, in_sequences=False)
        examples = replace(use.rows, sampling=Sampling(reduce=True)).uses(result)
        shared = use.rows.arrange_inputs(use.x).shape[-2] == 1
        return InputUse(
            what,
            sum(use.rows.uses(result)),
            sum(examples),
            number,
            copies=number if shared else 1,
            in_sequences=len(use.rows.positions(result)) > 1,
        )


# ---- experts that need values --------------------------------------------------------------------


class _ExpertUses:
    """Stands in for experts that look at values to see which of them read which rows.

    Their module is given the hidden states and, for each of these, the numbers of its experts. It
    returns as many hidden states.
    """

    def __init__(self, found: dict[Tensor, InputUse]) -> None:
        self._found = found
        self.flops: dict[str, int] = {}

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        own: list[nn.Module] = []
        for name, module in model.named_modules():
            weights = [module.get_parameter(leaf) for leaf in expert_weights(module)]
            # Elsewhere experts can run.
            if weights and weights[0].is_meta and "forward" not in vars(module):
                module.forward = partial(self._forward, name, module.forward, weights)
                own.append(module)
        try:
            yield
        finally:
            for module in own:
                del module.forward

    def _forward(
        self,
        name: str,
        real: Callable[..., Any],
        weights: list[nn.Parameter],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = {weight: self._found.get(weight) for weight in weights}
        try:
            return real(*args, **kwargs)
        except Exception:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            hidden = next((one for one in given if one.is_floating_point()), None)
            chosen = next((one for one in given if not one.is_floating_point()), None)
            if hidden is None or chosen is None:
                raise
        rows = chosen.numel()
        for weight in weights:
            own = InputUse(("product", id(weight)), rows, rows, len(weight), in_sequences=False)
            known = before[weight]
            self._found[weight] = own if known is None else known.added(own)
            matrix = weight.numel() // len(weight)
            self.flops[name] = self.flops.get(name, 0) + 2 * rows * matrix
        return torch.zeros_like(hidden)
