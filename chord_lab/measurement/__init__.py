"""Measurement: live on a GPU, replayed from records, or predicted; one `Measure` protocol for all three."""
