"""A gRPC proxy of a database for workers on other machines. Every call has the token that `tgi-tune storage` prints.

The traffic is not encrypted. Between machines, use a tunnel or a private network.
"""

import hmac
import importlib.util
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from optuna.storages import BaseStorage, GrpcStorageProxy

from tuner.errors import StudyError
from tuner.study.samplers import without_experimental_warnings
from tuner.study.shared_storage.token import TOKEN_VARIABLE, token_of_environment

METADATA = "authorization"
THREADS = 10


def open_proxy(host: str, port: int) -> BaseStorage:
    """The storage behind a proxy, with the token of the environment. Raises StudyError without grpcio or token."""
    _check_grpc()
    token = token_of_environment()
    if not token:
        raise StudyError(
            f"the storage grpc://{host}:{port} needs a token: set {TOKEN_VARIABLE} to the token that "
            "`tgi-tune storage` printed"
        )
    with without_experimental_warnings():
        return _TokenProxy(host, port, token)


def serve_storage(storage: BaseStorage, host: str, port: int, token: str, on_ready: Callable[[], None]) -> None:
    """Serve a database to workers as grpc://HOST:PORT until the process is terminated. Calls need the token.

    on_ready: called when the server listens. Raises StudyError if the port is in use or grpcio is not installed.
    """
    _check_grpc()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StudyError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    server = make_server(storage, host, port, token)
    server.start()
    on_ready()
    server.wait_for_termination()


def make_server(storage: BaseStorage, host: str, port: int, token: str) -> Any:
    """A gRPC server with Optuna's proxy service and a check of the token."""
    import grpc
    from optuna.storages._grpc import servicer
    from optuna.storages._grpc.auto_generated import api_pb2_grpc

    class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc]
        """Refuses every call without the token."""

        def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
            given = dict(call.invocation_metadata).get(METADATA, "")
            return continuation(call) if is_token(given, token) else refusal

    def refuse(_request: Any, context: Any) -> None:
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"wrong token: set {TOKEN_VARIABLE} to the token that the proxy printed"
        )

    refusal = grpc.unary_unary_rpc_method_handler(refuse)
    server = grpc.server(ThreadPoolExecutor(max_workers=THREADS), interceptors=(TokenCheck(),))
    api_pb2_grpc.add_StorageServiceServicer_to_server(servicer.OptunaStorageProxyService(storage), server)
    server.add_insecure_port(f"{host}:{port}")
    return server


def is_token(given: str | bytes, token: str) -> bool:
    """Whether the value of the authorization metadata is the token. Takes constant time."""
    text = given if isinstance(given, bytes) else given.encode()
    return hmac.compare_digest(text, f"Bearer {token}".encode())


class _TokenProxy(GrpcStorageProxy):  # type: ignore[misc]
    """Optuna's client, with the token in each call."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._token = token
        super().__init__(host=host, port=port)

    def _setup(self) -> None:
        import grpc
        from optuna.storages._grpc.auto_generated import api_pb2_grpc
        from optuna.storages._grpc.client import GrpcClientCache, create_insecure_channel

        token = self._token

        class AddToken(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
            """Adds the token to the metadata of a call."""

            def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
                metadata = (*(details.metadata or ()), (METADATA, f"Bearer {token}"))
                return continuation(details._replace(metadata=metadata), request)

        self._channel = grpc.intercept_channel(create_insecure_channel(self._host, self._port), AddToken())
        self._stub = api_pb2_grpc.StorageServiceStub(self._channel)
        self._cache = GrpcClientCache(self._stub)


def _check_grpc() -> None:
    if importlib.util.find_spec("grpc") is None:
        raise StudyError("a storage proxy needs grpcio: pip install 'tgi-bench[server]'")
