"""Campaigns of faults: what may go wrong goes wrong, many times, from numbered seeds.

A campaign is a module with `CASES`, the size of its full run, and `case(seed, folder)`, which makes
one fault, looks at what came of it, and returns None or what was wrong. An exception is a failure
too. A seed always makes the same case, so a failure is repeated with

    python -m tests.faults NAME --seed SEED

`make faults` runs all of them whole and keeps the counts; `make test` runs a few seeds of each.
"""
