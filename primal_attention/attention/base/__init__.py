"""Masks, projections, validation, compaction and cards, which all mechanisms share."""
