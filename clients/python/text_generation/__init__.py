"""Client for text-generation-inference servers: `Client`, `AsyncClient`, and `Timeout` to say how long they wait."""

from text_generation.async_client import AsyncClient
from text_generation.client import Client
from text_generation.timeouts import Timeout

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Timeout"]
