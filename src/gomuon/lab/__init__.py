"""The lab: the paper's experiments as paired runs that survive being killed, and their reports.

Everything here lives behind the extra ``gomuon[lab]``; the optimizers need torch alone.
"""
