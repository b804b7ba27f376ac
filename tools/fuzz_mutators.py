"""Mutators of the fuzzer: from the bytes of an intact file, and a random generator, to those of a hostile one.

Every format has the general ones (flipped bits, missing and repeated parts, numbers and names in text) and its own:
structure of JSON, tables of CSV, entities of XML, members and headers of archives, sizes of pictures, opcodes of
pickles. All randomness comes from the generator, so a case can be repeated from its number.
"""

import io
import json
import pickle
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Rng = random.Random
Mutator = Callable[[bytes, Rng], bytes]

CANARY = "canary"
"""Name of the file that code in a hostile input would create in the working folder."""
NUMBERS = (
    "nan", "NaN", "inf", "-inf", "Infinity", "-1", "-0.0", "0", "1e30", "-1e30", "1e308", "1e999", "1e-320", "0.5",
    "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1" + "0" * 400,
    "9" * 5000, "0x10", "1_000", "--1", "", "true", "null",
)  # fmt: skip
NAMES = (
    "../../escaped", "../escaped.txt", "/", ".", "..", "", " ", "a/b", "a\\b", "x" * 300, "x" * 70_000,
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "line\nbreak", "tab\there", "\r", "\u202eright to left", "e\u0301", "\ud800", "nul\0byte",
    "CON",
    "-rf", "--help", "$(touch canary)", "`touch canary`", "; touch canary", "{{7*7}}", "<script>alert(1)</script>",
    "<b>&amp;", "%s%n", "'\"", "canary:Name", "os:system", "file:///etc/passwd", "~root", "*", "?", "[a", "classes.txt",
    "photo0", "photo0.jpg", "\u0660\u0661", "🎈",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_./-]{2,}")
_DEEP = 3000


def mutate(content: bytes, suffix: str, rng: Rng) -> tuple[bytes, str]:
    """A mutated file and the names of the mutators; ``suffix`` of its name tells the format."""
    used = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        own = OWN.get(suffix, ())
        mutator = rng.choice(own if own and rng.random() < 0.6 else GENERAL + (TEXT if suffix in TEXTS else ()))
        used.append(mutator.__name__)
        try:
            content = mutator(content, rng)
        except (
            ValueError,
            KeyError,
            IndexError,
            OSError,
            EOFError,
            RecursionError,
            struct.error,
            zlib.error,
            zipfile.BadZipFile,
        ):
            content = flip_bits(content, rng)  # an earlier mutator left nothing that this one could parse
    return content, "+".join(used)


# ---------------------------------------------------------------- bytes


def flip_bits(content: bytes, rng: Rng) -> bytes:
    """Flip up to eight bits, more often near the beginning, where headers are."""
    changed = bytearray(content or b"\0")
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(min(len(changed), rng.choice((32, 256, len(changed)))))
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content: bytes, rng: Rng) -> bytes:
    """Cut the end off."""
    return content[: rng.randint(0, len(content))]


def empty(_: bytes, __: Rng) -> bytes:
    """No content at all."""
    return b""


def insert_noise(content: bytes, rng: Rng) -> bytes:
    """Insert random bytes."""
    place = rng.randint(0, len(content))
    return content[:place] + rng.randbytes(rng.choice((1, 4, 64, 5000))) + content[place:]


def remove_part(content: bytes, rng: Rng) -> bytes:
    """Remove a range of bytes."""
    first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
    return content[:first] + content[last:]


def repeat_part(content: bytes, rng: Rng) -> bytes:
    """Repeat a range of bytes, up to a megabyte."""
    first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
    part = content[first:last]
    times = min(rng.choice((1, 2, 50, 1000)), (1 << 20) // max(1, len(part)) + 1)
    return content[:last] + part * times + content[last:]


def zero_part(content: bytes, rng: Rng) -> bytes:
    """Zeros in place of a range, as a file system leaves after a crash."""
    first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
    return content[:first] + bytes(last - first) + content[last:]


def extreme_integer(content: bytes, rng: Rng) -> bytes:
    """An integer at the limits of its type in place of two to eight bytes."""
    size = rng.choice(("H", "I", "Q"))
    width = struct.calcsize(size)
    value = rng.choice(
        (0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1), (1 << (8 * width - 1)) - 1, 0x10000 % (1 << 8 * width))
    )
    place = rng.randint(0, max(0, min(len(content), rng.choice((64, 512, len(content)))) - width))
    return content[:place] + struct.pack(rng.choice("<>") + size, value) + content[place + width :]


