"""The parameter server: a sharded store on some ranks, workers on the others."""
