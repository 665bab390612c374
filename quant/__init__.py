"""Numbers in few bits, for storage and for the wire."""