def another_format(_: bytes, rng: Rng) -> bytes:
    """The beginning of a file of another format."""
    starts = (
        b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x80\x04\x95",
        b"\x1f\x8b\x08",
        b"MATLAB 5.0 MAT-file", b"\x89HDF\r\n\x1a\n", b"GIF89a", b"II*\0", b"RIFF\0\0\0\0WEBP", b"BM", b"%PDF-1.4",
        b"\x7fELF", b"<?xml version='1.0'?>", b"{", b"[[", b"\xef\xbb\xbf", b"\xff\xfe",
    )  # fmt: skip
    return rng.choice(starts) + rng.randbytes(rng.choice((0, 16, 3000)))


# ---------------------------------------------------------------- text


def edit_number(content: bytes, rng: Rng) -> bytes:
    """Another number in place of one."""
    return _replace_match(content, _NUMBER, rng.choice(NUMBERS).encode(), rng)


def edit_name(content: bytes, rng: Rng) -> bytes:
    """A hostile name in place of a word."""
    return _replace_match(content, _WORD, rng.choice(NAMES).encode("utf-8", "surrogatepass"), rng)


def shuffle_lines(content: bytes, rng: Rng) -> bytes:
    """Remove, repeat, swap or join lines."""
    lines = content.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case _:
            lines[place] = lines[place].rstrip(b"\r\n")
    return b"".join(lines)


def long_line(content: bytes, rng: Rng) -> bytes:
    """A line of 200 kB."""
    place = rng.randint(0, len(content))
    return content[:place] + rng.choice((b" ", b"a", b",", b"\t", b"0", b"[", b'"')) * 200_000 + content[place:]


def other_encoding(content: bytes, rng: Rng) -> bytes:
    """The text in another encoding, or with a byte order mark."""
    text = content.decode("utf-8")
    if rng.random() < 0.3:
        return b"\xef\xbb\xbf" + content
    return text.encode(rng.choice(("utf-16", "utf-32", "latin-1")), "replace")


def _replace_match(content: bytes, pattern: re.Pattern[bytes], new: bytes, rng: Rng) -> bytes:
    found = list(pattern.finditer(content))
    match = found[rng.randrange(len(found))]
    return content[: match.start()] + new + content[match.end() :]


# ---------------------------------------------------------------- JSON and its relatives


def edit_json(content: bytes, rng: Rng) -> bytes:
    """Change one value of a JSON document: another type, another number, a hostile name, a missing or new key."""
    document = json.loads(content)
    places = list(_places(document))
    holder, key = places[rng.randrange(len(places))]
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = rng.choice((None, True, [], {}, "", 0, -1, 0.5, [[]], {"": None}, [1, 2, 3, 4], "text"))
        case 2:
            holder[key] = rng.choice(
                (float("nan"), float("inf"), -1e30, 1e308, 2**63, 2**64, 10**400, -(2**31), 1e-320)
            )
        case 3:
            holder[key] = rng.choice(NAMES)
        case 4:
            other, other_key = places[rng.randrange(len(places))]
            holder[key] = json.loads(json.dumps(other[other_key]))
        case _:
            holder[key] = [holder[key]] * rng.choice((0, 2, 3, 2000))
    return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def edit_json_keys(content: bytes, rng: Rng) -> bytes:
    """Rename a key, or give two values one key."""
    document = json.loads(content)
    found = [(holder, key) for holder, key in _places(document) if isinstance(holder, dict)]
    holder, key = found[rng.randrange(len(found))]
    value = holder.pop(key) if rng.random() < 0.7 else holder[key]
    holder[rng.choice((*NAMES, "id", "__proto__", "__class__"))] = value
    return json.dumps(document).encode("utf-8", "surrogatepass")


