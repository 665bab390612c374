"""A parameter server: weights in ranges, spread over servers; workers pull them, and push gradients.

Some ranks are servers, the others workers. Nobody meets anybody but by messages (`messages`), which go through one
object (`post`). How far workers may drift apart is a line of one table (`clocks`). (Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", OSDI 2014.)
"""
