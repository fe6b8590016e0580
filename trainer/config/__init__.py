"""Recipes: what a run is to do, read from TOML, checked, and explained where it is wrong."""
