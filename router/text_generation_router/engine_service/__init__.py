"""The engine's side of the wire: gives the engine of this process to fronts in other processes, as gRPC service
engine.v1.

Each front has one Work stream. Whatever ends the stream ends the front's requests, and no other front notices: a front
that breaks the protocol (WireError) or does not read (FrontLostError) is disconnected, and one that connects too often
is refused after a second and tries again later (`arrivals.py`). A News call of the front carries loads and changes of
the prefix cache.

Imports `engine/local.py`, `wire/` and `fleet/cache_news.py`; no text, no scheduler. Begin with `servicer.py`, the
calls, then `work.py`, what a front's messages do.
"""
