"""Context parallelism: the tokens of a sequence are divided over the ranks of a mesh axis."""
