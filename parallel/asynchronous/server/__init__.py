"""Parameter server: weights sharded over servers. Workers pull weights and push gradients.

Servers and workers communicate by messages only (`messages`, sent by `message_bus`). The consistency rule limits the
distance between workers (`consistency`). `naive_bsp` is the reference with collectives only. (Li et al., "Scaling
Distributed Machine Learning with the Parameter Server", OSDI 2014.)
"""
