"""The tables that the terminal, Markdown, CSV and a page share, made from a book.

times     medians by call and by size, tiers, rates, the ladder, floors
compared  ratios of algos that took turns, best peers, scores, the contest's judgement
checks    which results are right
origins   devices, clocks, files and sources
records   every record, for CSV
commands  the tables that a command prints at its end
"""
