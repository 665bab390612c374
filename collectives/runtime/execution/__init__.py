"""Execution of programs: their rows and memories, operations under way, and the progress of all active ones."""
