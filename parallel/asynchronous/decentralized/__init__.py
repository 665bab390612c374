"""Decentralised training: a replica on every rank, averaged by local SGD, groups, gossip or shared memory."""
