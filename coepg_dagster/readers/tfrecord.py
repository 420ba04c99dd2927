"""TFRecord files and the two protocol-buffer messages in AndroidControl's, without TensorFlow.

Framing (little endian): length (8 bytes), masked CRC-32C of the length (4), data, masked CRC-32C of the data (4).
The messages are declared here with the published field numbers (tensorflow/core/example/example.proto and
google-deepmind/android_env proto/a11y), only the fields that are read; protobuf skips the rest.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from coepg_dagster.readers.rows import Reject, RejectedRow

MAX_RECORD: Final = 1 << 30
"""Longer records are refused: AndroidControl's longest episodes have about 100 MB."""

_F: Final = descriptor_pb2.FieldDescriptorProto
_REPEATED, _OPTIONAL = _F.LABEL_REPEATED, _F.LABEL_OPTIONAL


def _messages() -> dict[str, Any]:
    """The message classes by name, built from the published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="coepg_android_control.proto", package="coepg", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        declared = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            declared.field.add(
                name=field, number=number, label=label, type=kind, type_name=f".coepg.{of}" if of else None
            )
        return declared

    message("BytesList", ("value", 1, _REPEATED, _F.TYPE_BYTES, ""))
    message("Int64List", ("value", 1, _REPEATED, _F.TYPE_INT64, ""))
    message(
        "Feature",
        ("bytes_list", 1, _OPTIONAL, _F.TYPE_MESSAGE, "BytesList"),
        ("int64_list", 3, _OPTIONAL, _F.TYPE_MESSAGE, "Int64List"),
    )
    features = message("Features", ("feature", 1, _REPEATED, _F.TYPE_MESSAGE, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_OPTIONAL, type=_F.TYPE_STRING)
    entry.field.add(name="value", number=2, label=_OPTIONAL, type=_F.TYPE_MESSAGE, type_name=".coepg.Feature")
    message("Example", ("features", 1, _OPTIONAL, _F.TYPE_MESSAGE, "Features"))
    message(
        "Rect",
        *((name, i, _OPTIONAL, _F.TYPE_INT32, "") for i, name in enumerate(("left", "top", "right", "bottom"), 1)),
    )
    message(
        "Node",
        ("unique_id", 1, _OPTIONAL, _F.TYPE_INT32, ""),
        ("bounds_in_screen", 2, _OPTIONAL, _F.TYPE_MESSAGE, "Rect"),
        ("content_description", 4, _OPTIONAL, _F.TYPE_STRING, ""),
        ("text", 7, _OPTIONAL, _F.TYPE_STRING, ""),
        ("is_clickable", 14, _OPTIONAL, _F.TYPE_BOOL, ""),
        ("depth", 27, _OPTIONAL, _F.TYPE_INT32, ""),
    )
    message("Tree", ("nodes", 1, _REPEATED, _F.TYPE_MESSAGE, "Node"))
    message("Window", ("layer", 4, _OPTIONAL, _F.TYPE_INT32, ""), ("tree", 11, _OPTIONAL, _F.TYPE_MESSAGE, "Tree"))
    message("Forest", ("windows", 1, _REPEATED, _F.TYPE_MESSAGE, "Window"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"coepg.{name}"))
        for name in ("Example", "Forest")
    }


_MESSAGES: Final = _messages()
Example: Final = _MESSAGES["Example"]
Forest: Final = _MESSAGES["Forest"]


def parsed(kind: Any, data: bytes, what: str) -> Any:
    """`data` parsed as a message of `kind`; raises RejectedRow where that fails."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RejectedRow("bad_field", f"{what} is no {kind.DESCRIPTOR.name} message ({error})") from error
    return message


def masked_crc(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[tuple[int, bytes] | Reject]:
    """(number from 0, data) of each record of a TFRecord file, gzipped or not; streaming.

    A record whose data fails its checksum is a Reject, and reading goes on. A file that is cut short, or whose framing
    is damaged, gives a Reject and ends there.
    """
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    number = 0
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            while head := file.read(12):
                if len(head) < 12:
                    yield Reject(
                        str(path), str(number), "truncated_record", f"{len(head)} of 12 bytes of a record's head"
                    )
                    return
                length, check = struct.unpack("<QI", head)
                if masked_crc(head[:8]) != check or length > MAX_RECORD:
                    yield Reject(
                        str(path), str(number), "bad_checksum", "a record's head is damaged; the rest is not read"
                    )
                    return
                data, tail = file.read(length), file.read(4)
                if len(data) < length or len(tail) < 4:
                    yield Reject(str(path), str(number), "truncated_record", f"{len(data)} of {length} bytes")
                    return
                if struct.unpack("<I", tail)[0] == masked_crc(data):
                    yield number, data
                else:
                    yield Reject(str(path), str(number), "bad_checksum", f"{length} bytes")
                number += 1
    except EOFError as error:
        yield Reject(str(path), str(number), "truncated_record", f"the gzip stream ends too early ({error})")
    except (gzip.BadGzipFile, zlib.error) as error:
        yield Reject(str(path), str(number), "bad_file", f"damaged gzip stream ({error})")
