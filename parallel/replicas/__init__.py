"""Training without a server and without a sum over all: every rank has a replica, and these meet in some style."""
