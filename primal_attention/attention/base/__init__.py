"""What all mechanisms share: masks, projections, validation, compaction and cards."""
