"""Stacks of matrices: three-dimensional parameters of modules that are not torch's own layers.

Transformers keeps the experts of a mixture in such parameters. They are recognised by the
attributes of their module, so that nothing has to be imported.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

# Three-dimensional parameters of these are one matrix each, or one per group.
_NO_STACKS = (nn.modules.conv._ConvNd, nn.Bilinear, nn.utils.parametrize.ParametrizationList)
# Of a module of experts: how many there are. LongCat's has identities beside those with weights.
_NUMBERS = ("num_experts", "num_routed_experts", "total_experts")
# Parameters that read the hidden state, and those that compute it.
_READ_HIDDEN = ("gate_up_proj", "gate_proj", "up_proj")
_COMPUTE_HIDDEN = ("down_proj",)


def expert_weights(module: nn.Module) -> dict[str, bool]:
    """The names of the weights of a module of experts, and whether they are inputs × outputs.

    Empty for any other module, and if nothing says how the module stores its weights.
    """
    numbers = [n for name in _NUMBERS if type(n := getattr(module, name, None)) is int]
    weights = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and len(parameter) in numbers
    }
    transposed = _is_transposed(module, weights)
    return {} if transposed is None else dict.fromkeys(weights, transposed)


def stacked_weights(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Parameters of a module that are stacks of matrices, and whether they are inputs × outputs."""
    if isinstance(module, _NO_STACKS):
        return
    known = expert_weights(module)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3:
            yield parameter, known.get(name, False)


def why_stack(name: str, module: nn.Module, parameter: Tensor) -> str | None:
    """Why a parameter is routed as a stack of matrices; None if nothing says that it is one."""
    leaf = name.rpartition(".")[2]
    return f"{len(parameter)} experts" if leaf in expert_weights(module) else None


def how_to_stack(name: str, module: nn.Module, parameter: Tensor) -> str:
    """For the reason of a parameter that stays AdamW's: how to train it as a stack of matrices."""
    if parameter.ndim != 3 or min(parameter.shape) < 2 or isinstance(module, _NO_STACKS):
        return ""
    if len(parameter) > min(parameter.shape[1:]):  # as XLNet's inputs × heads × size of a head
        return (
            f'; for one matrix with heads pass routes={{{name!r}: "matrix"}} and specs with '
            "LayerSpec(stack=False), with transposed=True if it is inputs × heads × outputs"
        )
    return (
        f'; for a stack of {len(parameter)} matrices pass routes={{{name!r}: "matrix"}} (and '
        "specs with LayerSpec(transposed=True) if they are inputs × outputs)"
    )


def _is_transposed(module: nn.Module, weights: Mapping[str, Tensor]) -> bool | None:
    """Whether a module of experts stores inputs × outputs; None if nothing tells."""
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    found: set[bool] = set()
    sizes = getattr(module, "input_size", None), getattr(module, "output_size", None)
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    for name, parameter in weights.items():
        first, last = parameter.shape[1:]
        if name == "weight" and sizes in ((first, last), (last, first)):
            found.add(first != last and sizes == (first, last))  # square: as torch does
        elif first == last:
            continue
        elif name in _READ_HIDDEN and hidden in (first, last):
            found.add(hidden == first)
        elif name in _COMPUTE_HIDDEN and hidden in (first, last):
            found.add(hidden == last)
    return found.pop() if len(found) == 1 else None
