"""Memory: the peak while a function runs, and the bytes of the tensors in an object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gomuon.lab.machine import on_threads


def peak_bytes(work: Callable[[], object]) -> int:
    """The largest number of bytes allocated and not yet freed while `work` ran.

    From torch's allocation records on the CPU. They do not include work space inside LAPACK, nor
    memory that was allocated before and is freed now. They cover one thread, so only one is used.
    """
    with on_threads(1):
        return _recorded_peak(work)


def _recorded_peak(work: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    results = record.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def held_bytes(thing: object, apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of all tensors in an object, each storage once, except those in `apart_from`."""
    known = {_place(tensor) for tensor in apart_from}
    sizes = {}
    for tensor in _tensors(thing, set()):
        if tensor.device.type != "meta" and _place(tensor) not in known:
            sizes[_place(tensor)] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors reachable through containers and attributes; models are skipped."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, (nn.Module, type, FunctionType, MethodType, ModuleType)):
        return
    parts: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = thing
    slots = [s for kind in type(thing).__mro__ for s in getattr(kind, "__slots__", ())]
    inner = [getattr(thing, name, None) for name in slots if isinstance(name, str)]
    for part in (*parts, *inner, *getattr(thing, "__dict__", {}).values()):
        yield from _tensors(part, seen)
