"""Ports between fronts and engines: addresses, certificates, credentials, and what a peer may be. Imports gRPC in
`security.py` and cryptography in `certificates.py` and `issuing.py` only.

Begin with `identity.py`, the names in certificates, and `security.py`, which opens ports and channels.
"""
