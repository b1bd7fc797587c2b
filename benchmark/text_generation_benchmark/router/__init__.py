"""Processor time of the router per token, beside a program that only writes the same bytes to as many sockets."""
