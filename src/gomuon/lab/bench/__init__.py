"""`gomuon bench`: step time and memory of our optimizers, next to those of other packages.

`workloads` has the models, `own_arms` and `other_packages` the optimizers. `interleaving` times
the arms in turn, `measurement` measures one workload, `bench_parts` lists everything there is to
measure, and `benchmark` runs it and writes the file. `targets`, `bench_tables`, `further_tables`,
`speed_page` and `plot` show the results.
"""
