"""The engine: bound programs as rows of numbers, and the compiled code that runs them."""
