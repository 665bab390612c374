"""The record: the last calls of each rank, in memory that other processes read, also after its death."""
