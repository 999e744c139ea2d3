"""The generated stubs: `generate` writes them, `check` proves that they are fresh and that the protos only grew.

`check` compares with `.ci/released.binpb`, the descriptors of the last release, which `release` writes. A field may be
removed if its number and name are reserved; none may change its number, type or cardinality, and no method its types.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

ROOT = Path(__file__).parent.parent
BASELINE = ROOT / ".ci" / "released.binpb"
NAMES = ("common", "router", "prefill", "decode")
WITH_SERVICES = ("router", "prefill", "decode")


def main(command: str) -> int:
    """Exit code of `generate`, `check` or `release`."""
    if command == "generate":
        generate(ROOT / "src")
        return 0
    if command == "release":
        BASELINE.write_bytes(describe().SerializeToString(deterministic=True))
        return 0
    problems = [*stale_stubs(), *breaking_changes(read_baseline(), describe())]
    for problem in problems:
        print(f"protos: {problem}", file=sys.stderr)
    return 1 if problems else 0


def generate(out: Path) -> None:
    """Writes the stubs to `out/paceline/protos`, by the compiler that is pinned in constraints.txt."""
    protoc(f"--python_out={out}", f"--pyi_out={out}", names=NAMES)
    protoc(f"--grpc_python_out={out}", names=WITH_SERVICES)


def protoc(*arguments: str, names: Iterable[str]) -> None:
    """Runs the compiler over `names` under their import path."""
    files = [f"paceline/protos/{name}.proto" for name in names]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ipaceline/protos=protos", *arguments, *files]
    subprocess.run(command, cwd=ROOT, check=True)


def describe() -> pb.FileDescriptorSet:
    """The protos as they are now."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        protoc(f"--descriptor_set_out={out}", names=NAMES)
        return pb.FileDescriptorSet.FromString(out.read_bytes())


def read_baseline() -> pb.FileDescriptorSet:
    """The protos as they were released."""
    return pb.FileDescriptorSet.FromString(BASELINE.read_bytes())


def stale_stubs() -> Iterator[str]:
    """Stubs that differ from what the protos generate, are missing, or have no proto."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "paceline" / "protos").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    for name in sorted(fresh.keys() | committed.keys()):
        if fresh.get(name) != committed.get(name):
            yield f"protos/{name} is not what the protos generate: run `make protos`"


def breaking_changes(old: pb.FileDescriptorSet, new: pb.FileDescriptorSet) -> Iterator[str]:
    """What a peer of the last release would misread."""
    old_messages, new_messages = dict(messages(old)), dict(messages(new))
    for name, message in old_messages.items():
        if name not in new_messages:
            yield f"message {name} is gone"
        else:
            yield from message_changes(name, message, new_messages[name])
    new_enums = dict(enums(new))
    for name, enum in enums(old):
        values = {value.number: value.name for value in new_enums[name].value} if name in new_enums else {}
        for value in enum.value:
            if values.get(value.number) != value.name:
                yield f"enum {name}: {value.name} = {value.number} is gone or renamed"
    new_methods = dict(methods(new))
    for name, method in methods(old):
        if name not in new_methods:
            yield f"method {name} is gone"
        elif signature(method) != signature(new_methods[name]):
            yield f"method {name} changed from {signature(method)} to {signature(new_methods[name])}"


def message_changes(name: str, old: pb.DescriptorProto, new: pb.DescriptorProto) -> Iterator[str]:
    """Fields of one message that changed, or left without being reserved."""
    fields = {field.number: field for field in new.field}
    for field in old.field:
        now = fields.get(field.number)
        if now is None:
            number_kept = any(span.start <= field.number < span.end for span in new.reserved_range)
            if not (number_kept and field.name in new.reserved_name):
                yield f"{name}.{field.name} = {field.number} is gone: reserve its number and its name"
        elif shape(old, field) != shape(new, now):
            yield f"{name}.{field.name} = {field.number} changed from {shape(old, field)} to {shape(new, now)}"


def shape(message: pb.DescriptorProto, field: pb.FieldDescriptorProto) -> tuple[str, str, str, str, bool, str]:
    """All of a field that a peer relies on."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    kind, label = pb.FieldDescriptorProto.Type.Name(field.type), pb.FieldDescriptorProto.Label.Name(field.label)
    return field.name, kind, field.type_name, label, field.proto3_optional, oneof


def signature(method: pb.MethodDescriptorProto) -> tuple[str, bool, str, bool]:
    """Types and directions of a method."""
    return method.input_type, method.client_streaming, method.output_type, method.server_streaming


def messages(files: pb.FileDescriptorSet) -> Iterator[tuple[str, pb.DescriptorProto]]:
    """Every message, nested ones too, by full name."""
    waiting = [(file.package, message) for file in files.file for message in file.message_type]
    while waiting:
        scope, message = waiting.pop()
        name = f"{scope}.{message.name}"
        waiting.extend((name, nested) for nested in message.nested_type)
        yield name, message


def enums(files: pb.FileDescriptorSet) -> Iterator[tuple[str, pb.EnumDescriptorProto]]:
    """Every enum, nested ones too, by full name."""
    for file in files.file:
        yield from ((f"{file.package}.{enum.name}", enum) for enum in file.enum_type)
    for name, message in messages(files):
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


def methods(files: pb.FileDescriptorSet) -> Iterator[tuple[str, pb.MethodDescriptorProto]]:
    """Every method by full name."""
    for file in files.file:
        for service in file.service:
            yield from ((f"{file.package}.{service.name}.{method.name}", method) for method in service.method)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
