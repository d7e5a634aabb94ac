"""What the runs say: the small files of campaigns, and the page and pictures made from them.

`collecting` thins a campaign into ``results/``, `reading` holds such a folder to itself, and
everything else turns what was read into ``docs/reproduction.md`` and its pictures.
"""
