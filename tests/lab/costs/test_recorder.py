"""The recorder: what it counts, on small calls whose operations are known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gomuon import GoMuon
from gomuon.lab.costs.operators import DECOMPOSING, ROUTINES
from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.recipes.work import DECOMPOSITIONS
from tests.models import language_loss, transformer

# Torch's operators about matrices that decompose nothing, or that are made of others.
HARMLESS = {
    *("linalg__powsum", "linalg_cross", "linalg_diagonal", "linalg_matmul", "linalg_matrix_exp"),
    *("linalg_matrix_norm", "linalg_matrix_power", "linalg_multi_dot", "linalg_norm"),
    *("linalg_vander", "linalg_vecdot", "linalg_vector_norm", "_linalg_check_errors"),
}


def recorded(action: Any) -> OperationRecorder:
    with OperationRecorder() as record:
        action()
    return record


def test_products_count_as_torch_counts_them() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3))

    def passes() -> None:
        model(torch.ones(5, 2, 6, 6)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        passes()
    record = recorded(passes)
    assert record.product_flops == counter.get_total_flops() > 0
    # y = xWᵀ once, and in the backward pass ∂W and ∂x.
    linear = [x for x in record.operations if x.name in ("mm", "addmm")]
    assert sum(x.flops for x in linear) == 3 * 2 * 5 * 64 * 3


def test_attention_on_the_cpu_is_counted() -> None:
    q, k, v = (torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3))

    def passes() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    product = 2 * 2 * 3 * 7 * 7 * 4
    # Two products forward; four backward, and the one of the weights again.
    assert recorded(passes).product_flops == 2 * product + 5 * product


def test_work_in_other_threads_is_recorded_in_this_one() -> None:
    """Where matrices are shared out among threads, and in the backward pass."""
    model = transformer(dtype=torch.float32)
    optimizer = GoMuon(model, refresh_every=1)
    threads = torch.get_num_threads()
    counts = []
    for number in (1, 2):
        torch.set_num_threads(number)
        try:
            optimizer.zero_grad()
            loss = language_loss(model, 0)
            counts.append((recorded(loss.backward).product_flops,
                           len(recorded(optimizer.step).decompositions)))  # fmt: skip
        finally:
            torch.set_num_threads(threads)
    assert counts[0] == counts[1]
    assert all(count > 0 for count in counts[0])


S = torch.eye(6).expand(2, 6, 6) * torch.arange(1.0, 7.0)
B = torch.ones(2, 6, 3)


@pytest.mark.parametrize(
    ("call", "routine", "n"),
    [
        (lambda: torch.linalg.eigh(S), "eigh", 6),
        (lambda: torch.linalg.eigvalsh(S), "eigvalsh", 6),
        (lambda: torch.linalg.svd(B, full_matrices=False), "svd", 3),
        (lambda: torch.linalg.svdvals(B), "svdvals", 3),
        (lambda: torch.linalg.matrix_norm(B, ord="nuc"), "svdvals", 3),
        (lambda: torch.linalg.matrix_norm(B, "nuc"), "svdvals", 3),
        (lambda: torch.linalg.qr(B), "qr", 3),
        (lambda: torch.linalg.inv(S), "inv", 6),
        (lambda: torch.linalg.cholesky(S), "cholesky", 6),
        (lambda: torch.linalg.solve(S, B), "solve", 3),
        (lambda: torch.linalg.solve_ex(S, B), "solve", 3),
        (lambda: torch.linalg.solve_triangular(S, B, upper=True), "triangular solve", 3),
        (lambda: torch.linalg.lu_factor(S), "lu", 6),
        (lambda: torch.linalg.det(S), "lu", 6),
    ],
)
def test_decompositions_by_name_and_shape(call: Any, routine: str, n: int) -> None:
    [found] = recorded(call).decompositions
    assert (found.routine, found.count, found.m, found.n) == (routine, 2, 6, n)
    assert found.flops == 2 * round(ROUTINES[routine](6, n)) > 0


def test_solving_from_the_right_is_solving_for_the_transpose() -> None:
    [found] = recorded(lambda: torch.linalg.solve(S, B.mT, left=False)).decompositions
    assert (found.routine, found.count, found.m, found.n) == ("solve", 2, 6, 3)


def test_no_decomposition_of_torch_is_missing() -> None:
    """Every operator of torch's linalg is counted, harmless, or made of others that are."""

    def is_composite(name: str) -> bool:
        packet = getattr(torch.ops.aten, name)
        key = "CompositeImplicitAutograd"
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(has(overload.name(), key) for overload in overloads)

    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith(("aten::linalg_", "aten::_linalg_"))}  # fmt: skip
    unknown = {name for name in names - HARMLESS - set(DECOMPOSING) if not is_composite(name)}
    assert unknown <= {"linalg_pinv", "linalg_eigh", "linalg_svd"}, unknown
    assert set(DECOMPOSING.values()) | set(DECOMPOSITIONS) <= set(ROUTINES)


