"""Transports of messages: MPI point-to-point between nodes, mailboxes in shared memory within a node."""
