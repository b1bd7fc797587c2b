"""Which role the other side of a call has, and an interceptor that refuses calls from other roles."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import grpc

from text_generation_common.cluster.identity import Identity, Role

# Most different refusals that are logged, so that refused peers cannot fill the log.
MAX_LOGGED = 64
# Kinds of method that a service can have, as gRPC names them.
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


Handler = Any  # a method's `grpc.RpcMethodHandler`; None for a method that does not exist


class PeerRefusedError(Exception):
    """The other side of a call has a certificate that is valid, but not for what it asks."""


class AuthenticatedCall(Protocol):
    """The part of `grpc.aio.ServicerContext` that is used here."""

    def auth_context(self) -> Mapping[str, Any]: ...
    def peer(self) -> str: ...


def peer_role(context: AuthenticatedCall, deployment: str, allowed: Collection[Role]) -> Role:
    """The role in the certificate of a call's client. PeerRefusedError if the client has no certificate, if it is for
    another deployment, or for a role that is not in `allowed`. gRPC has checked CA and dates before."""
    uris = [bytes(uri).decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
    try:
        if len(uris) != 1:
            raise ValueError(f"its certificate has {len(uris)} URIs, and needs one")
        identity = Identity.from_uri(uris[0])
    except ValueError as error:
        raise PeerRefusedError(f"the peer has no role: {error}") from None
    if identity.deployment != deployment:
        raise PeerRefusedError(f"the peer is {identity.uri}, and this port is of the deployment {deployment}")
    if identity.role not in allowed:
        roles = ", ".join(sorted(allowed))
        raise PeerRefusedError(f"the peer is {identity.uri}, and this port serves the roles {roles}")
    return identity.role


class PeerGuard(grpc.aio.ServerInterceptor):
    """Refuses each call, of any method, whose client has not one of the allowed roles: PERMISSION_DENIED. Calls over a
    unix socket have no certificate and pass: the rights of the socket's folder decide which users call."""

    def __init__(self, deployment: str, allowed: Collection[Role], logger: logging.Logger) -> None:
        self._deployment = deployment
        self._allowed = frozenset(allowed)
        self._logger = logger
        self._logged: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Handler = await continuation(handler_call_details)
        if handler is None:  # The method does not exist.
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(self._guarded(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)

    def _guarded(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """The behavior of a method, which begins with the check. gRPC tells by a function's kind how it answers."""
        if inspect.isasyncgenfunction(behavior):

            async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._check(context)
                async for answer in behavior(request, context):
                    yield answer

            return answers

        async def answer(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behavior(request, context)

        return answer

    async def _check(self, context: Any) -> None:
        if context.peer().startswith("unix:"):
            return
        try:
            peer_role(context, self._deployment, self._allowed)
        except PeerRefusedError as error:
            reason = str(error)
            if reason not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(reason)
                self._logger.warning("A call from %s was refused: %s", context.peer(), reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
