"""Which decoder in C is in use: by the environment, the processor, what was compiled, and what it gives."""

from __future__ import annotations

import _ctypes
import importlib.machinery
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from datapipe import native
from datapipe.errors import SettingError
from datapipe.loaders import native_pixels


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test chooses for itself, and leaves the choice of the process as it was."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    for function in (native.choose, native_pixels.choose_native):
        function.cache_clear()
    yield
    for function in (native.choose, native_pixels.choose_native):
        function.cache_clear()


def test_the_best_library_is_chosen():
    name = native.VECTORS.get(platform.machine(), "")
    try:
        native.open_library(name)
    except native.UnusableError as error:
        pytest.skip(str(error))
    choice = native_pixels.choose_native()
    assert choice.native is not None
    assert choice.native.name == name and str(choice) == f"version {native.VERSION} for {name.upper()}"


def test_the_environment_chooses(library, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "plain")
    assert native.choose().native.name == native.PLAIN
    assert str(native.choose()) == f"version {native.VERSION} without vectors"
    native.choose.cache_clear()
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native.choose() == (None, "DATAPIPE_NATIVE=0")
    native.choose.cache_clear()
    monkeypatch.setenv(native.VARIABLE, "no")
    with pytest.raises(SettingError, match=r"DATAPIPE_NATIVE: 'no'; allowed: 0 .*, 1, plain "):
        native.choose()


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    choice = native_pixels.choose_native()
    assert choice.native is None and "was not compiled when this package was installed; to build it" in choice.reason


def test_a_processor_without_avx2(library, monkeypatch):
    """The plain library says so: another one would end the process."""
    monkeypatch.setattr(native.Native, "has_avx2", lambda self: False)
    choice = native.choose()
    assert choice.native is None and "this processor has no AVX2, and libraries are faster without" in choice.reason


def test_a_processor_without_vectors(library, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert "this processor has no AVX2 or NEON, and" in str(native.choose()) and native.choose().native is None


@pytest.mark.parametrize("content", ["another library", "no library"])
def test_a_foreign_file_beside_it(tmp_path, monkeypatch, content):
    path = Path(_ctypes.__file__)
    if content == "no library":
        path = tmp_path / "_plain.so"
        path.write_bytes(b"#!/bin/sh\n")
    spec = importlib.machinery.ModuleSpec("_plain", None, origin=str(path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    choice = native.choose()
    assert choice.native is None and choice.reason.startswith(f"{path} is not a library of this package: ")


def test_where_nothing_can_be_written():
    """As in a package that an administrator has installed; Python itself does without the bytecode (-B)."""
    command = [sys.executable, "-B", Path(__file__).parent / "children" / "choose.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"[] {native.choose()}\n"


def test_a_process_ends_while_a_daemon_thread_decodes(library):
    """As one whose training fails: the thread's memory is there as long as the process is."""
    subprocess.run([sys.executable, Path(__file__).parent / "children" / "ends_early.py", library.name], check=True)


def test_a_library_of_another_version(library, monkeypatch):
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    choice = native.choose()
    assert choice.native is None
    assert f"is of version {native.VERSION - 1}, and this package of {native.VERSION}; to build it" in choice.reason


@pytest.mark.parametrize("what", ["torch", "libjpeg-turbo"])
def test_pixels_that_differ(library, monkeypatch, caplog, what):
    """As after an update of torch that resizes in another way, or of libjpeg-turbo."""
    if what == "torch":
        resize = native_pixels.crop_resize_flip

        def differing(pixels, box, flip, out):
            resize(pixels, box, flip, out)
            out[3, 4, 1] ^= 1

        monkeypatch.setattr(native_pixels, "crop_resize_flip", differing)
    else:
        decode = native_pixels.decode_jpeg
        monkeypatch.setattr(native_pixels, "decode_jpeg", lambda *args: decode(*args) ^ np.uint8(1))
    for _ in range(2):
        assert native_pixels.choose_native().native is None
    (record,) = caplog.records
    assert f"the decoder in C is not used: it does not {'resize' if what == 'torch' else 'decode'} as" in record.message
    assert what in record.message
