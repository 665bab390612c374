"""Transports: how bound messages are sent."""
