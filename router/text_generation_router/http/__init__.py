"""The HTTP half of the router without its routes: connections and their limits, keys, errors, streams, the graceful
stop.

Knows no route: `api/` imports it, never the reverse. Begin with `protocol.py`, connections, then `app.py` of the
router, which says what a request passes before its route.
"""
