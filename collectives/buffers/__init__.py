"""Buffer arguments of collectives: address, length and datatype of the arrays that the caller passes."""
