"""Memory that the ranks of a node share: files, their limits, shared arrays, and the speed of copies."""
