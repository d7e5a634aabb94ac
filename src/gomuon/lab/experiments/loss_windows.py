"""The windows of updates over which the paper averages the training loss."""

from __future__ import annotations

from collections.abc import Sequence

LossWindow = tuple[int, int]
PAPER_STEPS = 1000
# Updates are counted from 1, and both ends belong to the window, as in the paper's tables.
PAPER_WINDOWS: tuple[LossWindow, ...] = ((201, 300), (501, 600), (901, 1000))


def windows_for(
    steps: int, windows: Sequence[LossWindow] = PAPER_WINDOWS
) -> tuple[LossWindow, ...]:
    """The paper's windows, scaled to a run of another length.

    Each window has at least one update, so that a run of any length has all of them.
    """
    scaled = []
    for first, last in windows:
        end = max(1, round(last * steps / PAPER_STEPS))
        scaled.append((min(end, round((first - 1) * steps / PAPER_STEPS) + 1), end))
    return tuple(scaled)


def window_name(window: LossWindow) -> str:
    return f"{window[0]}-{window[1]}"
