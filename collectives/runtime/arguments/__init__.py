"""Arguments of a call: its validated description, its key in caches, and its reduction operation."""
