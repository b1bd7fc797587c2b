"""The messages of proto/engine.proto as the router's own values, for both sides of the wire."""
