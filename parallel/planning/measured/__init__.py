"""Forecast of trainings of Chorus on the ranks that there are: memory, seconds of a step, the best layout."""
