"""Ports between fronts and engines: addresses, certificates, credentials, and what a peer may be."""
