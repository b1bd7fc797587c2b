"""The front's side of proto/engine.proto: the EngineRun protocol over engines in other processes."""
