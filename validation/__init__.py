"""How near memlab is to runs on real cards: what is compared, and other people's training loops.

Not part of the installed package. `validation.accuracy` writes memlab/data/accuracy.csv, which the
book's page on accuracy and `memlab.evidence.shortfall` read.
"""
