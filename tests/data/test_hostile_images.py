"""Only the promised image formats are opened, whatever a file's name says, and each failure is one line."""

from __future__ import annotations

import ast
import io
import random
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from PIL import Image

import metapretrain
from metapretrain.data.image_folder import FORMATS, read_images
from metapretrain.errors import InputError


def drawn(kind: str) -> bytes:
    """A small picture of a format, with an EXIF part where the format has one."""
    file, picture = io.BytesIO(), Image.effect_noise((16, 16), 80).convert("RGB")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x011A] = 6, "a maker", 72.0  # turned, as a camera says it
    if kind == "GIF":
        picture = picture.convert("P")
    picture.save(file, kind, **({"exif": exif} if kind in {"JPEG", "PNG", "TIFF", "WEBP"} else {}))
    return file.getvalue()


def refusal(file: Path) -> str:
    """What is said of a file; "" where it is read."""
    try:
        read_images([file], 8)
    except InputError as error:
        said = str(error)
        assert "\n" not in said and str(file) in said
        return said
    return ""


def test_a_program_of_postscript_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    for name in ("run", "call", "check_call", "check_output", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *words, **_: started.append(words))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "EPS")
    (tmp_path / "x.png").write_bytes(file.getvalue())
    assert "of no known image format" in refusal(tmp_path / "x.png") and not started


@pytest.mark.parametrize("kind", ["AVIF", "DDS", "ICNS", "ICO", "JPEG2000", "PCX", "SGI", "TGA"])
def test_formats_that_are_not_promised_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    Image.new("RGB", (32, 32)).save(file, kind)
    (tmp_path / "x.png").write_bytes(file.getvalue())
    assert ", ".join(FORMATS) in refusal(tmp_path / "x.png")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_pictures_are_one_line(kind: str, tmp_path: Path) -> None:
    whole, draw = drawn(kind), random.Random(kind)
    (tmp_path / "x.png").write_bytes(whole)
    assert not refusal(tmp_path / "x.png")
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(min(len(data), draw.choice([64, 256, 10**6])))] = draw.randrange(256)
        (tmp_path / "x.png").write_bytes(data if draw.random() < 0.7 else data[: draw.randrange(len(data))])
        refusal(tmp_path / "x.png")


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(content)
    assert "3600000000 pixels" in refusal(tmp_path / "x.png")


def test_every_place_that_opens_a_picture_names_the_formats() -> None:
    calls = 0
    for file in Path(metapretrain.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
                calls += 1
                assert "formats" in {keyword.arg for keyword in node.keywords}, f"{file}:{node.lineno}"
    assert calls >= 3
