"""Where the maps come from: captured moments or the gradient itself.

A geometry never clears a map: a layer that was not seen, or whose factor cannot be used, keeps the
map it has, for which the step is exact (Corollary 2).
"""
