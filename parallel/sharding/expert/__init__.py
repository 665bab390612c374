"""Expert parallelism: experts of a mixture on different ranks, and the exchange of tokens between them."""
