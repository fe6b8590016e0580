"""Runs measured several times: repeats over seeds, comparisons, and scaling over ranks, each with its noise."""
