"""The doctor: sentences about what looks wrong, from states and from what a watch recorded.

Each check looks at one layer and makes at most one finding. A check makes only claims that its
numbers prove, or says how far they are from what was measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gomuon.intervals import Interval, steps_between
from gomuon.parameters.layers import Layer
from gomuon.watching.findings import Diagnosis, Finding
from gomuon.watching.records import WatchRecord, weight_length

Cause = Callable[[Layer], str | None]  # why a layer that should be captured was not; None: it was

# In runs of ten methods at rates that a sweep picked, while the rate was at least half of its peak:
# from the smallest median of a method to the largest number of any layer. They are in
# results/watch/ratios.json, by tools/update_ratios.py.
RATIOS = (0.0071, 0.195)  # η‖U‖/‖W‖
LENGTHS = (0.25, 18.4)  # ‖W‖/√rank
# How many times further away is worth a word. Fine-tuning takes far smaller rates on purpose.
FAR_BELOW, FAR_ABOVE = 100.0, 10.0
IN_A_ROW = 3  # records with spectra in which something must be the same to be called constant
MOST = 0.5  # a batch that makes more of B̄ than this dominates it

NOT_WATCHED = (
    "Only states were looked at: nothing watches this optimizer. Rates, null spaces, rows and "
    "averages are judged from records: call optimizer.watch() before training, and the doctor "
    "again after some hundred steps."
)


@dataclass(frozen=True)
class Patient:
    """A layer, the settings of its group, and its records, oldest first."""

    layer: Layer
    group: Mapping[str, Any]
    records: Sequence[WatchRecord]

    def finding(self, kind: str, what: str, why: str, do: str) -> Finding:
        """A finding about this layer."""
        return Finding(self.layer.name, kind, what, why, do)


def diagnosis(patients: Sequence[Patient], cause: Cause, *, watched: bool) -> Diagnosis:
    """All findings, layer by layer within each check."""
    found = [finding for patient in patients for finding in _of_state(patient, cause)]
    for check in CHECKS:
        found += [finding for patient in patients if (finding := check(patient)) is not None]
    return Diagnosis.of(found, "" if watched else NOT_WATCHED)


def _of_state(patient: Patient, cause: Cause) -> Iterator[Finding]:
    """What can be seen without records."""
    layer, group = patient.layer, patient.group
    why = cause(layer) if layer.updates else None
    if why is not None:
        yield patient.finding(
            "never captured",
            f"after {layer.updates} updates it has no factors",
            "Its maps are the identity, so it moves as with Muon, whatever its curvature.",
            f"{why[0].upper()}{why[1:]}.",
        )
    if failures := layer.state.get("failures", 0):
        yield patient.finding(
            "results that were not finite",
            f"{failures} were left out",
            "Each time the layer kept an older memory, factor or map, or did not move.",
            "Look for overflow in its inputs and gradients: a lower rate, clipped gradients, or a "
            "wider dtype in the forward pass.",
        )
    if (skipped := group.get("skipped", 0)) and 10 * skipped > group["step"]:
        yield patient.finding(
            "many skipped steps",
            f"{skipped} steps were skipped or taken without gradients, {group['step']} were taken",
            "More than one step in ten had gradients that cannot be used.",
            "With a GradScaler call optimizer.use_scaler(scaler); otherwise lower the rate or clip "
            "gradients.",
        )


# ---- from records --------------------------------------------------------------------------------


def _rate_too_low(patient: Patient) -> Finding | None:
    """η‖U‖/‖W‖ far below what was measured, while the rate is near its largest."""
    last = [r for r in patient.records[-IN_A_ROW:] if r.update_ratio and r.lr]
    if len(last) < IN_A_ROW:
        return None
    largest = max(r.update_ratio or 0.0 for r in last)
    peak = max(r.lr or 0.0 for r in patient.records)
    if largest >= RATIOS[0] / FAR_BELOW or any((r.lr or 0.0) < peak / 2 for r in last):
        return None
    return patient.finding(
        "rate far too low",
        f"an update is {largest:.1g} of the weights' length; in our runs at good rates it was "
        f"{RATIOS[0]:.2g} to {RATIOS[1]:.2g}",
        f"In a hundred steps the weights can change by {min(1.0, 100 * largest):.1%} at most.",
        'Raise lr, unless you fine-tune. A rate that was tuned for AdamW needs lr_scale="adamw".',
    )


def _rate_too_high(patient: Patient) -> Finding | None:
    """Weights far longer than was measured, or updates longer than the weights.

    A high rate does not show in the ratio: weights grow until it is what it was.
    """
    last = patient.records[-IN_A_ROW:]
    lengths = [weight_length(r) or 0.0 for r in last]
    ratios = [r.update_ratio or 0.0 for r in last]
    if len(last) < IN_A_ROW or (min(lengths) <= FAR_ABOVE * LENGTHS[1] and min(ratios) <= 1):
        return None
    return patient.finding(
        "rate far too high",
        f"its singular values are {lengths[-1]:.2g} in the mean square, and an update is "
        f"{ratios[-1]:.2g} of the weights' length; in our runs at good rates they were "
        f"{LENGTHS[0]:.2g} to {LENGTHS[1]:.2g} and {RATIOS[0]:.2g} to {RATIOS[1]:.2g}",
        "The weights are mostly made of updates: what they began with is lost.",
        "Lower lr, decay the weights, or give the layer an lr_factor below 1 in overrides.",
    )


def _lost_to_rounding(patient: Patient) -> Finding | None:
    """Weights in few bits, and updates below half of their spacing."""
    dtype = patient.layer.parameter.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    last = [r.update_ratio for r in patient.records[-IN_A_ROW:] if r.update_ratio]
    half = torch.finfo(dtype).eps / 4  # a number just below a power of two has half the spacing
    if len(last) < IN_A_ROW or max(last) >= half:
        return None
    return patient.finding(
        "updates lost to rounding",
        f"its weights are in {str(dtype).removeprefix('torch.')}, and an update is "
        f"{max(last):.2g} of their length: below {half:.2g}, an entry of average size does not "
        "change",
        "W − ηU is rounded back to W.",
        "Keep the weights in float32 and use autocast, or raise lr.",
    )


def _steps_between_observations(patient: Patient) -> int:
    """The steps over which B̄ decays before it is averaged with the next B."""
    group = patient.group
    every: Interval = group.get("statistics_every") or group.get("refresh_every", 1)
    return steps_between(every, patient.layer.turn)


def _one_batch(patient: Patient) -> Finding | None:
    """One batch is most of B̄, although the average is long enough to have forgotten its start."""
    measured = [r for r in patient.records if r.output_share is not None]
    beta, every = patient.group.get("factor_decay"), _steps_between_observations(patient)
    if not measured or not beta or (last := measured[-1]).measured is None:
        return None
    own = 1 - beta**every  # what a batch like all others would be
    share = last.output_share or 0.0
    if share < MOST or last.measured * (1 - beta) < 1:
        return None
    what = f"{share:.0%} of B̄ came from the batch of step {last.measured}"
    if own >= MOST:
        return patient.finding(
            "average of one batch",
            f"{what}: factor_decay={beta:g} over {every} steps leaves {1 - own:.0%} of what "
            "was there",
            "B̄ is then as noisy as one batch, and so is P_B.",
            "Raise factor_decay, or refresh more often.",
        )
    return patient.finding(
        "average of one batch",
        f"{what}; one like the others would be {own:.0%}",
        "Its gradients were much larger than those before, so P_B follows this batch alone until "
        "the average has forgotten it.",
        "Look at that batch and its loss; clip outliers in the loss, or raise factor_decay.",
    )


def _constant_null_space(patient: Patient) -> Finding | None:
    """The source lacks the same number of directions in several records in a row."""
    last = [r for r in patient.records if r.source_rank is not None][-IN_A_ROW:]
    missing = {(r.full_rank or 0) - (r.source_rank or 0) for r in last}
    if len(last) < IN_A_ROW or len(missing) > 1 or not (lacks := missing.pop()):
        return None
    last_one = last[-1]
    completed = (last_one.polar_rank or 0) - (last_one.source_rank or 0) > 0.5
    return patient.finding(
        "constant null space",
        f"{lacks:.0f} of {last_one.full_rank} directions had no gradient in the last {IN_A_ROW} "
        "measurements" + (", and the polar factor moves them nevertheless" if completed else ""),
        "The weights cannot learn there. Beside a LayerNorm one such direction is natural; inputs "
        "that are always zero, units that never fire, or fewer rows than sides make many.",
        'Pass polar="exact" or "fast", which do not move what has no gradient.'
        if completed
        else "If there are more than one, look for dead units or constant inputs of this layer.",
    )


def _few_rows(patient: Patient) -> Finding | None:
    """A factor of fewer rows than it has dimensions, without an average over several batches."""
    measured = [r for r in patient.records if r.input_rows is not None or r.output_rows is not None]
    if not measured:
        return None
    last = measured[-1]
    averaged = patient.group.get("input_decay") is not None
    sides = (
        ("A", last.input_rows, last.input_side, averaged),
        ("B", last.output_rows, last.output_side, bool(patient.group.get("factor_decay"))),
    )
    few = [
        f"{name} has {rows:.0f} rows for a side of {side}"
        for name, rows, side, is_averaged in sides
        if rows is not None and side is not None and rows < side and not is_averaged
    ]
    if not few:
        return None
    return patient.finding(
        "fewer rows than dimensions",
        " and ".join(few),
        "Such a factor is singular before it is shrunk: in most directions it says only what "
        "shrinkage put there.",
        "Use more rows (a larger batch, rows=None), average A too (input_decay=0.97), or cut the "
        "side (block_size).",
    )


CHECKS: tuple[Callable[[Patient], Finding | None], ...] = (
    _rate_too_low,
    _rate_too_high,
    _lost_to_rounding,
    _one_batch,
    _constant_null_space,
    _few_rows,
)