def nested(content: bytes, rng: Rng) -> bytes:
    """Thousands of brackets within each other, alone or in place of a value."""
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opening * _DEEP + b"1" + closing * (_DEEP if rng.random() < 0.7 else 0)
    return deep if rng.random() < 0.5 else _replace_match(content, _NUMBER, deep, rng)


def _places(value: Any) -> Any:
    """Every place of a document as (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def edit_json_line(content: bytes, rng: Rng) -> bytes:
    """``edit_json`` on one line of a file with a document per line."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = rng.choice((edit_json, edit_json_keys, nested, edit_number))(lines[place], rng)
    return b"\n".join(lines) + b"\n"


def edit_toml(content: bytes, rng: Rng) -> bytes:
    """Another value for a key, a key or table twice, or one that is unknown."""
    lines = content.decode().splitlines()
    keys = [i for i, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    place = keys[rng.randrange(len(keys))]
    name = lines[place].partition("=")[0].strip()
    match rng.randrange(4):
        case 0:
            lines[place] = f"{name} = {rng.choice((*NUMBERS, '[]', '{}', '[[1]]', 'false', '1979-05-27'))}"
        case 1:
            lines[place] = f"{name} = {json.dumps(rng.choice(NAMES))}"
        case 2:
            lines.insert(place, lines[place])
        case _:
            lines[place] = f"{name} = {'[' * _DEEP}{']' * _DEEP}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- CSV, XML


def edit_csv(content: bytes, rng: Rng) -> bytes:
    """Another cell, or a row with more or fewer of them."""
    rows = [line.split(b",") for line in content.splitlines()]
    row = rows[rng.randrange(len(rows))]
    place = rng.randrange(len(row))
    new = rng.choice((*NAMES, *NUMBERS, '"', '"a""b"', '"open')).encode("utf-8", "surrogatepass")
    match rng.randrange(4):
        case 0:
            row[place] = new
        case 1:
            row.insert(place, new)
        case 2:
            del row[place]
        case _:
            row[place] = b'"' + new + b'"'
    return b"\n".join(b",".join(row) for row in rows) + b"\n"


def many_rows(content: bytes, rng: Rng) -> bytes:
    """20,000 rows with a class each."""
    rows = b"".join(b"photo0.jpg,class%d\n" % i for i in range(20_000))
    return content + rows


def xml_entities(content: bytes, rng: Rng) -> bytes:
    """Entities that expand to gigabytes, or that name a file."""
    laughs = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))
    bomb = f'<!DOCTYPE a [<!ENTITY e0 "ha">{laughs}]>'
    outside = '<!DOCTYPE a [<!ENTITY e9 SYSTEM "file:///etc/passwd">]>'
    text = content.decode().replace("<name>", "<name>&e9;", 1)
    return (rng.choice((bomb, outside)) + text).encode()


def xml_elements(content: bytes, rng: Rng) -> bytes:
    """Remove, repeat or nest an element."""
    tags = list(re.finditer(rb"<([a-z]+)>[^<]*</\1>", content))
    tag = tags[rng.randrange(len(tags))]
    whole = tag.group()
    name = tag.group(1)
    new = rng.choice(
        (b"", whole * 2, b"<%s>" % name * _DEEP + b"</%s>" % name * _DEEP, b"<%s/>" % name, b"<%s>" % name)
    )
    return content[: tag.start()] + new + content[tag.end() :]


# ---------------------------------------------------------------- archives and arrays


