"""Where the maps come from: captured moments or the gradient itself.

A geometry never clears a map. A layer without new statistics, or with an unusable factor, keeps its
old map. The step is exact for the old map (Corollary 2).
"""
