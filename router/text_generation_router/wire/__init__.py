"""The messages of proto/engine.proto as the router's own values, for both sides of the wire, `fleet/` and
`engine_service/`.

Imports values of `scheduling/` and `engine/protocol.py`, and no text. Begin with `version.py`, then `submits.py`, a
request on its way to an engine, and `steps.py`, tokens on their way back.
"""
