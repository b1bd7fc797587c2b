"""Client for text-generation-inference servers: `Client`, `AsyncClient`, and `Timeout` and `Retries` to say how long
they wait and how often they try.
"""

from text_generation.async_client import AsyncClient
from text_generation.client import Client
from text_generation.inference_api import InferenceAPIAsyncClient, InferenceAPIClient
from text_generation.retries import Retries
from text_generation.streams import AsyncStream, Stream
from text_generation.timeouts import Timeout

__version__ = "0.2.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "InferenceAPIAsyncClient",
    "InferenceAPIClient",
    "Retries",
    "Stream",
    "Timeout",
]
