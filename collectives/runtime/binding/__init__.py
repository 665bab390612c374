"""Binding of a schedule to the buffers of a call and to a transport: a program of rows."""
