"""Sockets that a router inherits from its launcher."""

import socket

from text_generation_router.errors import StartError


def inherited_socket(flag: str, descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise StartError(f"{flag} {descriptor} is not a socket: {error.strerror}") from error
