"""Comparison of memlab's predictions with runs on real GPUs, and other people's training loops.

This is not part of the installed package. `validation.accuracy` writes memlab/data/accuracy.csv,
which the book's page on accuracy and `memlab.evidence.shortfall` read.
"""
