"""Benchmarks: one file a question, each printing a table and writing results/*.json. See README.md."""