X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda: X.sum().item(), 1),
        (lambda: bool((X > 0).all()), 1),
        (lambda: float(X.max()), 1),
        (lambda: X.tolist(), 1),
        (lambda: X.numpy(), 1),
        (lambda: torch.equal(X, X), 1),
        (lambda: torch.allclose(X, X), 1),
        (lambda: X.nonzero(), 1),
        (lambda: torch.where(X > 1), 1),
        (lambda: X[X > 1], 1),
        (lambda: X.clone().__setitem__(X > 1, X[:4]), 1),
        (lambda: X.masked_select(X > 1), 1),
        (lambda: X.unique(), 1),
        (lambda: X.repeat_interleave(torch.ones(6, dtype=torch.long)), 1),
        (lambda: X.repeat_interleave(torch.ones(6, dtype=torch.long), output_size=6), 0),
        (lambda: X.clone().__setitem__(X > 1, 0.0), 0),
        (lambda: X[torch.tensor([0, 2])], 0),
        (lambda: torch.where(X > 1, X, 0.0), 0),
        (lambda: X.repeat_interleave(2), 0),
        (lambda: X.double().float(), 0),
        (lambda: X.to("meta"), 1),
        (lambda: X.to("meta", non_blocking=True), 0),
        (lambda: torch.empty(6, device="meta").copy_(X), 1),
        (lambda: torch.empty(6, device="meta").copy_(X, non_blocking=True), 0),
    ],
)
def test_waits(call: Any, waits: int) -> None:
    assert sum(x.waits for x in recorded(call).operations) == waits


def test_dtypes() -> None:
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    [product] = [x for x in recorded(lambda: half @ half).operations if x.flops]
    assert (product.name, product.dtype, product.is_float64) == ("mm", torch.bfloat16, False)
    assert product.shapes == ((2, 2), (2, 2))
    record = recorded(lambda: X.double() + 1)
    assert [x.is_float64 for x in record.operations] == [True, True]


def test_inference_mode_hides_nothing() -> None:
    with torch.inference_mode():
        record = recorded(lambda: nn.functional.linear(torch.ones(3, 4), torch.ones(2, 4)))
    assert record.product_flops == 2 * 3 * 4 * 2


def test_a_place_is_a_line_of_the_optimizer() -> None:
    model = transformer()
    optimizer = GoMuon(model)
    language_loss(model, 0).backward()
    record = recorded(optimizer.step)
    places = [x.place for x in record.operations if x.waits]
    assert any(place.startswith("functional/linalg.py:") for place in places)
    assert any(place.endswith(" all_finite") for place in places)
    [alone] = [x for x in recorded(lambda: X.sum().item()).operations if x.waits]
    assert alone.place == ""


def test_nothing_is_recorded_before_and_after() -> None:
    recording = OperationRecorder()
    X.sum()
    with recording:
        result: Tensor = X + 1
    X.sum()
    assert [x.name for x in recording.operations] == ["add"]
    assert torch.equal(result, X + 1)
