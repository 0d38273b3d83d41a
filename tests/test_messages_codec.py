"""Messages between nodes: every one survives its encoding, and nothing but messages is taken in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from machine_kit import BEGIN, EVENTS, HELLO, MANIFEST, ROOT

from worldmove import messages as m
from worldmove.errors import FramingError, ManifestError, NoWorkerError, RejectedError
from worldmove.manifest import MAX_HOST_STATE, MAX_RANKS, MAX_REGIONS, Manifest, Place, Region, Source
from worldmove.receipts import rejection_error

KINDS = get_args(m.PeerMessage)
MESSAGES: list[m.Message] = [EVENTS[kind.__name__] for kind in KINDS]

VARIANTS: list[m.Message] = [
    m.Begin(
        socket="/run/node.sock",
        token=bytes(range(32)),
        extent_bytes=(512, 1 << 42),
        places=(Place(0, 0), Place(1, 4096)),
    ),
    m.Begin(lanes=tuple(m.LaneOffer("::1", port, bytes(32)) for port in range(1, m.MAX_LANES + 1))),
    m.Sealed(block=0, host_states=(), root=ROOT),
    m.Sealed(block=1, host_states=(b"", b"\x00" * 100, b"x"), root=ROOT),
    m.Sealed(block=1, host_states=(bytes(MAX_HOST_STATE),), root=ROOT),
    m.TablePart(number=1000, first=m.MAX_LEAVES, digests=b""),
    m.TablePart(number=1, first=0, digests=bytes(16) * m.MAX_PART_LEAVES),
    m.Verified(root=ROOT, leaves=0, bytes=0, kept_bytes=1 << 42, ms=0.0, damaged=(m.DamagedLeaf("k", 3, 2),)),
    m.Rejected(code="no-memory", message="", details={"required_bytes": 7, "fields": ["a", None, 1.5]}),
    m.Admitted(incarnation=0, path="local", lanes=0, available={"bytes_per_s": 1e9}),
    m.Adopted(epoch=1, resume_ms=0.0, endpoint=None),
    m.Hello(**{**msgspec.structs.asdict(HELLO), "seed": 2**64 - 1, "fingerprint": {"cpu": "é" * 50}}),
]


def changed(message: m.Message, /, **fields: Any) -> bytes:
    """The message with some fields changed, encoded without any check."""
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return bytes([m.VERSION]) + msgspec.msgpack.encode({**body, **fields})


@pytest.mark.parametrize("message", [*MESSAGES, *VARIANTS], ids=lambda one: type(one).__name__)
def test_a_message_survives(message: m.Message) -> None:
    data = m.encode(message)
    assert data[0] == m.VERSION
    assert m.decode(data) == message
    assert m.encode(m.decode(data)) == data


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(m.Message.__subclasses__())


def test_the_largest_session_can_be_announced() -> None:
    regions = tuple(
        Region(f"{number:0128d}", "float8_e4m3fnuz", (1,) * 16, rank=63, source=Source("shm", "x" * 200, 512))
        for number in range(MAX_REGIONS)
    )
    hello = m.Hello(
        **{**msgspec.structs.asdict(HELLO), "manifest": msgspec.structs.replace(MANIFEST, regions=regions)}
    )
    assert m.decode(m.encode(hello)) == hello
    everywhere = m.Begin(
        extent_bytes=(1 << 42,) * (MAX_REGIONS + MAX_RANKS), places=(Place(4000, 1 << 41),) * MAX_REGIONS
    )
    assert m.decode(m.encode(everywhere)) == everywhere
    bad = m.Verified(
        root=ROOT,
        leaves=1,
        bytes=1,
        kept_bytes=0,
        ms=1.0,
        damaged=(m.DamagedLeaf("r" * 128, m.MAX_LEAVES, 3),) * 10_000,
    )
    assert m.decode(m.encode(bad)) == bad


def test_what_is_too_long_is_neither_sent_nor_taken() -> None:
    states = (bytes(MAX_HOST_STATE),) * 2
    with pytest.raises(FramingError, match="at most 8388608"):
        m.encode(m.Sealed(block=1, host_states=states, root=ROOT))
    longest = bytes([m.VERSION]) + bytes(m.MAX_MESSAGE - 1)
    with pytest.raises(FramingError, match="could not be decoded"):
        m.decode(longest)
    with pytest.raises(FramingError, match="2 to 8388608 are allowed"):
        m.decode(longest + b"\0")


@pytest.mark.parametrize("data", [b"", b"\x01", bytes([m.VERSION])])
def test_what_is_too_short_is_refused(data: bytes) -> None:
    with pytest.raises(FramingError, match="are allowed"):
        m.decode(data)


@pytest.mark.parametrize("version", [0, 1, 2, 255])
def test_another_version_is_refused(version: int) -> None:
    data = bytes([version]) + m.encode(m.Prepared())[1:]
    with pytest.raises(FramingError, match=f"version {version}; this node speaks {m.VERSION}"):
        m.decode(data)


def refused(data: bytes) -> None:
    with pytest.raises(FramingError, match="could not be decoded"):
        m.decode(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_an_unknown_field_or_type_and_a_missing_field_are_refused(message: m.Message) -> None:
    refused(changed(message, surprise=1))
    refused(changed(message, t="Surprise"))
    refused(changed(message, t=None))
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name in [field.name for field in msgspec.structs.fields(message) if field.required]:
        fewer = {key: value for key, value in body.items() if key != name}
        refused(bytes([m.VERSION]) + msgspec.msgpack.encode(fewer))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_field_of_another_type_is_refused(message: m.Message) -> None:
    """Numbers as text, text as bytes, a map where a list belongs: nothing is converted."""
    for field in msgspec.structs.fields(message):
        if field.name == "details":
            refused(changed(message, details=["list"]))
            continue
        refused(changed(message, **{field.name: {"a": [1, {}]}}))
        refused(changed(message, **{field.name: [{"a": b"x"}]}))


def test_a_trailing_byte_is_refused() -> None:
    refused(m.encode(m.Prepared()) + b"\xc0")


@pytest.mark.parametrize("data", [b"\x91" * 5000 + b"\xc0", b"\x81\xa1a" * 5000 + b"\xc0"])
def test_deep_nesting_is_refused(data: bytes) -> None:
    refused(bytes([m.VERSION]) + data)
    body = {"t": "Rejected", "code": "x", "message": "", "details": {}}
    whole = msgspec.msgpack.encode(body)[:-1]
    refused(bytes([m.VERSION]) + whole + b"\x81\xa1a" + data)


BAD_FIELDS: list[tuple[m.Message, dict[str, Any]]] = [
    (HELLO, {"move_id": ""}),
    (HELLO, {"move_id": "x" * 257}),
    (HELLO, {"session_id": ""}),
    (HELLO, {"epoch": -1}),
    (HELLO, {"epoch": (1 << 42) + 1}),
    (HELLO, {"seed": -1}),
    (HELLO, {"path": "carrier pigeon"}),
    (HELLO, {"live": 1}),
    (HELLO, {"socket": "x" * 4097}),
    (HELLO, {"fingerprint": {"a": 1}}),
    (HELLO, {"manifest": {"model": "m"}}),
    (EVENTS["Admitted"], {"lanes": 65}),
    (EVENTS["Admitted"], {"lanes": -1}),
    (EVENTS["Admitted"], {"path": ""}),
    (EVENTS["Admitted"], {"available": {"a": "b"}}),
    (EVENTS["Rejected"], {"message": "x" * 4097}),
    (BEGIN, {"lanes": [["h", 0, bytes(32)]]}),
    (BEGIN, {"lanes": [["h", 65536, bytes(32)]]}),
    (BEGIN, {"lanes": [{"host": "h", "port": 1, "token": bytes(31)}]}),
    (BEGIN, {"lanes": [{"host": "h", "port": 1, "token": bytes(33)}]}),
    (BEGIN, {"lanes": [{"host": "h", "port": 0, "token": bytes(32)}]}),
    (BEGIN, {"lanes": [{"host": "h", "port": 1, "token": bytes(32)}] * 65}),
    (BEGIN, {"token": bytes(16)}),
    (BEGIN, {"extent_bytes": [-1]}),
    (BEGIN, {"extent_bytes": [0] * (MAX_REGIONS + MAX_RANKS + 1)}),
    (BEGIN, {"places": [[0, 0]] * (MAX_REGIONS + 1)}),
    (BEGIN, {"places": [[0]]}),
    (EVENTS["Round"], {"number": 0}),
    (EVENTS["Round"], {"number": 1001}),
    (EVENTS["Round"], {"number": 1.5}),
    (EVENTS["TablePart"], {"first": -1}),
    (EVENTS["TablePart"], {"first": m.MAX_LEAVES + 1}),
    (EVENTS["TablePart"], {"digests": bytes(16) * (m.MAX_PART_LEAVES + 1)}),
    (EVENTS["Progress"], {"bytes": -1}),
    (EVENTS["Landed"], {"leaves": -1}),
    (EVENTS["Sealed"], {"block": -1}),
    (EVENTS["Sealed"], {"root": "AB" * 32}),
    (EVENTS["Sealed"], {"root": "ab" * 32 + "\n"}),
    (EVENTS["Sealed"], {"root": "ab" * 31}),
    (EVENTS["Sealed"], {"host_states": [b""] * (MAX_RANKS + 1)}),
    (EVENTS["Sealed"], {"host_states": [bytes(MAX_HOST_STATE + 1)]}),
    (EVENTS["Verified"], {"root": ""}),
    (EVENTS["Verified"], {"damaged": [{"region": "k", "leaf": 0, "attempts": 1}] * 10_001}),
    (EVENTS["Verified"], {"damaged": [{"region": "k" * 129, "leaf": 0, "attempts": 1}]}),
    (EVENTS["Verified"], {"damaged": [{"region": "k", "leaf": -1, "attempts": 1}]}),
    (EVENTS["Verified"], {"damaged": [{"region": "k", "leaf": 0, "attempts": 0}]}),
    (EVENTS["Committed"], {"epoch": -1}),
    (EVENTS["Adopted"], {"endpoint": "x" * 4097}),
    (EVENTS["Abort"], {"code": ""}),
]


@pytest.mark.parametrize(
    ("message", "fields"), BAD_FIELDS, ids=lambda one: next(iter(one)) if isinstance(one, dict) else None
)
def test_a_field_out_of_bounds_is_refused(message: m.Message, fields: dict[str, Any]) -> None:
    refused(changed(message, **fields))


@pytest.mark.parametrize("length", [1, 15, 17, 16 * 7 + 8])
def test_a_part_of_a_digest_is_refused(length: int) -> None:
    with pytest.raises(FramingError, match="a multiple of 16"):
        m.decode(changed(EVENTS["TablePart"], digests=bytes(length)))


@given(st.binary(max_size=200))
@example(b"\xd9\x01\xff")
def test_random_bytes_are_refused_as_framing(data: bytes) -> None:
    for candidate in (data, bytes([m.VERSION]) + data):
        try:
            m.decode(candidate)
        except FramingError:
            continue
        raise AssertionError("random bytes were taken for a message")


@given(st.sampled_from([*MESSAGES, *VARIANTS[:4], *VARIANTS[7:]]), st.data())
def test_a_damaged_message_is_refused_or_is_another_message(message: m.Message, data: st.DataObject) -> None:
    """Bytes flipped, left out or put in: either a well-formed message comes out, or FramingError."""
    raw = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1)) if raw else 0
        kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
        if kind == "flip" and raw:
            raw[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[place:]
        elif kind == "drop":
            del raw[place : place + 1]
        else:
            raw.insert(place, data.draw(st.integers(0, 255)))
    try:
        found = m.decode(bytes(raw))
    except FramingError:
        return
    assert isinstance(found, KINDS)


EXTENSIONS = [b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd4\x05\x00", b"\xc7\x00\xff"]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_msgpack_extensions_in_free_fields_harm_nobody(extension: bytes) -> None:
    body = msgspec.msgpack.encode({"t": "Rejected", "code": "x", "message": "y", "details": {"a": None}})
    assert body.endswith(b"\xc0")
    data = bytes([m.VERSION]) + body[:-1] + extension
    try:
        found = m.decode(data)
    except FramingError:
        return
    assert isinstance(found, m.Rejected)


def test_a_rejection_keeps_its_class_code_and_details() -> None:
    error = rejection_error(m.Rejected(code="no-worker", message="nobody", details={"retry_after_ms": 5}))
    assert type(error) is NoWorkerError
    assert (error.message, error.details) == ("nobody", {"retry_after_ms": 5})
    assert type(rejection_error(m.Rejected(code="manifest", message="m"))) is ManifestError


@pytest.mark.parametrize("code", ["no-worker", "a-later-version-knows", "config", "__class__"])
def test_no_rejection_can_break_the_source(code: str) -> None:
    """Details are the peer's: names of parameters and other oddities among them are only details."""
    details = {"message": "m", "self": 1, "reason": "r", "code": "c", "": None, "args": [], "details": {}}
    error = rejection_error(m.Rejected(code=code, message="no", details=details))
    assert error.message == "no"
    assert error.details.items() >= (details | {"reason": error.details["reason"]}).items()


def test_an_unknown_rejection_names_its_code() -> None:
    error = rejection_error(m.Rejected(code="a-later-version-knows", message="no"))
    assert type(error) is RejectedError
    assert error.details["reason"] == "a-later-version-knows"


def test_secrets_and_bytes_stay_bytes() -> None:
    begin = m.decode(m.encode(BEGIN))
    assert isinstance(begin, m.Begin)
    assert isinstance(begin.lanes[0], m.LaneOffer)
    assert isinstance(begin.lanes[0].token, bytes)
    hello = m.decode(m.encode(HELLO))
    assert isinstance(hello, m.Hello)
    assert isinstance(hello.manifest, Manifest)


def test_a_part_tells_of_digests_or_of_leaves_that_are_shown() -> None:
    assert m.TablePart(number=1, first=3, digests=bytes(32)).leaves == 2
    assert m.decode(m.encode(shown := m.TablePart(number=1, first=3, shown=7))) == shown
    assert shown.leaves == 7
    with pytest.raises(FramingError, match="shown"):
        m.decode(m.encode(m.TablePart(number=1, first=0, digests=bytes(16), shown=1)))
