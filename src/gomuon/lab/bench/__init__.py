"""`gomuon bench`: how long steps take and what they hold, beside other packages.

`workloads` are what is trained and `arms` what trains it; `measuring` lets the arms take turns,
`running` carries a benchmark out and keeps its file; `bars`, `tables`, `page` and `picture` show
what came out.
"""