def edit_archive(content: bytes, rng: Rng) -> bytes:
    """Change a member of a zip archive (.npz, .pth): its bytes, its name, twice, missing, or zeros that expand."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    place = rng.randrange(len(members))
    name, data = members[place]
    match rng.randrange(6):
        case 0:
            members[place] = (name, rng.choice(GENERAL)(data, rng))
        case 1:
            members[place] = (name, edit_array_header(data, rng) if data[:1] == b"\x93" else edit_pickle(data, rng))
        case 2:
            del members[place]
        case 3:
            members.append((rng.choice((name, "../escaped", "/escaped", "x" * 300)), data))
        case 4:
            members[place] = (name, data[:128] + bytes(30_000_000))
        case _:
            members[place] = (name, hostile_pickle(rng))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.5 else zipfile.ZIP_STORED) as archive:
        for member, data in members:
            archive.writestr(zipfile.ZipInfo(member), data)
    return out.getvalue()


def edit_array_header(content: bytes, rng: Rng) -> bytes:
    """Another shape, type or order in the header of an .npy file."""
    start = content.index(b"{")
    end = content.index(b"}", start) + 1
    header = content[start:end]
    lengths = (b"-1", b"9223372036854775807", b"99999999999999999999", b"1e3", b"0", b"(" * 200)
    types = (b"'|O'", b"'<f8'", b"'<U99999'", b"'<i1'", b"[('a','<f4')]", b"'<m8'", b"'x'")
    old, new = rng.choice((
        (rb"\(\d+", b"(" + rng.choice(lengths)),
        (rb"'<?\|?[a-z]\d+'", rng.choice(types)),
        (rb"False", rng.choice((b"True", b"None", b"1/0", b"__import__('os').system('touch canary')"))),
        (rb"'shape'", b"'form'"),
        (rb"\}", b""),
        (rb"\{", b"{" * 500),
    ))  # fmt: skip
    changed = re.sub(old, lambda _: new, header, count=1)
    if rng.random() < 0.7:
        changed = changed.ljust(len(header))[: len(header)]  # the length that the file states
    return content[:start] + changed + content[end:]


def edit_safetensors(content: bytes, rng: Rng) -> bytes:
    """Another length of the header, or an edited header."""
    if rng.random() < 0.3:
        return struct.pack("<Q", rng.choice((0, 1, 8, 1 << 31, 1 << 62, (1 << 64) - 1))) + content[8:]
    length = int(struct.unpack("<Q", content[:8])[0])
    header = rng.choice((edit_json, edit_json_keys, edit_number))(content[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def edit_mat(content: bytes, rng: Rng) -> bytes:
    """Edit the content of a compressed element, or let one expand to 60 MB."""
    place = 128
    kind, size = struct.unpack("<II", content[place : place + 8])
    if kind != 15:
        raise ValueError("not compressed")
    inner = zlib.decompress(content[place + 8 : place + 8 + size])
    if rng.random() < 0.8:
        inner = rng.choice((flip_bits, extreme_integer, truncate, repeat_part))(inner, rng)
    else:
        inner += bytes(60_000_000)
    packed = zlib.compress(inner)
    return content[:place] + struct.pack("<II", 15, len(packed)) + packed + content[place + 8 + size :]


# ---------------------------------------------------------------- pictures


def edit_png(content: bytes, rng: Rng) -> bytes:
    """Another header (size, depth, color type) with a right checksum."""
    header = list(struct.unpack(">IIBBBBB", content[16:29]))
    place = rng.randrange(len(header))
    large = (0, 1, 65_535, 100_000, 2**31 - 1, 2**32 - 1)
    header[place] = rng.choice(large if place < 2 else (0, 1, 2, 3, 4, 6, 8, 16, 255))
    packed = struct.pack(">IIBBBBB", *header)
    return content[:16] + packed + struct.pack(">I", zlib.crc32(b"IHDR" + packed)) + content[33:]


def edit_jpeg(content: bytes, rng: Rng) -> bytes:
    """Another size, number of components or orientation."""
    place = content.index(b"\xff\xc0")
    if rng.random() < 0.5:
        size = struct.pack(">HH", *(rng.choice((0, 1, 7, 40, 65_500, 65_535)) for _ in range(2)))
        return content[: place + 5] + size + content[place + 9 :]
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">H", rng.choice((0, 3, 6, 9, 65535)))
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + exif + bytes(6)
    return content[:2] + segment + content[2:]


# ---------------------------------------------------------------- pickles


def hostile_pickle(rng: Rng) -> bytes:
    """A pickle that would create the canary, if it were loaded as pickle.load does."""
    calls = (
        b"cos\nsystem\n(Vtouch canary\ntR.", b"cposix\nsystem\n(Vtouch canary\ntR.",
        b"cbuiltins\nexec\n(Vopen('canary','w')\ntR.", b"cbuiltins\neval\n(Vopen('canary','w')\ntR.",
        b"cbuiltins\nopen\n(Vcanary\nVw\ntR.", b"(Vcanary\nVw\nibuiltins\nopen\n.", b"cpathlib\nPath\n(Vcanary\ntR.",
        b"csubprocess\nPopen\n((lVtouch\naVcanary\natR.", b"cnumpy.testing\n_private\n.", b"ccanary\nName\n.",
        b"ctorch.serialization\nload\n(Vcanary\ntR.", b"cnumpy\nload\n(Vcanary\ntR.",
        b"cshutil\ncopy\n(V/etc/hostname\nVcanary\ntR.",
    )  # fmt: skip
    return rng.choice(calls)


def replace_by_pickle(_: bytes, rng: Rng) -> bytes:
    """A hostile pickle in place of the file."""
    return hostile_pickle(rng)


def edit_pickle(content: bytes, rng: Rng) -> bytes:
    """Insert, repeat or change opcodes."""
    opcodes = b"(.0124NQRTUVX]abcdeghijlopqrstu}" + bytes(range(0x80, 0x99))
    changed = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(changed))
        if rng.random() < 0.5:
            changed[place] = rng.choice(opcodes)
        else:
            changed.insert(place, rng.choice(opcodes))
    return bytes(changed)


def odd_pickle(_: bytes, rng: Rng) -> bytes:
    """A pickle of plain values that lead astray: one that contains itself, is deep, huge, or of another shape."""
    itself: dict[str, Any] = {}
    itself["self"] = itself
    deep: list[Any] = []
    for _level in range(400):
        deep = [deep]
    values: Sequence[Any] = (
        itself, deep, {"boxes": itself, "ids": [0]}, {"boxes": [], "ids": []}, {"blobs": itself}, [], None, 10**4000,
        float("nan"),
        {"boxes": [[[0, 0, float("nan"), 1]]], "ids": ["photo0"]},
        {"boxes": [[[0, 0, 1e30, 2**70]]], "ids": ["photo0"]},
        {"boxes": [None], "ids": [None]}, {1: 2}, {"boxes": [[[1]]], "ids": [["photo0"]]}, {"state_dict": {"a": 1}},
        "text", {"": b"x"},
    )  # fmt: skip
    return pickle.dumps(rng.choice(values), rng.choice((2, 4)))


# ---------------------------------------------------------------- formats

GENERAL: tuple[Mutator, ...] = (
    flip_bits, flip_bits, truncate, empty, insert_noise, remove_part, repeat_part, zero_part, extreme_integer,
    another_format,
)  # fmt: skip
TEXT: tuple[Mutator, ...] = (edit_number, edit_number, edit_name, edit_name, shuffle_lines, long_line, other_encoding)
TEXTS = {".json", ".jsonl", ".toml", ".csv", ".xml", ".txt", ".yaml"}
OWN: dict[str, tuple[Mutator, ...]] = {
    ".json": (edit_json, edit_json, edit_json, edit_json_keys, nested),
    ".jsonl": (edit_json_line,),
    ".toml": (edit_toml,),
    ".csv": (edit_csv, edit_csv, many_rows),
    ".xml": (xml_entities, xml_elements, xml_elements, edit_number),
    ".txt": (edit_number, edit_name),
    ".yaml": (edit_number, edit_name),
    ".npz": (edit_archive,),
    ".pth": (edit_archive, replace_by_pickle, odd_pickle),
    ".npy": (edit_array_header,),
    ".safetensors": (edit_safetensors,),
    ".mat": (edit_mat,),
    ".png": (edit_png,),
    ".jpg": (edit_jpeg,),
    ".pkl": (replace_by_pickle, edit_pickle, odd_pickle),
}
"""Mutators of one format, beside the general ones."""
