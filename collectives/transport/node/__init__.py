"""Messages within a node: placement of ranks, mailboxes in shared memory, and the transport over them."""
