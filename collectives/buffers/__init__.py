"""Buffer arguments: address, length and datatype of what the caller passes."""
