"""Measure the time and memory of a layer, beside the least that is possible."""
