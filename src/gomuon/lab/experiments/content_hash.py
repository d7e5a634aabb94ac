"""sha256 of data of any form: what proves that two runs saw the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor


def add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
    # Flat, because a tensor without dimensions cannot be seen as bytes.
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().tobytes())


def content_hash(value: Any) -> str:
    """sha256 of tensors, arrays, numbers and texts, and of lists, tuples and dicts of these.

    Raises:
        TypeError: there is something else in it; the message names it.
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        add_tensor(digest, value)
    elif isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects")
        digest.update(f"{value.dtype} {value.shape}\0".encode() + value.tobytes())
    elif isinstance(value, str | bytes | bool | int | float | None):
        digest.update(f"{type(value).__name__} {value!r}\0".encode())
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)}\0".encode())
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\0".encode())
        for item in value:
            _add(digest, item)
    else:
        raise TypeError(f"a {type(value).__name__}")
