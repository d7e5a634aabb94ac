"""Settings of products that are changed for a while and put back."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gomuon.functional.linalg import full_float32

BACKENDS: Any = torch.backends
new_settings = pytest.mark.skipif(
    not hasattr(BACKENDS.cuda.matmul, "fp32_precision"), reason="settings of torch 2.9 and later"
)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    # torch's own tests, which other tests import, forbid to write the settings.
    with getattr(BACKENDS, "__allow_nonbracketed_mutation")():
        yield
        if hasattr(BACKENDS.cuda.matmul, "fp32_precision"):
            for products in (BACKENDS, BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul):
                products.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def settings() -> tuple[str, str, str]:
    return (
        BACKENDS.fp32_precision,
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.mkldnn.matmul.fp32_precision,
    )


def for_all() -> None:
    BACKENDS.fp32_precision = "tf32"


def for_products() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"


def the_older_way() -> None:
    torch.set_float32_matmul_precision("medium")


@new_settings
@pytest.mark.parametrize("allow", [for_all, for_products, the_older_way])
def test_products_are_exact_for_a_while(allow: Callable[[], None]) -> None:
    allow()
    before = settings()
    assert before[1] == "tf32"
    with full_float32():
        assert settings()[1:] == ("ieee", "ieee")
    assert settings() == before


@new_settings
def test_the_older_settings_can_still_be_read() -> None:
    """Torch refuses to read them after a mixture of old and new ones."""
    torch.set_float32_matmul_precision("medium")
    with full_float32():
        pass
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cuda.matmul.allow_tf32


@new_settings
def test_what_was_set_for_all_backends_can_still_be_changed_there() -> None:
    for_all()
    with full_float32():
        pass
    BACKENDS.fp32_precision = "ieee"
    assert settings()[1] == "ieee"


@new_settings
def test_nothing_is_written_if_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(SimpleNamespace):
        fp32_precision = property(lambda self: "none")

    monkeypatch.setattr(BACKENDS.cuda, "matmul", Fixed())
    monkeypatch.setattr(BACKENDS.mkldnn, "matmul", Fixed())
    with full_float32():  # a write would raise an AttributeError
        assert BACKENDS.cuda.matmul.fp32_precision == "none"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_torch_before_2_9(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(BACKENDS.cuda, "matmul", SimpleNamespace())
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == precision


def test_an_error_puts_the_settings_back() -> None:
    torch.set_float32_matmul_precision("high")
    with pytest.raises(MemoryError), full_float32():
        raise MemoryError
    assert torch.get_float32_matmul_precision() == "high"
