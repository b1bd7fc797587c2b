"""The error of a peer that does not keep to proto/engine.proto."""


class WireError(Exception):
    """A message breaks a rule of the protocol. Its sender is to be disconnected with this text."""
