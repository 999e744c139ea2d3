"""A gRPC client that knows no service beforehand, as grpcurl: all it calls it learns from the server's reflection.

    reflecting_client.py FOLDERS ADDRESS                           lists the services
    reflecting_client.py FOLDERS ADDRESS SERVICE/METHOD [JSON]     calls a method; each answer is one line of JSON

It is run as `python -I -S`, isolated from the environment and from `site`, and so from what is installed by a link to a
checkout. FOLDERS are where grpcio, grpcio-reflection and protobuf lie, separated by colons.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

CALL_S = 60.0


def main(address: str, method: str | None = None, request: str = "{}") -> int:
    """Exit code: 0 after an answer, 1 for a status that is not OK, which is printed to stderr by name."""
    import grpc
    from google.protobuf import json_format
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    if importlib.util.find_spec("paceline") is not None:
        raise SystemExit("the project can be imported here: this would prove nothing")

    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        if method is None:
            print(*sorted(database.get_services()), sep="\n")
            return 0
        pool = DescriptorPool(database)
        service, _, name = method.partition("/")
        found = pool.FindServiceByName(service).FindMethodByName(name)
        kind = channel.unary_stream if found.server_streaming else channel.unary_unary
        call: Any = kind(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        message = json_format.Parse(request, GetMessageClass(found.input_type)(), descriptor_pool=pool)
        try:
            for answer in answers(call(message, timeout=CALL_S), streams=found.server_streaming):
                print(json.dumps(json_format.MessageToDict(answer, descriptor_pool=pool)))
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


def answers(answer: Any, *, streams: bool) -> Iterator[Any]:
    """One answer or many, in order."""
    if streams:
        yield from answer
    else:
        yield answer


if __name__ == "__main__":
    folders, *rest = sys.argv[1:]
    sys.path += folders.split(":")
    sys.exit(main(*rest))
