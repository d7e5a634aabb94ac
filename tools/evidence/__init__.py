"""Make docs/reproduction.md and docs/pictures from the files under results/.

The way through the package: `collect` copies a finished campaign into ``results/``;
`results_folder` reads such folders back and `consistency` checks them; `sections`, `claims` and
`picture_data` turn what was read into tables, verdicts and plotted numbers; `page` and
`picture_drawing` write them.
"""
