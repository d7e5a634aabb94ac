"""Errors and warnings of our own, so that callers can tell them from torch's."""


class DecompositionError(RuntimeError):
    """A matrix decomposition failed in the working precision and again in float64."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; nothing was changed by the step that found it."""


class GeometryWarning(UserWarning):
    """A layer runs on a geometry the user may not expect: the identity, or an older one."""


class RankError(RuntimeError):
    """Another rank failed, died, or was set up differently."""
