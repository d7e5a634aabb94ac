"""`gomuon watch`: what a run's records say, in the terminal and as a page."""
