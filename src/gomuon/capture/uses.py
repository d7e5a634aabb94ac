"""What a product does with a watched weight: which matrices, and which rows read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gomuon.capture.products import Label, LabelledProduct, Labels
from gomuon.capture.views import View
from gomuon.parameters.product_rows import Arrangement, Piece, ProductRows, Segments
from gomuon.parameters.sampling import Sampling

REST, FIRST, STACK = range(3)  # the axes of a stored weight [stack, first, rest], last one first


class NotLinear(Exception):
    """A product that is not that of a linear layer. The message says why."""


@dataclass(frozen=True)
class WeightUse:
    """A product with matrices of a weight.

    Attributes:
        x: what they read.
        first: the first of these matrices in the stack.
        rows: how to read the rows.
    """

    x: Tensor
    first: int
    rows: ProductRows


@dataclass(frozen=True)
class _Part:
    """A part of a label: `size` steps of `step` coordinates along an axis."""

    label: Label
    place: int  # among the parts of its label
    axis: int
    step: int
    size: int


def use_of(
    product: LabelledProduct,
    result: Tensor,
    view: View,
    *,
    is_left: bool,
    stored: tuple[int, int, int],
    transposed: bool,
    sampling: Sampling,
) -> WeightUse:
    """What a product does with a weight.

    Args:
        product: the product.
        result: its result.
        view: the weight, as it was multiplied.
        is_left: whether the weight is the first factor.
        stored: the sizes of the weight as it is stored, [stack, first, rest].
        transposed: whether it is stored inputs × outputs.
        sampling: which rows enter the moments.

    Raises:
        NotLinear: it is not the product of a linear layer.
    """
    x, x_labels = product.right, product.right_labels
    W, W_labels = product.left, product.left_labels
    if not is_left:
        x, x_labels, W, W_labels = W, W_labels, x, x_labels
    _check_sizes((x, x_labels), (W, W_labels), (result, product.labels))
    sizes = (stored[2], stored[1], stored[0])
    offset = int(view.shadow.storage_offset())
    begin = _coordinates(offset, sizes)
    if view.numbers is not None and product.rows_label is not None:
        raise NotLinear("its matrices are chosen twice")
    rows_label = W_labels[0] if view.numbers is not None else product.rows_label
    parts: list[_Part] = []
    for label, size, stride in zip(W_labels, view.shadow.shape, view.shadow.stride(), strict=True):
        if size > 1 and stride > 0:
            parts += _parts(label, size, stride, begin, sizes)
    chosen = {rows_label, product.stack_label}  # of these each row has its own matrix
    lengths = [_length(parts, axis, begin, sizes) for axis in (REST, FIRST, STACK)]
    own = [part for part in parts if part.label not in chosen]
    outputs, inputs = (REST, FIRST) if transposed else (FIRST, REST)
    _check_roles(own, x_labels, product.labels, outputs, inputs)
    if rows_label is not None and any(p.axis != STACK for p in parts if p.label in chosen):
        raise NotLinear("its matrices are chosen along another dimension")
    in_weight = {part.label for part in own}
    single = {label for label, size in zip(W_labels, W.shape, strict=True) if size == 1}
    positions = [
        label
        for label in product.labels
        if label not in in_weight and (label in x_labels or label not in single)
    ]
    if rows_label is not None and rows_label in positions:
        positions.insert(0, positions.pop(positions.index(rows_label)))
    if any(label not in x_labels for label in positions):
        raise NotLinear("its outputs are repeated")
    segments = None
    if rows_label is not None:
        segments = Segments(lengths[STACK], product.ends, view.numbers)
    ordered = sorted(own, key=lambda part: (-part.axis, -part.step))
    rows = ProductRows(
        _arrangement(x, x_labels, positions, ordered, inputs),
        _arrangement(result, product.labels, positions, ordered, outputs),
        Piece(begin[inputs], sizes[inputs]),
        Piece(begin[outputs], sizes[outputs]),
        lengths[STACK],
        segments,
        sampling,
    )
    return WeightUse(x, begin[STACK], rows)


def _check_sizes(*both: tuple[Tensor, Labels]) -> None:
    sizes: dict[Label, int] = {}
    for tensor, labels in both:
        if len(labels) != tensor.ndim:
            raise NotLinear("it is of a kind that is not known")
        for label, size in zip(labels, tensor.shape, strict=True):
            if sizes.setdefault(label, size) != size:
                raise NotLinear("it repeats one of its factors")


def _coordinates(offset: int, sizes: Sequence[int]) -> list[int]:
    rest = offset % sizes[REST]
    lines = offset // sizes[REST]
    return [rest, lines % sizes[FIRST], lines // sizes[FIRST]]


def _parts(
    label: Label, size: int, stride: int, begin: Sequence[int], sizes: Sequence[int]
) -> list[_Part]:
    """The axes that a dimension of a view runs along: one, or an axis and those below it."""
    units = (1, sizes[REST], sizes[REST] * sizes[FIRST])
    axis = max(axis for axis in (REST, FIRST, STACK) if units[axis] <= stride)
    step, rest = divmod(stride, units[axis])
    found: list[_Part] = []
    place = 0
    while not rest and begin[axis] + (size - 1) * step >= sizes[axis]:
        if axis == STACK or step != 1 or begin[axis] or size % sizes[axis]:
            raise NotLinear("it uses a part of its weight that is no block")
        found.append(_Part(label, place, axis, 1, sizes[axis]))
        size, axis, place = size // sizes[axis], axis + 1, place - 1
    if rest:
        raise NotLinear("it uses a part of its weight that is no block")
    if size > 1 or not found:
        found.append(_Part(label, place, axis, step, size))
    lowest = min(part.place for part in found)
    return [_Part(p.label, p.place - lowest, p.axis, p.step, p.size) for p in found if p.size > 1]


def _length(parts: Sequence[_Part], axis: int, begin: Sequence[int], sizes: Sequence[int]) -> int:
    """How many coordinates of an axis are used; they must be neighbours."""
    length = 1
    for part in sorted((p for p in parts if p.axis == axis), key=lambda part: part.step):
        if part.step != length:
            raise NotLinear("it uses a part of its weight that is no block")
        length *= part.size
    if begin[axis] + length > sizes[axis]:
        raise NotLinear("it uses a part of its weight that is no block")
    return length


def _check_roles(
    parts: Sequence[_Part], of_x: Labels, of_result: Labels, outputs: int, inputs: int
) -> None:
    def fits(outputs: int, inputs: int) -> bool:
        roles = {outputs: (False, True), inputs: (True, False)}
        return all(
            (part.label in of_x, part.label in of_result) == roles[part.axis]
            for part in parts
            if part.axis != STACK
        )

    if not fits(outputs, inputs):
        if fits(inputs, outputs):
            raise NotLinear("turned")
        raise NotLinear("it is not that of a linear layer")
    of_stack = [part.label for part in parts if part.axis == STACK]
    shared = {label in of_x for label in of_stack}
    if len(shared) > 1 or any(label not in of_result for label in of_stack):
        raise NotLinear("it adds up matrices of its stack")


def _arrangement(
    v: Tensor,
    labels: Labels,
    positions: Sequence[Label],
    parts: Sequence[_Part],
    side: int,
) -> Arrangement:
    """How v becomes [positions…, matrices, side]. `parts` are ordered, the largest step first."""
    of_label: Mapping[Label, list[_Part]] = {
        label: sorted((p for p in parts if p.label == label), key=lambda part: part.place)
        for label in labels
    }
    divided = tuple(
        (dim, tuple(part.size for part in of_label[label]))
        for dim, label in reversed(list(enumerate(labels)))
        if len(of_label[label]) > 1 and label not in positions
    )
    places: list[tuple[Label, int]] = [
        (label, place)
        for label in labels
        for place in range(max(1, len(of_label[label]) if label not in positions else 1))
    ]
    first = [(label, 0) for label in positions]
    stack = [(p.label, p.place) for p in parts if p.axis == STACK and p.label in labels]
    own = [(p.label, p.place) for p in parts if p.axis == side and p.label in labels]
    rest = [place for place in places if place not in {*first, *stack, *own}]
    if any(v.shape[labels.index(label)] > 1 for label, _ in rest):
        raise NotLinear("it adds up rows of its input")
    order = tuple(places.index(place) for place in (*first, *stack, *own, *rest))
    return Arrangement(divided, order, len(first), len(stack))
