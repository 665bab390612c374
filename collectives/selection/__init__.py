"""Selection of the algorithm and the segment count of a call: cost model and table of measured times."""
