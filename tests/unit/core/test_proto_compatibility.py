from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2 as pb


def load_checker() -> ModuleType:
    path = Path(__file__).parents[3] / ".ci" / "protos.py"
    spec = importlib.util.spec_from_file_location("protos_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = load_checker()


def files() -> pb.FileDescriptorSet:
    file = pb.FileDescriptorProto(name="a.proto", package="p", syntax="proto3")
    message = file.message_type.add(name="Ask")
    message.field.add(name="n", number=1, type="TYPE_UINT32", label="LABEL_OPTIONAL")
    message.field.add(name="s", number=2, type="TYPE_STRING", label="LABEL_OPTIONAL")
    message.enum_type.add(name="Kind").value.add(name="KIND_UNSPECIFIED", number=0)
    file.message_type.add(name="Answer")
    service = file.service.add(name="Oracle")
    service.method.add(name="Get", input_type=".p.Ask", output_type=".p.Answer")
    return pb.FileDescriptorSet(file=[file])


def change_type(new: pb.FileDescriptorSet) -> None:
    new.file[0].message_type[0].field[0].type = pb.FieldDescriptorProto.TYPE_STRING


def change_number(new: pb.FileDescriptorSet) -> None:
    new.file[0].message_type[0].field[0].number = 9


def rename(new: pb.FileDescriptorSet) -> None:
    new.file[0].message_type[0].field[0].name = "m"


def make_repeated(new: pb.FileDescriptorSet) -> None:
    new.file[0].message_type[0].field[0].label = pb.FieldDescriptorProto.LABEL_REPEATED


def remove_field(new: pb.FileDescriptorSet) -> None:
    del new.file[0].message_type[0].field[1]


def remove_message(new: pb.FileDescriptorSet) -> None:
    del new.file[0].message_type[1]


def rename_value(new: pb.FileDescriptorSet) -> None:
    new.file[0].message_type[0].enum_type[0].value[0].name = "KIND_NONE"


def remove_method(new: pb.FileDescriptorSet) -> None:
    del new.file[0].service[0].method[0]


def make_streaming(new: pb.FileDescriptorSet) -> None:
    new.file[0].service[0].method[0].server_streaming = True


BREAKING = [
    change_type,
    change_number,
    rename,
    make_repeated,
    remove_field,
    remove_message,
    rename_value,
    remove_method,
    make_streaming,
]


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_a_breaking_change_is_found(change: Callable[[pb.FileDescriptorSet], None]) -> None:
    new = files()
    change(new)
    assert len(list(checker.breaking_changes(files(), new))) == 1


def test_growth_is_no_breaking_change() -> None:
    new = files()
    new.file[0].message_type[0].field.add(name="more", number=3, type="TYPE_BYTES", label="LABEL_OPTIONAL")
    new.file[0].message_type[0].enum_type[0].value.add(name="KIND_OTHER", number=1)
    new.file[0].service[0].method.add(name="Put", input_type=".p.Ask", output_type=".p.Answer")
    assert list(checker.breaking_changes(files(), new)) == []


def test_a_field_may_leave_when_its_number_and_name_are_reserved() -> None:
    new = files()
    message = new.file[0].message_type[0]
    del message.field[1]
    message.reserved_range.add(start=2, end=3)
    assert len(list(checker.breaking_changes(files(), new))) == 1
    message.reserved_name.append("s")
    assert list(checker.breaking_changes(files(), new)) == []
