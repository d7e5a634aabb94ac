"""`gomuon bench`: step time and memory of our optimizers, next to those of other packages.

`workloads` has the models and `arms` the optimizers. `interleaving` times the arms in turn,
`measurement` measures one workload, and `benchmark` runs all of them and writes the file.
`targets`, `tables`, `speed_page` and `plot` show the results.
"""
