"""`gomuon verify`: every statement of the paper, attacked on this machine."""
