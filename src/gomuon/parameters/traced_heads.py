"""Output heads, found by a forward pass: layers whose outputs reach the model's output.

A dispatch mode follows every tensor by its storage, through all operations: which weights were
multiplied last on the way to it. So layers of other classes, and weights without a module, need
not be known. The pass is one of evaluation, and what it changed in the model is put back.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon.errors import describe_exception, describe_value
from gomuon.parameters.heads import Heads
from gomuon.parameters.rows import own_parameter, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded

# What Transformers' models return beside their outputs.
_NOT_OUTPUTS = ("past_key_values", "hidden_states", "encoder_last", "attentions", "cache")
# Operations that multiply by a weight, by a part of their names.
_PRODUCTS = ("mm", "mv", "linear", "conv", "matmul", "trilinear", "lstm", "gru", "rnn")


@dataclass(frozen=True)
class _Origin:
    """Where a tensor comes from.

    Attributes:
        weights: the weights it is made of, if it is made of nothing else.
        last: the weights that were multiplied last on the way from the model's input.
        is_data: whether it depends on the model's input.
    """

    weights: frozenset[nn.Parameter] = frozenset()
    last: frozenset[nn.Parameter] = frozenset()
    is_data: bool = False


_CONSTANT = _Origin()


class _Follow(TorchDispatchMode):
    """Follows tensors through operations, by storage: views share it, and what is in it."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self._known: dict[StorageWeakRef, _Origin] = {}
        self.before: dict[nn.Parameter, frozenset[nn.Parameter]] = {}  # weights, what came before
        for parameter in model.parameters():
            matrix = frozenset([parameter] if parameter.ndim >= 2 else [])
            self._known[_storage(parameter)] = _Origin(weights=matrix)
        for tensor in tensors_in(inputs):
            self._known[_storage(tensor)] = _Origin(is_data=True)

    def origin(self, tensor: Tensor) -> _Origin:
        """Where a tensor comes from."""
        return self._known.get(_storage(tensor), _CONSTANT)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        operands = [self.origin(tensor) for tensor in tensors_in((args, kwargs))]
        made = self._made_of(operands, multiplies=_multiplies(operation))
        for tensor in tensors_in(result):
            self._known[_storage(tensor)] = made
        return result

    def _made_of(self, operands: list[_Origin], *, multiplies: bool) -> _Origin:
        weights = frozenset[nn.Parameter]().union(*(one.weights for one in operands))
        if not any(one.is_data for one in operands):
            return _Origin(weights=weights)
        last = frozenset[nn.Parameter]().union(*(one.last for one in operands))
        if not (multiplies and weights):
            return _Origin(last=last, is_data=True)
        earlier = last.union(*(self.before.get(weight, frozenset()) for weight in last))
        for weight in weights:
            self.before[weight] = self.before.get(weight, frozenset()) | earlier
        return _Origin(last=weights, is_data=True)


def traced_heads(model: nn.Module, example_input: Any) -> Heads:
    """The linear layers and convolutions whose outputs reach the output past no other matrix.

    Layers that are added up and feed each other are a residual stream: the output of a model
    without a head. None of these is one.

    Args:
        model: the model, without a wrapper.
        example_input: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        ValueError: the model cannot be run on it, or returns no tensor.
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "example_input needs a model whose weights are whole, and this one is sharded; leave "
            'it out, and name the heads with routes={pattern: "adamw"}'
        )
    args, kwargs = _arguments(example_input)
    with unchanged(model), torch.no_grad():
        follow = _Follow(model, example_input)
        try:
            with follow:
                output = model(*args, **kwargs)
        except Exception as failure:
            raise ValueError(
                f"the forward pass on example_input={describe_value(example_input)} failed: "
                f"{describe_exception(failure)}; give what the model is called with: a tensor, a "
                "tuple of positional arguments or a dict of keyword arguments"
            ) from failure
        outputs = [follow.origin(tensor).last for tensor in tensors_in(output)]
    if not outputs:
        raise ValueError(
            f"the forward pass on example_input returned {describe_value(output)}, which has no "
            "tensor; leave example_input out, or give the model that computes the outputs"
        )
    reached = frozenset[nn.Parameter]().union(
        *(last for last in outputs if not _is_residual_stream(last, follow.before))
    )
    layers = {
        module: own_parameter(module, "weight")
        for module in model.modules()
        if rows_for(module, Sampling())
    }
    heads = {module: "reaches the output" for module, w in layers.items() if w in reached}
    return heads if len(heads) < len(layers) else {}  # without others they are the matrices


def _is_residual_stream(
    last: frozenset[nn.Parameter], before: Mapping[nn.Parameter, frozenset[nn.Parameter]]
) -> bool:
    return any(
        one in before.get(other, frozenset()) for one in last for other in last if one is not other
    )


def _multiplies(operation: Any) -> bool:
    name = str(getattr(operation, "_opname", operation))
    return any(part in name for part in _PRODUCTS)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_input, tuple):
        return example_input, {}
    if isinstance(example_input, Mapping):  # also a batch of Transformers' tokenizers
        return (), dict(example_input)
    return (example_input,), {}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments or outputs, without caches and hidden states."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if not (isinstance(key, str) and any(part in key for part in _NOT_OUTPUTS)):
                yield from tensors_in(one)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in({f.name: getattr(value, f.name, None) for f in fields(value)})


# ---- nothing stays changed -----------------------------------------------------------------------


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards modes, buffers, attributes and random numbers are as before."""
    modules = list(model.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    entries = [(m._buffers, dict(m._buffers)) for m in modules]
    values = [(b, b.clone()) for _, own in entries for b in own.values() if b is not None]
    modes = [(module, module.training) for module in modules]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    indices = [device.index for device in devices if device.index is not None]
    try:
        # One call of an encoder's fast path hides its products.
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.random.fork_rng(indices, device_type=kind), _eager(modules):
            for module in modules:
                module.training = False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for own, before in attributes:
            _put_back(own, before)
        for held, saved in entries:
            _put_back(held, saved)
        with torch.no_grad():
            for buffer, value in values:
                if not buffer.is_meta:
                    buffer.copy_(value)
        for module, mode in modes:
            module.training = mode


def _put_back(own: dict[str, Any], before: dict[str, Any]) -> None:
    if own.keys() != before.keys() or any(own[key] is not before[key] for key in before):
        own.clear()
        own.update(before)


def _eager(modules: list[nn.Module]) -> AbstractContextManager[Any]:
    """Compiled parts of the model run as they were written, where operations can be seen."""
    if not any(hasattr(module, "_orig_mod") for module in modules):
        return nullcontext()
    stance: Callable[[str], AbstractContextManager[Any]] = torch.compiler.set_stance
    return stance("force_eager")
