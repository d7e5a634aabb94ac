"""Numbers and lists as text: fixed decimals, a real minus sign, a dash for missing values."""

from __future__ import annotations

import math

ABSENT = "–"


def loss(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.5f}" if math.isfinite(value) else "diverged"


def signed(value: float, decimals: int = 5) -> str:
    if not math.isfinite(value):
        return ABSENT
    return f"{value:+.{decimals}f}".replace("-", "−")


def percent(value: float, decimals: int = 2) -> str:
    """A fraction such as -0.0038 as a signed percentage."""
    return f"{signed(100 * value, decimals)} %" if math.isfinite(value) else ABSENT


def accuracy(share: float | None, decimals: int = 1) -> str:
    return ABSENT if share is None else f"{100 * share:.{decimals}f} %"


def interval(low: float, high: float, decimals: int = 5) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ABSENT
    return f"{signed(low, decimals)} to {signed(high, decimals)}"


def percents(low: float, high: float, decimals: int = 2) -> str:
    """An interval of fractions in per cent."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ABSENT
    low, high = min(low, high), max(low, high)
    return f"{signed(100 * low, decimals)} to {percent(high, decimals)}"


def p_value(value: float) -> str:
    """A p-value with two digits, which are all that few seeds give."""
    if not math.isfinite(value):
        return ABSENT
    return "< .001" if value < 0.001 else f"{value:.2g}".replace("0.", ".", 1)


def step(value: int | float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.3f}×" if math.isfinite(value) else ABSENT


def rate(value: float | None) -> str:
    return "not yet selected" if value is None else f"{value:g}"


def window(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}–{bounds[1]}"


def listing(items: list[str]) -> str:
    """Joined as in "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def pairs(names: list[tuple[str, str]]) -> tuple[str, list[str]]:
    """How rows for pairs (control, candidate) are headed and named.

    If all have one candidate the head names it, so that the rows stay short.
    """
    if len({candidate for _, candidate in names}) == 1 and len(names) > 1:
        return f"{names[0][1]} against", [control for control, _ in names]
    return "pair", [f"{candidate} − {control}" for control, candidate in names]


def many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seeds(values: tuple[int, ...]) -> str:
    return f"{'seed' if len(values) == 1 else 'seeds'} {listing([str(v) for v in values])}"


def duration(seconds: float | None) -> str:
    """Such as 1 h 05 min, 3 min 20 s or 12 s."""
    if seconds is None:
        return "some time"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
