"""The engine's side of the wire: gRPC service engine.v1 over the engine of this process."""
