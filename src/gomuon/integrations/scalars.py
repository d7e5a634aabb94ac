"""Records as scalars with a tag each, which is what trackers of experiments take."""

from collections.abc import Iterable

from gomuon.watching.records import WatchRecord


def scalars(records: Iterable[WatchRecord], prefix: str = "gomuon") -> dict[int, dict[str, float]]:
    """By step, every number under the tag prefix/layer/number; "" leaves the prefix out."""
    found: dict[int, dict[str, float]] = {}
    start = f"{prefix}/" if prefix else ""
    for record in records:
        tags = found.setdefault(record.step, {})
        tags |= {f"{start}{record.layer}/{name}": x for name, x in record.numbers().items()}
    return found
