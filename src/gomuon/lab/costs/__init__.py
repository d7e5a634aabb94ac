"""`gomuon plan`: what a method costs on a model and on many ranks, before anything runs."""
