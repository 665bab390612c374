"""Training without a server and without a global sum: every rank has a replica, and replicas meet in one style or another."""
