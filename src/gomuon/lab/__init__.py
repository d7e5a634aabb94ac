"""The lab: runs the paper's experiments, reports on them, and measures and plans costs.

Its dependencies are the extra ``gomuon[lab]``; the optimizers themselves need only torch.
"""
