"""A module's inputs and output gradients as rows x and δ, one row for each use of the weight."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from gomuon.functional.block_diagonal import block_moments, diagonal_moments
from gomuon.functional.linalg import Multiply, symmetric_product, working_dtype
from gomuon.functional.widening_products import has_widening_product, widening_product
from gomuon.moments import Shape
from gomuon.parameters.patches import all_patches, patches_at
from gomuon.parameters.sampling import ALL_ROWS, Sampling
from gomuon.parameters.side_forms import SideForm


@dataclass(frozen=True)
class LinearRows:
    """y = Wx over the last dimension. Dimensions between the first and the last are positions."""

    sampling: Sampling = ALL_ROWS

    def inputs(self, x: Tensor) -> Tensor:
        """[batch, positions…, n] -> [N, n]."""
        rows = self._rows(x, average=True)
        return F.pad(rows, (0, 1), value=1.0) if self.sampling.ones else rows

    def gradients(self, g: Tensor) -> Tensor:
        """[batch, positions…, m] -> [N, m]."""
        return self._rows(g, average=False)

    def uses(self, g: Tensor) -> int:
        """The number of rows the weight was applied to, before sampling."""
        return len(g) if self.sampling.reduce and g.ndim > 2 else g.numel() // g.shape[-1]

    def sampled(self, g: Tensor) -> int:
        """The number of rows of `gradients(g)`."""
        if self.sampling.takes_all:
            return g.numel() // g.shape[-1]
        if g.ndim > 2:
            return self.sampling.number(len(g), g.shape[1:-1])
        rows, limit = g.numel() // g.shape[-1], self.sampling.rows
        return rows if limit is None else min(rows, limit)

    def positions(self, y: Tensor) -> tuple[int, ...]:
        """The shape of y without its channels: one row per position."""
        return y.shape[:-1]

    def mask_rows(self, mask: Tensor) -> Tensor:
        """A mask over the positions -> [N, 1]."""
        return self._rows(mask.unsqueeze(-1), average=False)

    def fits_output(self, y: Tensor, moment: tuple[int, ...]) -> bool:
        """Whether y has rows for a moment of this shape."""
        return y.shape[-1:] == moment[-1:]

    def fits_input(self, x: Tensor, y: Tensor, moment: tuple[int, ...]) -> bool:
        """Whether x has rows for a moment of this shape, and as many rows as y."""
        width = moment[-1] - self.sampling.ones
        if x.shape[-1:] != (width,):
            return False
        same_number = x.numel() * y.shape[-1] == y.numel() * width
        # Rows chosen by number are the same ones in x and y, however these are laid out.
        return x.shape[:-1] == y.shape[:-1] or (not self.sampling.has_positions and same_number)

    def _rows(self, v: Tensor, *, average: bool) -> Tensor:
        sampling = self.sampling
        if sampling.takes_all:
            return v.reshape(-1, v.shape[-1])
        if v.ndim < 3 or (v.is_contiguous() and not sampling.has_positions):
            return sampling.bounded(v.reshape(-1, v.shape[-1]))
        positions = v.shape[1:-1]
        if sampling.reduce:
            v = sampling.bounded(v)
        elif sampling.exceeded_by(len(v), positions):
            example, position = sampling.places(len(v), positions, v.device)
            return v[(example, *position)]
        v = v.flatten(1, -2)
        if sampling.stride > 1 or sampling.skip:
            v = v[:, sampling.skip :: sampling.stride]
        if sampling.reduce and v.shape[1]:  # without positions there is no row
            v = v.mean(1) if average else v.sum(1)
        return v.reshape(-1, v.shape[-1])


@dataclass(frozen=True)
class ConvRows:
    """A convolution as in K-FAC: a linear map of unfolded patches, one per output position.

    Grouped convolutions have one matrix per group: rows are [groups, N, …].
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    sampling: Sampling = ALL_ROWS

    def inputs(self, x: Tensor) -> Tensor:
        """[batch, channels, space…] -> [N, channels·kernel], or [groups, N, …]."""
        x, sampling = self._batched(x), self.sampling
        layout = self.kernel, self.stride, self.padding, self.dilation
        space = self._convolved(x.shape[2:])
        if not sampling.reduce and (sampling.has_positions or sampling.exceeded_by(len(x), space)):
            example, position = sampling.places(len(x), space, x.device)
            rows = self._by_group(patches_at(x, example, position, *layout).flatten(1))
        else:
            x = sampling.bounded(x) if sampling.reduce else x
            patches = all_patches(x, *layout).unflatten(2, (self.groups, -1))
            # [batch, positions, groups, channels, kernel…] -> [batch, groups, positions, patch]
            patches = patches.transpose(1, 2).flatten(3).contiguous()
            rows = self._rows(patches, average=True)
        return F.pad(rows, (0, 1), value=1.0) if sampling.ones else rows

    def gradients(self, g: Tensor) -> Tensor:
        """[batch, channels, space…] -> [N, channels], or [groups, N, …]."""
        g, sampling = self._batched(g), self.sampling
        if sampling.reduce:
            g = sampling.bounded(g)
        elif sampling.exceeded_by(len(g), g.shape[2:]):
            example, position = sampling.places(len(g), g.shape[2:], g.device)
            return self._by_group(g.movedim(1, -1)[(example, *position)])
        batch, channels = g.shape[:2]
        positions = math.prod(g.shape[2:])
        g = g.reshape(batch, self.groups, channels // self.groups, positions).mT
        return self._rows(g, average=False)

    def uses(self, g: Tensor) -> int:
        """The number of rows the weight was applied to, before sampling."""
        g = self._batched(g)
        return len(g) if self.sampling.reduce else g.numel() // g.shape[1]

    def sampled(self, g: Tensor) -> int:
        """The number of rows of `gradients(g)`."""
        g = self._batched(g)
        return self.sampling.number(len(g), g.shape[2:])

    def positions(self, y: Tensor) -> tuple[int, ...]:
        """The shape of y without its channels: one row per position."""
        dims = len(self.kernel)
        return (*y.shape[: -dims - 1], *y.shape[-dims:])

    def mask_rows(self, mask: Tensor) -> Tensor:
        """A mask over the positions -> [N, 1]."""
        mask = mask if mask.ndim > len(self.kernel) else mask.unsqueeze(0)
        if self.sampling.exceeded_by(len(mask), mask.shape[1:]):
            example, position = self.sampling.places(len(mask), mask.shape[1:], mask.device)
            return mask[(example, *position)].unsqueeze(-1)
        mask = mask.flatten(1)
        return mask[:, self.sampling.skip :: self.sampling.stride].reshape(-1, 1)

    def fits_output(self, y: Tensor, moment: tuple[int, ...]) -> bool:
        """Whether y has rows for a moment of this shape."""
        dims, channels = len(self.kernel), moment[-1] * self.groups
        batched = y.ndim == dims + 2
        return (batched or y.ndim == dims + 1) and y.shape[batched] == channels

    def fits_input(self, x: Tensor, y: Tensor, moment: tuple[int, ...]) -> bool:
        """Whether x has rows for a moment of this shape, and as many rows as y."""
        channels = (moment[-1] - self.sampling.ones) // math.prod(self.kernel) * self.groups
        batched = int(y.ndim == len(self.kernel) + 2)
        if x.ndim != y.ndim or x.shape[batched] != channels:
            return False
        return (*x.shape[:batched], *self._convolved(x.shape[batched + 1 :])) == self.positions(y)

    def _convolved(self, space: tuple[int, ...]) -> list[int]:
        """The number of output positions along each dimension."""
        sizes = zip(space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [
            (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in sizes
        ]

    def _batched(self, v: Tensor) -> Tensor:
        return v if v.ndim == len(self.kernel) + 2 else v.unsqueeze(0)

    def _by_group(self, rows: Tensor) -> Tensor:
        """[N, channels…] -> [N, …], or [groups, N, …]."""
        if self.groups == 1:
            return rows
        return rows.unflatten(1, (self.groups, -1)).movedim(1, 0).contiguous()

    def _rows(self, v: Tensor, *, average: bool) -> Tensor:
        """[batch, groups, positions, d] -> [N, d] or [groups, N, d]."""
        if self.sampling.stride > 1 or self.sampling.skip:
            v = v[:, :, self.sampling.skip :: self.sampling.stride]
        if self.sampling.reduce and v.shape[2]:
            v = (v.mean(2) if average else v.sum(2)).unsqueeze(2)
        rows = v.movedim(1, 0).flatten(1, 2)
        return rows if self.groups > 1 else rows[0]


Rows = LinearRows | ConvRows
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def rows_for(module: nn.Module, sampling: Sampling) -> Rows | None:
    """How to read the rows of a module; None if the module cannot be captured."""
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return LinearRows(sampling)
    if isinstance(module, Convolution) and module.padding_mode == "zeros":
        return ConvRows(
            tuple(module.kernel_size),
            tuple(module.stride),
            _padding(module),
            tuple(module.dilation),
            module.groups,
            sampling,
        )
    return None


def can_capture(v: Tensor, device: torch.device) -> bool:
    """Whether a moment of v can be formed: v is dense, real and on the weight's device."""
    if v.layout != torch.strided or v.is_nested or v.is_quantized or v.is_complex():
        return False
    if v.is_meta or v.device != device:
        return False
    if torch.compiler.is_compiling():
        return True
    if type(v).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False  # a fake or masked tensor, whose operations work differently
    # Inference tensors cannot be saved for backward; the tap has no forward-mode derivative.
    return not v.is_inference() and forward_ad.unpack_dual(v).tangent is None


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter that a module holds itself.

    Reading the attribute would compute a parametrized weight, and a spectral norm would change its
    state by that.
    """
    own = module.named_parameters(recurse=False)
    return next((parameter for leaf, parameter in own if leaf == name), None)


def is_transposed_linear(module: nn.Module) -> bool:
    """Transformers' Conv1D: a linear layer whose weight is stored inputs × outputs."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _padding(module: Convolution) -> tuple[tuple[int, int], ...]:
    """The number of zeros added before and after each dimension."""
    if module.padding == "same":  # torch pads one more at the end if the number is odd
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((size // 2, size - size // 2) for size in total)
    if module.padding == "valid":
        return tuple((0, 0) for _ in module.kernel_size)
    return tuple((int(size), int(size)) for size in module.padding)


@dataclass(frozen=True)
class SumCut:
    """How the rows v of one side are cut before Σ v vᵀ is formed.

    Attributes:
        strips: the number of matrices along the side (heads, or groups of a convolution).
        form: the form of each matrix's factor.
        where: LEFT or RIGHT.
    """

    strips: int
    form: SideForm
    where: int

    @property
    def shape(self) -> Shape:
        """The shape of the moment."""
        shape = self.form.shape(self.where)
        return shape if self._is_whole else (self.strips, *shape)

    @property
    def _is_whole(self) -> bool:
        return self.strips == 1 and self.form.kind == "matrix" and self.form.blocks == 1

    def moment(self, rows: Tensor, multiply: Multiply = torch.matmul) -> Tensor:
        """Σ v vᵀ of rows [N, strips·d], or [strips, N, d] for a grouped convolution."""
        if self.form.kind == "diagonal":
            squares = diagonal_moments(rows.to(working_dtype(rows)), self.strips)
            return squares.view(self.shape)
        if self._is_whole or (rows.ndim == 3 and self.form.blocks == 1):
            return symmetric_product(rows, multiply)
        return block_moments(rows, self.strips, self.form.blocks, multiply)


def moment(rows: Tensor | list[Tensor], dtype: torch.dtype, cut: SumCut) -> Tensor:
    """Σ v vᵀ over rows in `dtype`, cut into pieces; its shape is `cut.shape`.

    Of lists of rows, one for each matrix of a stack, the sums are stacked.
    """
    if isinstance(rows, list):
        sums: dict[int, Tensor] = {}  # matrices may read the same rows
        for part in rows:
            if id(part) not in sums:
                sums[id(part)] = moment(part, dtype, cut)
        return torch.stack([sums[id(part)] for part in rows])
    # A user may call backward inside autocast, which would round the product to bfloat16.
    with torch.autocast(rows.device.type, enabled=False):
        if rows.dtype != dtype and has_widening_product(rows, dtype):
            return cut.moment(rows, widening_product)
        return cut.moment(rows.to(dtype))
