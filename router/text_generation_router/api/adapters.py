"""The routes that load adapters and unload them while the server runs, with the administrators' key. Bodies and answers
are vLLM's."""

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from text_generation_router.api.admin import check_key, read_body
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.errors import AdapterError, InvalidJsonError, UnprocessableError
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.text.json_depth import read_json

# Maximum size of a body in bytes: a path has at most 4096.
BODY_BYTES = 16_384
KINDS: dict[type, str] = {str: "text", bool: "boolean", int: "whole number"}


class AdapterRoutes:
    def __init__(self, key_digest: bytes, adapters: ServedAdapters) -> None:
        """`key_digest`: digest of the administrators' key."""
        self._digests = (key_digest,)
        self._adapters = adapters

    async def load(self, request: Request) -> Response:
        """Serves an adapter from now on."""
        fields = await self._fields(request, {"lora_name": str, "lora_path": str, "load_inplace": bool})
        name, path = fields.get("lora_name"), fields.get("lora_path")
        if not name or not path:
            raise AdapterError("Both 'lora_name' and 'lora_path' must be provided.")
        await self._adapters.load(name, path, fields.get("load_inplace"))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Serves an adapter no longer, and answers when its last request has ended."""
        # vLLM has a number of the adapter, too, and does not read it.
        fields = await self._fields(request, {"lora_name": str, "lora_int_id": int})
        if not (name := fields.get("lora_name")):
            raise AdapterError("'lora_name' needs to be provided to unload a LoRA adapter.")
        await unless_disconnected(request.receive, self._adapters.unload(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _fields(self, request: Request, kinds: dict[str, type]) -> dict[str, Any]:
        check_key(request, self._digests)
        try:
            fields: Any = read_json(await read_body(request, BODY_BYTES))
        except ValueError as error:
            raise InvalidJsonError(str(error)) from None
        if not isinstance(fields, dict):
            raise UnprocessableError("", "give an object")
        for name, value in fields.items():
            if name not in kinds:
                raise UnprocessableError(name[:64], f"is not known: {', '.join(kinds)} are")
            if value is not None and type(value) is not kinds[name]:
                raise UnprocessableError(name, f"give a {KINDS[kinds[name]]}")
        return fields
