"""Training without a common step: parameter servers, and ranks that average or exchange weights."""
